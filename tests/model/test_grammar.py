import itertools
import json
import random
import re
import string
from dataclasses import replace

import jsonschema
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from contbatch_cli.core.batch import Logits, ScheduledSequence
from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId, SamplingParams
from contbatch_cli.core.stop import first_of, standard_stop_rule
from contbatch_cli.data.response_format import check_response_format, grammar_text
from contbatch_cli.errors import RowError
from contbatch_cli.model.grammar import GrammarMasks, LazyGrammarMasks
from contbatch_cli.model.sampler import Sampler

EOS, IM_END = 0, 1


def make_tokenizer() -> tokenizers.Tokenizer:
    """A small byte-level BPE with tokens that cross the borders of JSON's parts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase + " é日", k=6)) for _ in range(40)]
    texts = [json.dumps({word: [rng.randrange(1000), True, None, -1.5e3, word]}, ensure_ascii=False) for word in words]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.get_vocab_size() + 19  # a padded embedding: the last ids have no text


def schema_format(schema: dict) -> str:
    return json.dumps({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})


TEXT = {"type": "string", "maxLength": 12}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def object_of(**properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS = [
    object_of(name=TEXT),
    object_of(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    object_of(price={"type": "number", "minimum": 0, "exclusiveMaximum": 10}),
    object_of(ok={"type": "boolean"}, why={"type": "null"}),
    object_of(tags={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}),
    object_of(colour={"enum": ["red", "green", "sky blue", "żółty"]}),
    object_of(point=object_of(x=DIGIT, y=DIGIT)),
    object_of(rows={"type": "array", "items": object_of(a=DIGIT), "maxItems": 3}),
    {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 5},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"},
    {"type": "integer", "minimum": -20, "maximum": 20},
    {"const": {"fixed": [1, 2, "three"]}},
    {"enum": [1, "one", None, True, [1]]},
    object_of(value={"anyOf": [DIGIT, {"type": "boolean"}, {"type": "string", "maxLength": 4}]}),
    {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["b"], "additionalProperties": False},
    {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "prefixItems": [DIGIT, TEXT], "minItems": 2, "items": False}}},
    object_of(date={"type": "string", "format": "date"}),
    object_of(id={"type": "string", "format": "uuid"}),
    object_of(scores={"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 2, "maxItems": 2}),
]


class Run:
    """Rows driven through sampler and stop rules over random logits, as the engine would."""

    def __init__(
        self, formats: list[str | None], masks: GrammarMasks, eos_token_ids: tuple[int, ...] = (EOS, IM_END), **params
    ):
        self.masks, self.sampler = masks, Sampler(VOCAB, masks=masks)
        self.rule = first_of(masks.stop_rule, standard_stop_rule)
        self.generator = torch.Generator().manual_seed(7)
        base = SamplingParams(**{"temperature": 1.0, "max_tokens": 120, "eos_token_ids": eos_token_ids, **params})
        self.requests = [
            Request.from_prompt(RequestId(i), [5, 6, i % 50 + 7], replace(base, seed=i, response_format=response_format))
            for i, response_format in enumerate(formats)
        ]

    def step(self) -> bool:
        active = [request for request in self.requests if request.finish is None]
        if active:
            # Logits that are a function of row and position, whoever else runs.
            noise = torch.randn(len(self.requests), VOCAB, generator=self.generator) * 2
            logits = noise[[request.request_id.row for request in active]]
            for request, result in zip(active, self.sampler.sample(logits, [plan(r) for r in active]), strict=True):
                if result.error is not None:
                    request.finish = Finish(FinishReason.ERROR, message=result.error)
                else:
                    request.token_ids += result.token_ids
                    request.finish = self.rule(request)
        return bool(active)

    def all(self) -> list[Request]:
        while self.step():
            pass
        return self.requests


def plan(request: Request) -> ScheduledSequence:
    history = tuple(request.token_ids)
    end, prompt = len(history), request.num_prompt_tokens
    return ScheduledSequence(
        request.request_id, history[-1:], end - 1, (), prompt, request.sampling, True, Logits.LAST, history
    )


def make_masks(eos_token_ids: tuple[int, ...] = (EOS, IM_END)) -> GrammarMasks:
    return GrammarMasks(TOKENIZER.to_str(), VOCAB, eos_token_ids, grammar_text, num_threads=1)


def text_of(request: Request) -> str:
    return TOKENIZER.decode([token for token in request.output_ids if token not in (EOS, IM_END)])


def check_json(request: Request, schema: dict) -> None:
    value = json.loads(text_of(request))
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)


@pytest.mark.parametrize("eos_token_ids", [(EOS, IM_END), (IM_END,), ()])
def test_every_stop_text_validates_over_20_schemas(eos_token_ids):
    """160 rows of random logits together; a model without EOS ids stops as well."""
    schemas = SCHEMAS * 8
    run = Run([schema_format(schema) for schema in schemas], make_masks(eos_token_ids), eos_token_ids)
    reasons = []
    for request, schema in zip(run.all(), schemas, strict=True):
        reasons.append(request.finish.reason)
        assert request.finish.reason in (FinishReason.STOP, FinishReason.LENGTH), request.finish
        if request.finish.reason is FinishReason.STOP:
            assert request.finish.stop_reason is None
            check_json(request, schema)
    assert reasons.count(FinishReason.STOP) >= 0.95 * len(reasons)


def test_texts_differ_and_cover_what_the_schema_allows():
    run = Run([schema_format({"enum": ["a", "b", 3, None]})] * 60, make_masks())
    assert {text_of(request) for request in run.all()} == {'"a"', '"b"', "3", "null"}


def test_json_object_regex_and_choice():
    regex = r"[A-Z][a-z]{1,8}/\d{2}"
    choices = ["yes", "no", 'a "quoted" / \\ choice', "日本", "line\nbreak"]
    formats = [
        json.dumps({"type": "regex", "pattern": regex}),
        json.dumps({"type": "regex", "regex": regex}),
        json.dumps({"type": "choice", "choices": choices}),
        json.dumps({"type": "json_object"}),
    ]
    run = Run(formats * 10, make_masks(), max_tokens=300)
    for i, request in enumerate(run.all()):
        text = text_of(request)
        if i % 4 < 2:
            assert request.finish.reason is FinishReason.STOP and re.fullmatch(regex, text)
        elif i % 4 == 2:
            assert request.finish.reason is FinishReason.STOP and text in choices
        elif request.finish.reason is FinishReason.STOP:
            assert isinstance(json.loads(text), dict)
    assert len({text_of(request) for request in run.requests[2::4]}) > 2


def test_rows_without_a_grammar_are_as_without_grammars():
    formats = [schema_format(SCHEMAS[i % 20]) if i % 2 else None for i in range(16)]
    mixed = Run(formats, make_masks()).all()
    plain = Run([None] * 16, make_masks()).all()
    for i in range(0, 16, 2):
        assert mixed[i].token_ids == plain[i].token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lost_matcher_is_rebuilt_from_history(temperature):
    """Preemption, eviction and another process: the same tokens without any cache between steps, and from a full one."""
    formats = [schema_format(schema) for schema in SCHEMAS]
    expected = [request.token_ids for request in Run(formats, make_masks(), temperature=temperature).all()]
    forgetful = Run(formats, make_masks(), temperature=temperature)
    rng = random.Random(3)
    while forgetful.step():
        forgetful.masks.forget([r.request_id for r in forgetful.requests if rng.random() < 0.5])
    assert [request.token_ids for request in forgetful.requests] == expected
    stale = Run(formats, forgetful.masks, temperature=temperature)
    assert [request.token_ids for request in stale.all()] == expected


def test_an_old_matcher_of_the_same_id_is_not_taken_for_a_new_run():
    masks = make_masks()
    cut = Run([schema_format(SCHEMAS[1])], masks, max_tokens=4)
    cut.all()
    again = Run([schema_format(SCHEMAS[1])], masks)
    check_json(again.all()[0], SCHEMAS[1])


def test_allowed_tokens_are_those_that_can_go_on():
    """Walks a bounded language, and compares each mask with the texts that begin so."""
    language = {"".join(letters) for n in (2, 3) for letters in itertools.product("ab", repeat=n)} | {"cde"}
    masks, params = make_masks(), SamplingParams(response_format=json.dumps({"type": "choice", "choices": sorted(language)}))
    texts = [TOKENIZER.decode([token]) for token in range(VOCAB)]
    for index, start in enumerate(["", "a", "ab", "aba", "c", "cd", "cde"]):
        output = [TOKENIZER.token_to_id(letter) for letter in start]
        row = ScheduledSequence(RequestId(index), (5,), len(output), (), 1, params, True, Logits.LAST, (5, *output))
        logits = torch.zeros(1, VOCAB)
        masks.prepare([row])
        assert masks.apply(logits, [row]) == {}
        allowed = set(logits[0].isfinite().nonzero()[:, 0].tolist())
        going_on = {token for token, text in enumerate(texts) if text and any(w.startswith(start + text) for w in language)}
        assert allowed == going_on | ({EOS, IM_END} if start in language else set())


def test_completion_ends_the_row_without_an_eos_token():
    run = Run([json.dumps({"type": "choice", "choices": ["ab"]})], make_masks(), min_tokens=50)
    (request,) = run.all()
    assert request.finish == Finish(FinishReason.STOP) and TOKENIZER.decode(request.output_ids) == "ab"


def test_an_open_end_is_ended_by_eos():
    run = Run([json.dumps({"type": "regex", "pattern": "[ab]+"})] * 20, make_masks(), logit_bias=((IM_END, 3.0),))
    for request in run.all():
        assert request.finish == Finish(FinishReason.STOP) and request.output_ids[-1] in (EOS, IM_END)


def test_a_model_without_eos_goes_on_where_it_may():
    """Ids above the tokenizer's, one of which stands for the end inside of the library, are never sampled."""
    run = Run([json.dumps({"type": "regex", "pattern": "[ab]+"})] * 10, make_masks(()), (), max_tokens=60)
    for request in run.all():
        assert request.finish == Finish(FinishReason.LENGTH) and max(request.output_ids) < TOKENIZER.get_vocab_size()


