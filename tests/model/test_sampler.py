import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as oracle

from contbatch_cli.core.batch import Logits, ScheduledSequence
from contbatch_cli.core.noise import keyed_word as keyed_word_reference
from contbatch_cli.core.noise import noise_bits, stream_key, token_word, uniform
from contbatch_cli.core.request import RequestId, SamplingParams
from contbatch_cli.errors import RowError
from contbatch_cli.model import logits_processors as ours
from contbatch_cli.model import sampler as sampler_module
from contbatch_cli.model.sampler import Sampler, gumbel, keyed_word, prompt_logprobs

VOCAB = 301
NUM_PROMPT = 12


def scheduled(index: int = 0, length: int = 30, vocab: int = VOCAB, sample: int = 0, **params) -> ScheduledSequence:
    """A decode whose history is drawn from its index; its next token has position `length`."""
    rng = random.Random(index)
    history = tuple(rng.randrange(min(vocab, 60)) for _ in range(length))
    sampling = SamplingParams(**params)
    return ScheduledSequence(
        RequestId(index, sample), history[-1:], length - 1, (0,), NUM_PROMPT, sampling, True, Logits.LAST, history
    )


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampled(logits: torch.Tensor, rows: list[ScheduledSequence]) -> list[int]:
    results = Sampler(logits.shape[1]).sample(logits.clone(), rows)
    assert all(result.error is None for result in results), results
    return [result.token_ids[0] for result in results]


# Noise


def test_tensor_noise_is_the_reference_noise():
    rng = random.Random(5)
    keys = [rng.getrandbits(64) for _ in range(500)] + [0, 2**64 - 1, 1 << 63, 1 << 31, 1 << 32]
    tokens = [rng.randrange(200000) for _ in keys]
    words = sampler_module._signed([token_word(token) for token in tokens])
    high = sampler_module._signed([key >> 32 for key in keys])
    low = sampler_module._signed([key & 0xFFFFFFFF for key in keys])
    expected = [keyed_word_reference(token_word(t), k >> 32, k & 0xFFFFFFFF) for t, k in zip(tokens, keys, strict=True)]
    assert (keyed_word(words, high, low).long() & 0xFFFFFFFF).tolist() == expected
    reference = [-math.log(-math.log(uniform(noise_bits(k, t)))) for k, t in zip(keys, tokens, strict=True)]
    torch.testing.assert_close(gumbel(words, high, low), torch.tensor(reference, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_noise_of_different_tokens_is_uncorrelated_over_keys():
    """256 tokens by 8,192 consecutive positions: all 32,640 correlations of the two words' uniforms are like chance's."""
    keys = [stream_key(11, 0, position) for position in range(8192)]
    high = sampler_module._signed([key >> 32 for key in keys])[:, None]
    low = sampler_module._signed([key & 0xFFFFFFFF for key in keys])[:, None]
    words = sampler_module._signed([token_word(token) for token in range(256)])[None, :]
    noise = gumbel(words, high, low)
    correlation = torch.corrcoef(noise.T).fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / math.sqrt(8192)
    lagged = torch.corrcoef(torch.cat((noise[1:, :64], noise[:-1, :64]), 1).T).fill_diagonal_(0)
    assert lagged.abs().max() < 5.5 / math.sqrt(8192)


def slow_draw(logits: torch.Tensor, row: ScheduledSequence) -> int:
    """Gumbel-max over the whole vocabulary, in Python integers and floats."""
    key = stream_key(row.sampling.seed, row.request_id.sample, row.end)
    scores = ((logits - logits.max()) / row.sampling.temperature).tolist()
    perturbed = [s - math.log(-math.log(uniform(noise_bits(key, token)))) for token, s in enumerate(scores)]
    return perturbed.index(max(perturbed))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0, 1000.0])
def test_sampling_equals_the_slow_reference(temperature):
    """Pruning may never lose the winner, also where the distribution is flat and the noise decides alone."""
    rows = [scheduled(i, 20 + i % 9, temperature=temperature, seed=i * 7919, sample=i % 3) for i in range(120)]
    logits = random_logits(120)
    assert sampled(logits, rows) == [slow_draw(logits[i], row) for i, row in enumerate(rows)]


def test_pruning_loses_nothing_in_a_large_vocabulary(monkeypatch):
    vocab = 20000
    rows = [scheduled(i, 40 + i, vocab, temperature=1.5, seed=i) for i in range(60)]
    logits = random_logits(60, 3, vocab)
    logits[30:] -= 20 * (torch.arange(vocab) > 0)  # one peak 20 above the rest: only rare noise overtakes it
    pruned = sampled(logits, rows)
    monkeypatch.setattr(Sampler, "_can_win", lambda self, scores, *_: scores > float("-inf"))
    assert pruned == sampled(logits, rows)


