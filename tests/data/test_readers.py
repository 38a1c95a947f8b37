"""Reading: what makes a row, what makes a fault, and that nothing else ever happens."""

import gzip
import io
import json
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch_cli.data.native_rows import CHAT_KEYS, PROMPT_KEYS
from contbatch_cli.data.params import PARAMETERS
from contbatch_cli.data.readers import InputOptions, read_rows
from contbatch_cli.data.rows import ChatPrompt, Row, RowFault, TextPrompt, TokenPrompt
from contbatch_cli.errors import EngineError, UsageError


def rows_of(tmp_path, content, name="in.jsonl", **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows([str(path)], InputOptions(**options)))


def only(tmp_path, content, **options):
    (row,) = rows_of(tmp_path, content, **options)
    return row


def test_kinds_of_rows(tmp_path):
    lines = [
        '{"id": "a", "prompt": "Hello", "max_new_tokens": 5, "source": {"page": 3}}',
        '{"id": 1, "messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}]}',
        '{"id": "1", "prompt_token_ids": [1, 2, 3]}',
        '"a bare string"',
    ]
    rows = rows_of(tmp_path, "\n".join(lines))
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.id for row in rows] == ["a", 1, "1", None]
    assert [row.prompt for row in rows] == [
        TextPrompt("Hello"),
        ChatPrompt([{"role": "user", "content": "Hi"}], [{"type": "function"}]),
        TokenPrompt([1, 2, 3]),
        TextPrompt("a bare string"),
    ]
    assert rows[0].params == {"max_tokens": 5}
    assert rows[0].extra == {"source": {"page": 3}}


def test_bom_crlf_blank_lines_and_line_separators_inside_strings(tmp_path):
    content = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b\xe2\x80\xa8c\xc2\x85d"}\r\n\n"last"'
    rows = rows_of(tmp_path, content)
    assert [row.prompt.text for row in rows] == ["a", "b\u2028c\x85d", "last"]
    assert [row.line for row in rows] == [1, 4, 6]
    assert [row.index for row in rows] == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n \r\n"])
def test_no_rows(tmp_path, content):
    assert rows_of(tmp_path, content) == []


def test_gzip_by_name_and_by_content(tmp_path):
    packed = gzip.compress(b'"one"\n"two"\n')
    for name in ("in.jsonl.gz", "in.jsonl"):
        assert [row.prompt.text for row in rows_of(tmp_path, packed, name)] == ["one", "two"]