def test_without_the_stop_rule_the_mask_forces_an_eos_id():
    run = Run([json.dumps({"type": "choice", "choices": ["ab", "ba"]})] * 4, make_masks())
    run.rule = standard_stop_rule
    for request in run.all():
        assert request.finish == Finish(FinishReason.STOP) and request.output_ids[-1] in (EOS, IM_END)


def test_a_row_cut_by_max_tokens_has_the_text_so_far():
    (request,) = Run([schema_format(SCHEMAS[1])], make_masks(), max_tokens=3).all()
    assert request.finish == Finish(FinishReason.LENGTH) and text_of(request).startswith("{")


def test_matchers_of_rows_that_are_done_are_dropped():
    """Rows that are cut leave theirs until the sampler is told; Lazy masks pass it on, made or not."""
    run = Run([schema_format(SCHEMAS[1])] * 5, make_masks(), max_tokens=3)
    run.all()
    assert len(run.masks._followers) == 5
    run.sampler.forget([RequestId(0), RequestId(3), RequestId(99)])
    assert sorted(run.masks._followers) == [RequestId(1), RequestId(2), RequestId(4)]
    lazy = LazyGrammarMasks(lambda: run.masks)
    lazy.forget([RequestId(1)])
    assert len(run.masks._followers) == 3, "nothing was made of it yet"
    lazy.stop_rule(run.requests[2])
    lazy.forget([RequestId(1), RequestId(2)])
    assert sorted(run.masks._followers) == [RequestId(4)]