# Frequencies


def chi_square_of(probabilities: torch.Tensor, tokens: list[int]) -> tuple[float, int]:
    """Pearson's statistic and degrees of freedom; cells that expect fewer than 8 are put together."""
    expected = (probabilities.double() * len(tokens)).tolist()
    counts = Counter(tokens)
    assert all(expected[token] > 0 for token in counts), "a token outside of the filters was drawn"
    cells = [(counts[token], e) for token, e in enumerate(expected) if e >= 8]
    cells.append((len(tokens) - sum(c for c, _ in cells), len(tokens) - sum(e for _, e in cells)))
    used = [(c, e) for c, e in cells if e > 1e-6]
    return sum((c - e) ** 2 / e for c, e in used), len(used) - 1


FREQUENCY_CASES = [
    ({"temperature": 1.0}, []),
    ({"temperature": 0.6}, [oracle.TemperatureLogitsWarper(0.6)]),
    ({"temperature": 2.5}, [oracle.TemperatureLogitsWarper(2.5)]),
    ({"temperature": 1.0, "top_k": 7}, [oracle.TopKLogitsWarper(7)]),
    ({"temperature": 1.0, "top_p": 0.8}, [oracle.TopPLogitsWarper(0.8)]),
    ({"temperature": 1.3, "min_p": 0.05}, [oracle.TemperatureLogitsWarper(1.3), oracle.MinPLogitsWarper(0.05)]),
]


@pytest.mark.parametrize(("params", "warpers"), FREQUENCY_CASES)
@pytest.mark.parametrize("axis", ["position", "seed", "sample"])
def test_frequencies_are_the_exact_probabilities(params, warpers, axis):
    draws, vocab = 6000, 50
    logits = random_logits(1, 9, vocab)
    where = {
        "position": lambda i: {"length": NUM_PROMPT + i, "seed": 5},
        "seed": lambda i: {"seed": i},
        "sample": lambda i: {"sample": i, "seed": 5},
    }[axis]
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    rows = []
    for i in range(draws):
        given_ = where(i)
        length, sample = given_.pop("length", 30), given_.pop("sample", 0)
        sampling = SamplingParams(**params, **given_)
        rows.append(ScheduledSequence(RequestId(0, sample), (1,), length - 1, (0,), NUM_PROMPT, sampling, True, Logits.LAST))
    tokens = sampled(logits.expand(draws, vocab).contiguous(), rows)
    statistic, freedom = chi_square_of(torch.softmax(scores[0], -1), tokens)
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom) + 4.5, (statistic, freedom)


def test_samples_and_seeds_differ():
    logits = random_logits(1).expand(200, VOCAB).contiguous()
    by_sample = sampled(logits, [scheduled(0, sample=i, temperature=2.0, seed=1) for i in range(200)])
    by_seed = sampled(logits, [scheduled(0, temperature=2.0, seed=i) for i in range(200)])
    assert len(set(by_sample)) > 20 and len(set(by_seed)) > 20
    assert by_sample != by_seed


# Each processor against transformers' own


def input_ids(row: ScheduledSequence) -> torch.Tensor:
    return torch.tensor([row.history])


EDIT_CASES = [
    (
        ours.apply_repetition_penalty,
        lambda i: {"repetition_penalty": 0.7 + 0.1 * i},
        lambda p: oracle.RepetitionPenaltyLogitsProcessor(p["repetition_penalty"]),
    ),
    (
        ours.add_logit_bias,
        lambda i: {"logit_bias": ((i, 1.5 * i - 4), (i + 40, -100.0), (3 * i + 100, 0.25))},
        lambda p: oracle.SequenceBiasLogitsProcessor({(token,): bias for token, bias in p["logit_bias"]}),
    ),
    (
        ours.mask_bad_words,
        lambda i: {"bad_words": ((i,), (5, 6), *scheduled_tails(i))},
        lambda p: oracle.NoBadWordsLogitsProcessor([list(word) for word in p["bad_words"]]),
    ),
    (
        ours.mask_early_stops,
        lambda i: {"min_tokens": i * 3, "eos_token_ids": (1, 2), "stop_token_ids": (i + 5,)},
        lambda p: oracle.MinNewTokensLengthLogitsProcessor(
            NUM_PROMPT, p["min_tokens"], [*p["eos_token_ids"], *p["stop_token_ids"]]
        ),
    ),
]