def test_a_gzip_file_that_breaks_off_fails_the_run_by_name(tmp_path):
    packed = gzip.compress(b"".join(b'"%d %s"\n' % (i, str(hash(i)).encode()) for i in range(5000)))
    with pytest.raises(EngineError, match=r"cut\.jsonl\.gz: reading stopped after line"):
        rows_of(tmp_path, packed[: len(packed) // 2], "cut.jsonl.gz")


def test_several_files_share_one_index_and_one_namespace_of_ids(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.txt"
    first.write_text('{"id": "x", "prompt": "1"}\n{"id": "x", "prompt": "2"}')
    second.write_text("\nthree")
    third = tmp_path / "c.jsonl"
    third.write_text('{"id": "x", "prompt": "4"}')
    rows = list(read_rows([str(first), str(second), str(third)]))
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.file for row in rows] == [str(first), str(first), str(second), str(third)]
    assert [row.line for row in rows] == [1, 2, 2, 1]
    assert rows[1].code == "duplicate_id"
    assert rows[1].message == 'row 1: the id "x" was used before, in line 1'
    assert rows[3].message == f'row 3: the id "x" was used before, in line 1 of {first}'


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"one"\n"two"')))
    assert [row.prompt.text for row in read_rows(["-"])] == ["one", "two"]


def test_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        read_rows(["-"])


def test_inputs_that_cannot_be_used_are_refused_before_reading(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        read_rows([str(tmp_path / "absent")])
    with pytest.raises(UsageError, match="is a directory"):
        read_rows([str(tmp_path)])
    with pytest.raises(UsageError, match="given twice"):
        read_rows(["-", "-"])


FAULTS = [
    (b'{"prompt": "a",}', "invalid_json", "line 1, column 15: trailing comma"),
    (b'{"prompt": "a", "stop": ["x",]}', "invalid_json", "line 1, column 29: trailing comma"),
    (b'{"prompt": "a"', "invalid_json", "column 15: the line ends too early"),
    (b'{"prompt": "a"} x', "invalid_json", "line 1, column 17"),
    (b"{'prompt': 1}", "invalid_json", "line 1, column 2"),
    (b'{"prompt": "a", "x": NaN}', "invalid_json", "NaN is not JSON"),
    (b'{"prompt": "a", "x": -Infinity}', "invalid_json", "-Infinity is not JSON"),
    (b'{"prompt": "a", "x": 1e999}', "invalid_json", "1e999 is out of range"),
    (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "invalid_json", "too many digits"),
    (b'{"prompt": "a", "prompt": "b"}', "invalid_json", 'the key "prompt" stands twice'),
    (b'{"prompt": "a\xff"}', "invalid_encoding", "line 1, byte 14: not UTF-8 (0xff"),
    (b'{"prompt": "\xed\xa0\x80"}', "invalid_encoding", "not UTF-8"),
    (b'{"prompt": "a\\ud800"}', "invalid_encoding", "half a surrogate pair"),
    (b'{"prompt": "a", "x": {"\\udc00": 1}}', "invalid_encoding", "half a surrogate pair"),
    (b"17", "invalid_row", "the row is a number"),
    (b"[]", "invalid_row", "the row is a list"),
    (b"null", "invalid_row", "the row is null"),
    (b"{}", "invalid_row", "no prompt, messages or prompt_token_ids"),
    (b'{"prompt": 5}', "invalid_row", '"prompt" is a number'),
    (b'{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}', "invalid_row", "prompt and messages"),
    (b'{"prompt": "a", "tools": [1]}', "invalid_row", '"tools" needs "messages"'),
    (b'{"prompt": "a", "id": 1.5}', "invalid_row", '"id" is a number'),
    (b'{"prompt": "a", "id": true}', "invalid_row", '"id" is a boolean'),
    (b'{"prompt_token_ids": [1, true]}', "invalid_row", "list of integers"),
    (b'{"prompt_token_ids": [1, -2]}', "invalid_row", "holds -2"),
    (b'{"prompt_token_ids": []}', "empty_prompt", "no token ids"),
    (b'{"prompt": ""}', "empty_prompt", "empty"),
    (b'""', "empty_prompt", "empty"),
    (b'{"messages": []}', "empty_prompt", "empty list"),
    (b'{"messages": ["x"]}', "invalid_row", "messages[0] is a string"),
    (b'{"messages": [{"content": "x"}]}', "invalid_row", 'messages[0] has no "role"'),
    (b'{"messages": [{"role": "user"}]}', "invalid_row", 'messages[0] has no "content"'),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "invalid_row", "'image_url'"),
    (b'{"prompt": "a", "max_tokns": 5}', "unknown_parameter", 'the right name is "max_tokens"'),
    (b'{"prompt": "a", "tempreature": 1}', "unknown_parameter", 'the right name is "temperature"'),
    (b'{"prompt": "a", "temperature": 3}', "invalid_parameter", "temperature is 3, it must be a number from 0 to 2"),
    (b'{"prompt": "a", "max_tokens": "5"}', "invalid_parameter", 'max_tokens is "5"'),
]


@pytest.mark.parametrize(("content", "code", "message"), FAULTS)
def test_faults_have_a_code_a_line_and_a_message(tmp_path, content, code, message):
    fault = only(tmp_path, content)
    assert isinstance(fault, RowFault)
    assert (fault.code, fault.line) == (code, 1)
    assert message in fault.message
    is_unreadable = code in ("invalid_json", "invalid_encoding")
    assert fault.message.startswith("line 1" if is_unreadable else "row 0: ") and fault.line == 1
    assert len(fault.row_hash) == 16


def test_a_surrogate_pair_is_one_character(tmp_path):
    assert only(tmp_path, b'"\\ud83d\\ude00"').prompt == TextPrompt("\U0001f600")


@pytest.mark.parametrize("depth", [129, 1_000, 300_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_absurd_nesting_is_a_fault(tmp_path, depth, left, right):
    nested = left * depth + "1" + right * depth
    rows = rows_of(tmp_path, f'{{"prompt": "a", "x": {nested}}}\n"next"')
    assert rows[0].code == "invalid_row"
    assert rows[0].message == "line 1: nested more than 128 deep"
    assert isinstance(rows[1], Row)


def test_many_brackets_are_not_depth(tmp_path):
    assert isinstance(only(tmp_path, json.dumps({"prompt": "[" * 500, "x": [[]] * 500})), Row)


def test_an_overlong_line_is_a_fault_and_is_never_held(tmp_path):
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'"first"\n{"prompt": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n"last"\n')
    tracemalloc.start()
    rows = list(read_rows([str(path)], InputOptions(max_line_bytes=1_000_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [type(row) for row in rows] == [Row, RowFault, Row]
    assert rows[1].message == "line 2: 50,000,015 bytes long, the limit for a line is 1,000,000"
    assert rows[2].line == 3
    assert peak < 8_000_000


def test_a_fifty_megabyte_line_is_over_the_usual_limit(tmp_path):
    rows = rows_of(tmp_path, b'{"prompt": "' + b"x" * 50_000_000 + b'"}\n"last"')
    assert [type(row) for row in rows] == [RowFault, Row]
    assert "16,777,216" in rows[0].message


def test_a_line_at_the_limit_is_read(tmp_path):
    line = b'"' + b"x" * 98 + b'"'
    assert isinstance(only(tmp_path, line, max_line_bytes=100), Row)
    assert isinstance(only(tmp_path, line + b"\n", max_line_bytes=100), Row)
    assert isinstance(only(tmp_path, b" " + line, max_line_bytes=100), RowFault)
    assert rows_of(tmp_path, b" " * 500 + b"\n", max_line_bytes=100) == []


def test_rows_are_read_as_they_are_needed():
    class Endless(io.RawIOBase):
        served = 0

        def readable(self):
            return True

        def readinto(self, buffer):
            line = b'"x"\n'
            Endless.served += 1
            buffer[: len(line)] = line
            return len(line)

    stdin = sys.stdin
    sys.stdin = type("Stdin", (), {"buffer": io.BufferedReader(Endless()), "closed": False})
    try:
        rows = read_rows(["-"])
        for _ in range(10):
            next(rows)
    finally:
        sys.stdin = stdin
    assert Endless.served < 20


def test_limit_counts_rows_good_or_bad(tmp_path):
    assert len(rows_of(tmp_path, b'"a"\n\nbad\n"c"\n"d"', limit=2)) == 2


def test_row_hash_is_of_prompt_and_parameters_only(tmp_path):
    lines = [
        {"prompt": "a", "max_tokens": 5, "temperature": 0},
        {"temperature": 0.0, "max_new_tokens": 5, "id": "x", "data": 1, "prompt": "a"},
        {"prompt": "a", "max_tokens": 6, "temperature": 0},
        {"prompt": "b", "max_tokens": 5, "temperature": 0},
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt_token_ids": [97]},
    ]
    hashes = [row.row_hash for row in rows_of(tmp_path, "\n".join(map(json.dumps, lines)))]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 6


def test_row_hash_is_the_same_in_every_version_and_process(tmp_path):
    assert only(tmp_path, '{"prompt": "Héllo", "seed": 7, "temperature": 0.7}').row_hash == "26256f3c89ca9124"


def test_text_lines(tmp_path):
    rows = rows_of(tmp_path, b"one\r\n\n  two \n\xff\nthree", "in.txt")
    assert [getattr(row, "prompt", None) for row in rows] == [
        TextPrompt("one"),
        TextPrompt("  two "),
        None,
        TextPrompt("three"),
    ]
    assert rows[2].code == "invalid_encoding"


def test_text_lines_in_a_jsonl_file_by_option(tmp_path):
    assert only(tmp_path, b"{not json", format="text").prompt == TextPrompt("{not json")


def test_template_makes_a_user_message_and_all_columns_are_data(tmp_path):
    row = only(
        tmp_path,
        '{"id": 7, "question": "Why?", "temperature": 99, "messages": "x", "params": {"max_tokens": 3}}',
        template="Q: {{ question }}\n",
        system="Be brief.",
    )
    assert row.prompt.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: Why?"}]
    assert row.params == {"max_tokens": 3}
    assert row.id == 7
    assert row.extra == {"question": "Why?", "temperature": 99, "messages": "x"}


def test_template_from_a_file_raw_and_over_a_bare_string(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("<{{ text }}{{ row['text'] }}>\n")
    assert only(tmp_path, '"a&b"', template=f"@{template}", raw=True).prompt == TextPrompt("<a&ba&b>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ absent }}", "'absent' is undefined"),
        ("{{ x / 0 }}", "ZeroDivisionError"),
        ("{{ x.__class__.__mro__ }}", "unsafe"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    ],
)
def test_template_errors_belong_to_the_row(tmp_path, template, message):
    fault = only(tmp_path, '{"x": 1}', template=template)
    assert fault.code == "template_error"
    assert message in fault.message


def test_templates_that_cannot_be_used_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="line 1"):
        rows_of(tmp_path, "", template="{% if %}")
    with pytest.raises(UsageError, match="No such file"):
        rows_of(tmp_path, "", template="@/absent/file")
    with pytest.raises(UsageError, match="--raw needs --template"):
        InputOptions(raw=True)


def test_params_object_is_checked_like_a_row(tmp_path):
    for params, code in [({"max_tokens": -1}, "invalid_parameter"), ({"color": 1}, "unknown_parameter"), ([], "invalid_row")]:
        fault = only(tmp_path, json.dumps({"x": "a", "params": params}), template="{{ x }}")
        assert fault.code == code


def test_system_message_goes_before_a_chat_without_one(tmp_path):
    own = '{"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]}'
    none = '{"messages": [{"role": "user", "content": "a"}]}'
    rows = rows_of(tmp_path, f'{own}\n{none}\n"raw"', system="S")
    assert [m["content"] for m in rows[0].prompt.messages] == ["own", "a"]
    assert [m["content"] for m in rows[1].prompt.messages] == ["S", "a"]
    assert rows[2].code == "invalid_row"


def test_content_in_text_parts_becomes_one_text(tmp_path):
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = only(tmp_path, json.dumps({"messages": [{"role": "user", "content": content}]}))
    assert row.prompt.messages == [{"role": "user", "content": "a\nb"}]


def test_csv_by_column_with_quotes_newlines_and_faults(tmp_path):
    content = (
        b'\xef\xbb\xbfid,prompt,params,tag\r\n1,"two\r\nlines, one",{"max_tokens": 3},x\r\n\r\n2,a,,\r\n3,b\r\n4,\xff,,\r\n'
    )
    content = content.replace(b'{"max_tokens": 3}', b'"{""max_tokens"": 3}"')
    rows = rows_of(tmp_path, content, "in.csv")
    assert rows[0].prompt == TextPrompt("two\r\nlines, one")
    assert (rows[0].id, rows[0].params, rows[0].extra) == ("1", {"max_tokens": 3}, {"tag": "x"})
    assert [row.line for row in rows] == [2, 5, 6, 7]
    assert rows[2].message == "line 6: 2 fields, the header names 4"
    assert rows[3].code == "invalid_encoding"
    assert [row.index for row in rows] == [0, 1, 2, 3]


def test_csv_of_one_column_tabs_and_templates(tmp_path):
    assert rows_of(tmp_path, "question\nWhy?\n", "in.csv")[0].prompt == TextPrompt("Why?")
    row = rows_of(tmp_path, "a\tb\n1\t2\n", "in.tsv", template="{{ a }}+{{ b }}", raw=True)[0]
    assert row.prompt == TextPrompt("1+2")


def test_csv_headers_that_cannot_name_columns(tmp_path):
    for header in ("", "a,a\n", "a,\n"):
        with pytest.raises(UsageError):
            rows_of(tmp_path, header, "in.csv")
    with pytest.raises(UsageError, match="use --template over its columns: a, b"):
        rows_of(tmp_path, "a,b\n1,2\n", "in.csv")


def test_csv_with_an_open_quote_stays_bounded(tmp_path):
    content = 'prompt\na\n"' + "b\n" * 200
    rows = rows_of(tmp_path, content, "in.csv", max_line_bytes=100)
    assert rows[0].prompt == TextPrompt("a")
    assert rows[1].code == "invalid_row"


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    table = pyarrow.table(
        {"id": [1, 2], "messages": messages, "params": [{"max_tokens": 3}, None], "score": [1.5, float("nan")]}
    )
    path = tmp_path / "in.parquet"
    parquet.write_table(table, path)
    rows = list(read_rows([str(path)]))
    assert [row.prompt.messages for row in rows] == messages
    assert [row.params for row in rows] == [{"max_tokens": 3}, {}]
    assert [row.extra for row in rows] == [{"score": 1.5}, {"score": None}]
    assert [row.line for row in rows] == [1, 2]


def test_parquet_without_pyarrow_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match="needs pyarrow"):
        rows_of(tmp_path, b"", "in.parquet")


PIECES = st.sampled_from(
    [
        b'{"prompt": "a"}',
        b'{"id": 1, "prompt": "a"}',
        b'{"messages": [{"role": "user", "content": "x"}]}',
        b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}',
        b'"\\ud800"',
        b"NaN",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n",
        b"\x00",
        b"[" * 200,
        b'{"prompt": "a", "logit_bias": {"1": 1e400}}',
        b'{"prompt": "a", "stop": [""], "n": 0}',
        b"\xe2\x80\xa8",
        b'{"',
    ]
)
CONTENT = st.lists(st.one_of(PIECES, st.just(b"\n"), st.binary(max_size=12)), max_size=30).map(b"".join)


@settings(max_examples=150, deadline=None)
@given(content=CONTENT, template=st.sampled_from([None, "{{ prompt }}", "{{ row }}"]))
def test_any_bytes_give_as_many_rows_as_lines(tmp_path_factory, content, template):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(content)
    expected = sum(bool(line.strip(b" \t\r\n")) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    if content[:2] == b"\x1f\x8b":
        return
    for kind in ("jsonl", "text"):
        rows = list(read_rows([str(path)], InputOptions(format=kind, template=template, max_line_bytes=1000)))
        assert len(rows) == expected
        assert [row.index for row in rows] == list(range(expected))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*PARAMETERS, *PROMPT_KEYS, *CHAT_KEYS, "id", "params", "body", "url", "custom_id", "method"])


@settings(max_examples=150, deadline=None)
@given(columns=st.dictionaries(KEYS, JSON, max_size=6), body=st.dictionaries(KEYS, JSON, max_size=4))
def test_any_values_under_the_known_keys_give_one_row(tmp_path_factory, columns, body):
    path = tmp_path_factory.getbasetemp() / "fuzz-values.jsonl"
    envelope = {"custom_id": "c", "url": "/v1/chat/completions", "body": body}
    path.write_text(json.dumps(columns) + "\n" + json.dumps(envelope))
    assert len(list(read_rows([str(path)]))) == 2