BAD_FORMATS = [
    ({"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}, "Invalid type: foo"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 3, "maximum": 2}}}, "minimum"),
    ({"type": "json_schema", "json_schema": {"schema": False}}, "false allows no value"),
    ({"type": "json_schema"}, "is none of json_schema"),
    ({"type": "regex", "pattern": "a("}, "regex"),
    ({"type": "regex"}, "is none of"),
    ({"type": "choice", "choices": []}, "is none of"),
    ({"type": "choice", "choices": ["a", 1]}, "is none of"),
    ({"type": "xml"}, "is none of"),
]


@pytest.mark.parametrize(("response_format", "part"), BAD_FORMATS)
def test_bad_formats_are_refused_and_fail_their_row_alone(response_format, part):
    with pytest.raises(RowError) as caught:
        check_response_format(response_format)
    assert caught.value.code == "invalid_parameter" and part in caught.value.message and "\n" not in caught.value.message
    run = Run([json.dumps(response_format), schema_format(SCHEMAS[0]), None], make_masks(), max_tokens=40)
    bad, good, _ = run.all()
    assert bad.finish.reason is FinishReason.ERROR and bad.finish.message.startswith("invalid_parameter: ")
    check_json(good, SCHEMAS[0])


def test_good_formats_pass_the_check():
    for schema in [*SCHEMAS, {}, True, {"title": "t", "description": "d", "type": "string", "x-unknown": 1}]:
        check_response_format(schema_format(schema))
    check_response_format({"type": "json_object"})
    check_response_format({"type": "choice", "choices": ["", "a"]})
