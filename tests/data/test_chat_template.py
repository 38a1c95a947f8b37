"""Chat templates against transformers' `apply_chat_template`, and what it does not do: row errors, reasoning split off."""

import json
import re

import pytest

from contbatch_cli.data.chat_template import ChatTemplate, ReasoningMarkers, split_reasoning
from contbatch_cli.errors import RowError, UsageError
from tests.data.default_model import default_model_dir, default_tokenizer

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
WITH_TOOLS = """\
{%- set ns = namespace(count=0, last='') %}
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}
{% endfor %}<|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == 'skip' %}{% continue %}{% endif %}
{% set ns.count = ns.count + 1 %}
<|im_start|>{{ message.role }} {{ ns.count }}
{% if message.tool_calls %}
{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}({{ call.function.arguments | tojson }})</tool_call>
{% endfor %}
{% endif %}
{% if message.content is string %}
{{ message.content | trim }}
{%- else %}
{% for part in message.content %}{{ part.text }}{% endfor %}
{% endif %}<|im_end|>
{% if ns.count >= 5 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
WITH_BOS = """{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content.strip() }}{{ eos_token }}{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
WITH_REASONING = """\
{% for m in messages %}
{% generation %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{ m.content }}{% endgeneration %}
{% endfor %}
{{- strftime_now('%Y') }} {{ messages | length }} {{ documents | length if documents else 'no' }} documents
{{ style | default('plain') }}"""
TEMPLATES = {"chatml": CHATML, "tools": WITH_TOOLS, "bos": WITH_BOS, "reasoning": WITH_REASONING}

TOOLS = [{"type": "function", "function": {"name": "now", "description": "<b>time</b> & 日", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "now", "arguments": {"zone": "é", "n": 1}}}
CHATS = {
    "one": [{"role": "user", "content": "Hi <b>there</b> 日本 👍"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  spaces  "}],
    "turns": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "c"}],
    "prefill": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is "}],
    "nulls": [{"role": "user", "content": "a", "tool_calls": None}, {"role": "assistant", "content": "x", "name": None}],
    "thinking": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "because"}],
    "many": [{"role": "user", "content": str(i)} for i in range(7)],
}


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model_dir())


def ours(source=None):
    if source is None:
        return ChatTemplate.from_directory(default_model_dir(), default_tokenizer().special_tokens)
    return ChatTemplate({"default": source}, default_tokenizer().special_tokens)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", ["the model's own", *TEMPLATES])
def test_the_text_and_the_ids_equal_transformers(theirs, template, chat):
    source, messages = TEMPLATES.get(template), CHATS[chat]
    for settings in ({}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"documents": [{"title": "t", "text": "x"}]}):
        for variables in ({}, {"enable_thinking": False, "style": "fancy"}):
            text = ours(source).render(messages, **settings, variables=variables)
            asked = {"add_generation_prompt": True, **settings, **variables, "chat_template": source}
            assert text == theirs.apply_chat_template(messages, tokenize=False, **asked)
            ids = theirs.apply_chat_template(messages, return_dict=False, **asked)
            assert default_tokenizer().encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("template", ["the model's own", *TEMPLATES])
@pytest.mark.parametrize("chat", ["one", "system", "turns", "prefill"])
def test_going_on_with_the_last_message_equals_transformers(theirs, template, chat):
    source = TEMPLATES.get(template)
    expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, continue_final_message=True, chat_template=source)
    before = json.dumps(CHATS[chat])
    assert ours(source).render(CHATS[chat], continue_final_message=True) == expected
    assert json.dumps(CHATS[chat]) == before, "the row's messages are left as they are"
    assert expected.rstrip().endswith(CHATS[chat][-1]["content"].strip())


def test_tool_calls_and_parts_equal_transformers(theirs):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "time? "}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"time": "12:00"}'},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}]},
    ]
    for settings in ({"continue_final_message": True}, {"add_generation_prompt": True}):
        expected = theirs.apply_chat_template(messages, tokenize=False, tools=TOOLS, chat_template=WITH_TOOLS, **settings)
        assert ours(WITH_TOOLS).render(messages, tools=TOOLS, **settings) == expected
    assert expected.count("<b>time</b> & 日") == 2


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_of_earlier_turns_is_found_under_each_of_its_names(key):
    messages = [{"role": "assistant", "content": "b", key: "because"}]
    assert "<think>because</think>" in ours(WITH_REASONING).render(messages)
    assert ours("{{ messages[0].thinking }}").render(messages) == "because"