def scheduled_tails(index: int) -> list[tuple[int, ...]]:
    """Banned sequences that the row's history has begun, and one longer than it."""
    history = scheduled(index).history
    return [(*history[-2:], 17), (*history[-5:], 18), (*history, 19), (0, *history, 20), (*history[-3:-1], 21)]


@pytest.mark.parametrize(("edit", "params", "make_oracle"), EDIT_CASES)
def test_edits_equal_transformers(edit, params, make_oracle):
    rows = [scheduled(i, **params(i)) for i in range(12)]
    logits = random_logits(12)
    edited = logits.clone()
    edit(edited, rows)
    assert not torch.equal(edited, logits)
    for i, row in enumerate(rows):
        expected = make_oracle(params(i))(input_ids(row), logits[i : i + 1].clone())
        assert torch.equal(edited[i : i + 1], expected), i


def test_count_penalties_are_openai_s_formula():
    rows = [scheduled(i, frequency_penalty=0.3 * i - 1, presence_penalty=0.5 - 0.2 * i) for i in range(6)]
    logits = random_logits(6)
    edited = logits.clone()
    ours.subtract_count_penalties(edited, rows)
    for i, row in enumerate(rows):
        counts = Counter(row.history[NUM_PROMPT:])
        for token in range(VOCAB):
            sampling = row.sampling
            expected = logits[i, token].item() - counts[token] * sampling.frequency_penalty
            expected -= sampling.presence_penalty if counts[token] else 0.0
            assert edited[i, token].item() == pytest.approx(expected, abs=1e-6)
        only_in_prompt = set(row.history[:NUM_PROMPT]) - set(counts)
        assert only_in_prompt and all(edited[i, t] == logits[i, t] for t in only_in_prompt)


def scaled(rows: int, seed: int = 0) -> torch.Tensor:
    logits = random_logits(rows, seed)
    return logits - logits.amax(-1, keepdim=True)


@pytest.mark.parametrize("k", [1, 2, 50, VOCAB, VOCAB + 5])
def test_top_k_equals_transformers(k):
    scores = scaled(20)
    scores[:, 50:60] = scores[:, 40:50]  # ties
    assert torch.equal(ours.top_k_filter(scores.clone(), [k] * 20), oracle.TopKLogitsWarper(k)(None, scores))


@pytest.mark.parametrize("p", [1e-6, 0.01, 0.3, 0.9, 0.999])
def test_min_p_equals_transformers(p):
    scores = scaled(20)
    assert torch.equal(ours.min_p_filter(scores.clone(), [p] * 20), oracle.MinPLogitsWarper(p)(None, scores))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.8, 0.95, 0.999, 0.999999])
def test_top_p_equals_transformers(p):
    """Equal sets; they may differ only by tokens whose cumulative probability is within float32 rounding of p."""
    scores = scaled(40, 4)
    filtered = ours.top_p_filter(scores.clone(), [p] * 40)
    kept, expected = filtered.isfinite(), oracle.TopPLogitsWarper(p)(None, scores).isfinite()
    for i in (kept != expected).any(-1).nonzero()[:, 0].tolist():
        mass = torch.softmax(scores[i].double(), -1)
        assert abs(mass[kept[i] | expected[i]].sum() - mass[kept[i] & expected[i]].sum()) < 1e-6
        assert abs(mass[kept[i] & expected[i]].sum() - p) < 1e-6
    assert torch.equal(filtered[kept], scores[kept])
    assert p > 0.9999 or (kept == expected).all(-1).float().mean() > 0.9


def test_top_p_keeps_the_smallest_set_and_the_lowest_ids_of_equals():
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]]).log()
    scores -= scores.amax(-1, keepdim=True)

    def kept(p: float) -> list[list[int]]:
        filtered = ours.top_p_filter(scores.clone(), [p] * 2)
        return [row.isfinite().nonzero()[:, 0].tolist() for row in filtered]

    assert kept(0.5) == [[0], [0, 1]]
    assert kept(0.51) == [[0, 1], [0, 1, 2]]
    assert kept(0.76) == [[0, 1, 2], [0, 1, 2, 3]]
    assert kept(1e-12) == [[0], [0]]


