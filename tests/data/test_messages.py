"""What a wrong row or file is told: the key, the value as it was written, and where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from contbatch_cli.config_schema import config_keys
from contbatch_cli.data.params import PARAMETERS, shown, validated
from contbatch_cli.data.readers import InputOptions, read_rows
from contbatch_cli.data.rows import Row, RowFault
from contbatch_cli.errors import RowError, UsageError


def faults(tmp_path: Path, content: str, name: str = "rows.jsonl") -> list[str | None]:
    """The message of each row, None for a good one."""
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    rows = read_rows([str(file)], InputOptions())
    return [None if isinstance(row, Row) else row.message for row in rows]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": True}, "max_tokens is true, it must be an integer"),
        ({"max_tokens": "3"}, 'max_tokens is "3", it must be'),
        ({"response_format": {"type": None}}, 'response_format is {"type": null}, it must be'),
        ({"stop": ["a", "é", None]}, 'stop is ["a", "é", null], it must be'),
        ({"logit_bias": {"a": 1}}, 'logit_bias has the key "a", which'),
        ({"nonsense_": 1}, '"nonsense_" is no parameter'),
    ],
)
def test_values_are_shown_as_json(params: dict[str, object], message: str) -> None:
    with pytest.raises(RowError) as refusal:
        validated(params)
    assert message in refusal.value.message


def test_long_values_are_cut() -> None:
    assert shown("x" * 1000) == '"' + "x" * 79 + "..."


def test_a_prompt_of_null(tmp_path: Path) -> None:
    (message,) = faults(tmp_path, '{"prompt": null}\n')
    assert message == 'row 0: "prompt" is null, and the row has no other prompt'


@pytest.mark.parametrize("content", ['[\n{"prompt": "a"}\n]\n', '{\n"prompt": "a"\n}\n'])
def test_a_file_that_is_one_json_value(tmp_path: Path, content: str) -> None:
    first = faults(tmp_path, content)[0]
    assert first is not None and "each line has to be one whole row (JSON Lines)" in first


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_quote_that_is_never_closed_does_not_swallow_rows_in_silence(tmp_path: Path, ending: str) -> None:
    told = faults(tmp_path, 'id,prompt\n1,"a\nb"\n2,"c\n3,d\n4,e' + ending, "rows.csv")
    assert told == [None, "line 4: a quote that opens here is not closed by the end of the file"]


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n\n"])
def test_a_closed_quote_at_the_end_is_fine(tmp_path: Path, end: str) -> None:
    assert faults(tmp_path, 'id,prompt\n1,"a\nb"' + end, "rows.csv") == [None]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_parted_by_something_else(tmp_path: Path, separator: str) -> None:
    with pytest.raises(UsageError, match="columns are parted by commas"):
        faults(tmp_path, f"prompt{separator}id\na{separator}1\n", "rows.csv")


def test_a_fault_is_placed_by_its_line_once() -> None:
    for message in ("row 94: 9 prompt tokens", "line 95: 9 prompt tokens", "9 prompt tokens"):
        fault = RowFault(94, None, 95, "rows.jsonl", "prompt_too_long", message, "0" * 16, {})
        assert fault.placed_message == "rows.jsonl, line 95: 9 prompt tokens"


def test_a_config_takes_no_value_that_a_row_may_not_have() -> None:
    """Both bounds of every sampling key are values that a row may give too, and a row's check refuses what lies beyond them."""
    checked = 0
    for path, key in config_keys().items():
        section, _, name = path.partition(".")
        low, high = key.rule.minimum, key.rule.maximum
        if section != "sampling" or name == "seed" or high is None:
            continue
        checked += 1
        check = PARAMETERS[name].check
        check(name, high)
        with pytest.raises(RowError):
            check(name, high + 1)
        if low is not None:
            check(name, low)
    assert checked >= 6