def test_there_is_exactly_one_bos():
    text = ours(WITH_BOS).render(CHATS["turns"])
    ids = default_tokenizer().encode(text, add_special_tokens=False)
    assert ids.count(1) == 1 and ids[0] == 1


def test_named_templates_are_chosen_as_transformers_does(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template.render(CHATS["one"]) == "plain" and template.render(CHATS["one"], tools=TOOLS) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    template = ChatTemplate.from_directory(tmp_path)
    assert (
        template.render(CHATS["one"]) == "from the file" and template.render(CHATS["one"], tools=TOOLS) == "tools from a file"
    )
    with pytest.raises(RowError, match="no default chat template, only: rag"):
        ChatTemplate({"rag": "x"}).render(CHATS["one"])


def test_a_template_file_takes_the_place_of_the_models(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert ChatTemplate.from_directory(default_model_dir(), {}, file).render([{"role": "user", "content": "hi"}]) == "hi!"
    file.write_text("one\n{% if %}")
    with pytest.raises(UsageError, match=r"own.jinja, line 2: Expected an expression"):
        ChatTemplate.from_directory(default_model_dir(), {}, file)
    with pytest.raises(UsageError, match="--chat-template .*: No such file"):
        ChatTemplate.from_directory(default_model_dir(), {}, tmp_path / "absent")


def test_a_model_without_a_template_is_a_row_error(tmp_path):
    template = ChatTemplate.from_directory(tmp_path)
    assert not template.is_present
    with pytest.raises(RowError, match="has no chat template") as caught:
        template.render(CHATS["one"])
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "a\n{% for m in messages %}\n{{ raise_exception('roles must alternate') }}{% endfor %}",
            r"line 3, 1 message: roles must",
        ),
        ("{{ messages[0].content + 1 }}", r"line 1, 1 message: TypeError: can only concatenate"),
        ("x\n{{ 1 // 0 }}", "line 2, 1 message: ZeroDivisionError"),
        ("{{ messages[0].name.upper() }}", "line 1, 1 message: 'dict object' has no attribute 'name'"),
        ("{% if %}", "line 1, 1 message: Expected an expression"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{% set ns = namespace(_x=1) %}", "a namespace cannot hold '_x'"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_failing_template_is_a_row_error_with_its_own_words(source, message):
    with pytest.raises(RowError, match=message) as caught:
        ours(source).render([{"role": "user", "content": "hi"}])
    assert caught.value.code == "template_error"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (CHATML, [], "needs a last message"),
        (CHATML, [{"role": "assistant", "content": None}], "needs a last message with 'content'"),
        ("{{ messages[0].role }}", [{"role": "user", "content": "x"}], "does not use a message's 'content'"),
        ("content: {{ messages[0].role }}", [{"role": "user", "content": "x"}], "does not show the last message"),
        (WITH_TOOLS, [{"role": "user", "content": [{"type": "image"}]}], "none of the last message's 1 parts is text"),
    ],
)
def test_a_message_that_cannot_be_continued_is_a_row_error(source, messages, message):
    with pytest.raises(RowError, match=message) as caught:
        ours(source).render(messages, continue_final_message=True)
    assert caught.value.code == "template_error"


def test_variables_cannot_replace_the_row_and_messages_must_be_objects():
    with pytest.raises(RowError, match="must not set 'messages'"):
        ours(CHATML).render(CHATS["one"], variables={"messages": []})
    with pytest.raises(RowError, match="not str"):
        ours(CHATML).render(["hi"])
    assert ours(CHATML).render(CHATS["one"], variables={"add_generation_prompt": False}).endswith("<|im_end|>\n")


THINK = ReasoningMarkers("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nBecause.", "", ("why", "Because.")),
        ("\n<think>why</think> Because.", "", ("why", " Because.")),
        ("why\n</think>\n\nBecause.", "...<think>\n", ("why", "Because.")),
        ("<think>\n\n</think>\n\nYes", "", ("", "Yes")),
        ("<think>cut off", "", ("cut off", "")),
        ("No marks, 1 < 2.", "", (None, "No marks, 1 < 2.")),
        ("Later <think>x</think>", "", (None, "Later <think>x</think>")),
    ],
)
def test_reasoning_is_split_off_where_the_model_marks_it(text, prompt, expected):
    assert split_reasoning(text, THINK, prompt) == expected
    assert split_reasoning(text, None, prompt) == (None, text)


def test_the_markers_are_read_from_the_template():
    assert ours(WITH_REASONING).reasoning_markers == THINK
    assert ours(CHATML).reasoning_markers is None and ours().reasoning_markers is None
    assert re.search("im_start", ours().sources["default"])