@pytest.mark.parametrize("p", [0.05, 0.6, 0.999])
def test_top_p_is_the_same_at_every_search_depth(p, monkeypatch):
    """Peaked, flat and tied rows, so that some are settled early and some need the whole vocabulary."""
    scores = scaled(30, 8)
    scores[10:20] /= 20
    scores[20:] = scores[20:].mul(0.3).round().div(3)
    whole = ours.top_p_filter(scores.clone(), [p] * 30)
    for depths in ((1,), (2, 5, 40), (16, 300)):
        monkeypatch.setattr(ours, "_DEPTHS", depths)
        assert torch.equal(ours.top_p_filter(scores.clone(), [p] * 30), whole)
    ranked = [sorted(range(VOCAB), key=lambda token, row=row: (-row[token].item(), token)) for row in scores]
    for i, row in enumerate(whole):
        kept = set(row.isfinite().nonzero()[:, 0].tolist())
        assert kept == set(ranked[i][: len(kept)])


def test_filters_work_on_what_the_one_before_left():
    """top_p after top_k counts the mass that top_k has left, as in vLLM and transformers."""
    logits = random_logits(1)
    expected = oracle.TopPLogitsWarper(0.7)(None, oracle.TopKLogitsWarper(5)(None, logits)).isfinite()[0]
    rows = [scheduled(0, temperature=1.0, top_k=5, top_p=0.7, seed=i) for i in range(400)]
    assert set(sampled(logits.expand(400, VOCAB).contiguous(), rows)) <= set(expected.nonzero()[:, 0].tolist())


def test_bias_of_minus_100_and_min_tokens_act_on_greedy_rows():
    logits = random_logits(2)
    logits[:, 7] = 50.0
    logits[:, 9] = 40.0
    rows = [scheduled(0, logit_bias=((7, -100.0),)), scheduled(1, min_tokens=100, eos_token_ids=(7,))]
    assert sampled(logits, rows) == [9, 9]
    assert sampled(logits, [scheduled(0), scheduled(1, min_tokens=100, eos_token_ids=(7,), ignore_eos=True)]) == [7, 7]
    assert sampled(logits, [scheduled(0), scheduled(1, min_tokens=18, eos_token_ids=(7,))]) == [7, 7], "18 tokens are out"


# A batch and its rows alone


@st.composite
def drawn_settings(draw) -> dict:
    params: dict = {"seed": draw(st.integers(-(2**63), 2**64)), "temperature": draw(st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.7]))}
    optional = {
        "top_k": st.sampled_from([1, 3, 40, 1000]),
        "top_p": st.sampled_from([0.1, 0.8, 0.99]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-9, 9)), max_size=4).map(tuple),
        "bad_words": st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=2).map(tuple), max_size=4).map(tuple),
        "min_tokens": st.sampled_from([5, 100]),
        "logprobs": st.integers(0, 3),
    }
    for name, strategy in optional.items():
        if draw(st.integers(0, 3)) == 0:
            params[name] = draw(strategy)
    return params


@given(st.lists(drawn_settings(), min_size=2, max_size=20), st.integers(0, 1000), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_row_is_bitwise_the_same_alone_and_in_any_company(many, seed, rng):
    rows = [scheduled(i, 15 + i, eos_token_ids=(3,), stop_token_ids=(4,), **params) for i, params in enumerate(many)]
    logits = random_logits(len(rows), seed)
    together = Sampler(VOCAB).sample(logits.clone(), rows)
    alone = [Sampler(VOCAB).sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    order = rng.sample(range(len(rows)), len(rows))
    assert Sampler(VOCAB).sample(logits[order].clone(), [rows[i] for i in order]) == [together[i] for i in order]


# Greedy, ties, failures


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(3, 50000)
    logits[1, [40000, 300, 4711]] = 5.0
    rows = [scheduled(0), scheduled(1), scheduled(2, logit_bias=((77, 3.0), (49000, 3.0)))]
    assert sampled(logits, rows) == [0, 300, 77]


def test_plain_greedy_batches_do_nothing_but_an_argmax(monkeypatch):
    def fail(*_):
        raise AssertionError("a greedy row was sent through the processors")

    monkeypatch.setattr(Sampler, "_sample_rows", fail)
    logits = random_logits(5)
    rows = [scheduled(i, eos_token_ids=(1,), top_p=0.9, top_k=3, min_tokens=2) for i in range(5)]
    assert sampled(logits, rows) == logits.argmax(-1).tolist()
    with pytest.raises(AssertionError):
        sampled(logits, [*rows[:4], scheduled(4, temperature=0.5)])


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 2}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_fail_their_row_alone(params, bad):
    logits = random_logits(4)
    expected = Sampler(VOCAB).sample(logits.clone(), [scheduled(i, **params) for i in range(4)])
    logits[1, 200] = bad
    logits[2] = float("-inf")
    results = Sampler(VOCAB).sample(logits, [scheduled(i, **params) for i in range(4)])
    assert results[0] == expected[0] and results[3] == expected[3]
    for i in (1, 2):
        assert results[i].token_ids == () and results[i].error.startswith("non_finite_logits: position 30")


def test_minus_infinity_from_the_model_is_accepted():
    logits = random_logits(2)
    logits[:, 10:] = float("-inf")
    rows = [scheduled(0, logprobs=20), scheduled(1, temperature=5.0, top_p=0.9)]
    results = Sampler(VOCAB).sample(logits.clone(), rows)
    assert all(result.token_ids[0] < 10 for result in results)
    assert results[0].logprobs[0].top[-1][1] == -9999.0


def test_settings_that_leave_no_token_fail_that_row():
    everything = ((0,), (1,), (2,), (3,))
    rows = [scheduled(0, vocab=4, bad_words=everything), scheduled(1, vocab=4), scheduled(2, vocab=4, temperature=1.0)]
    results = Sampler(4).sample(torch.zeros(3, 4), rows)
    assert results[0].error.startswith("invalid_parameter: ") and results[1].token_ids == (0,) and results[2].error is None


def test_ids_outside_of_the_vocabulary_fail_that_row_at_its_first_token():
    first = NUM_PROMPT
    rows = [
        scheduled(0, first, logit_bias=((VOCAB, 1.0),)),
        scheduled(1, first, bad_words=((3, VOCAB + 8),)),
        scheduled(2, first, stop_token_ids=(VOCAB + 9,), min_tokens=3),
        scheduled(3, first, response_format='{"type":"json_object"}'),
    ]
    results = Sampler(VOCAB).sample(random_logits(4), rows)
    assert results[0].error == "invalid_parameter: logit_bias: token id 301 is outside of the model's vocabulary of 301"
    assert results[1].error.startswith("invalid_parameter: bad_words: token id 309")
    assert results[2].error is None
    assert results[3].error.startswith("invalid_parameter: response_format")


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-6])
def test_tiny_temperatures_are_greedy_not_overflow(temperature):
    logits = random_logits(8)
    rows = [scheduled(i, temperature=temperature, seed=i) for i in range(8)]
    assert sampled(logits, rows) == logits.argmax(-1).tolist()


# Log-probabilities


def test_logprobs_are_of_the_raw_logits_with_the_best_first():
    logits = random_logits(3)
    rows = [
        scheduled(0, logprobs=3),
        scheduled(1, logprobs=0, temperature=2.0, top_k=5, logit_bias=((5, 30.0),)),
        scheduled(2, logprobs=None),
    ]
    results = Sampler(VOCAB).sample(logits.clone(), rows)
    exact = torch.log_softmax(logits.double(), -1)
    for i, result in enumerate(results[:2]):
        (logprob,) = result.logprobs
        assert logprob.token_id == result.token_ids[0]
        assert logprob.logprob == pytest.approx(exact[i, logprob.token_id].item(), abs=1e-5)
    assert [token for token, _ in results[0].logprobs[0].top] == exact[0].topk(3).indices.tolist()
    assert results[0].logprobs[0].top[0][1] == results[0].logprobs[0].logprob
    assert results[1].token_ids == (5,) and results[1].logprobs[0].top == () and results[2].logprobs == ()


def test_equal_logprobs_are_listed_by_id():
    logits = torch.zeros(1, 10)
    logits[0, [8, 2, 5]] = 3.0
    (result,) = Sampler(10).sample(logits, [scheduled(0, logprobs=3)])
    assert [token for token, _ in result.logprobs[0].top] == [2, 5, 8]


def test_prompt_logprobs_in_pieces():
    logits = random_logits(150)
    next_ids = [(i * 37) % VOCAB for i in range(150)]
    found = prompt_logprobs(logits, next_ids, 2)
    exact = torch.log_softmax(logits.double(), -1)
    assert [entry.token_id for entry in found] == next_ids
    for i, entry in enumerate(found):
        assert entry.logprob == pytest.approx(exact[i, next_ids[i]].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == exact[i].topk(2).indices.tolist()
    assert prompt_logprobs(logits[100:], next_ids[100:], 2) == found[100:]


def test_prompt_logprobs_of_non_finite_logits_name_the_position():
    logits = random_logits(100)
    logits[70, 3] = float("nan")
    with pytest.raises(RowError, match="prompt position 1070") as caught:
        prompt_logprobs(logits, list(range(100)), 0, start=1000)
    assert caught.value.code == "non_finite_logits"
