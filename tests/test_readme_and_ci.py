"""The README's two commands, the ones that CI runs, and what they name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def bash_blocks() -> list[str]:
    return [block.strip() for block in re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)]


def test_ci_runs_the_first_two_commands_of_the_readme() -> None:
    listed = subprocess.run(["bash", ".ci/run", "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert listed.splitlines() == bash_blocks()[:2]


def test_the_two_commands_are_one_line_each_and_name_what_exists() -> None:
    install_and_run, install_and_test = bash_blocks()[:2]
    assert "\n" not in install_and_run + install_and_test
    prompts = re.fullmatch(
        r"python3 -m venv \.venv && \.venv/bin/pip install \. && \.venv/bin/contbatch generate (\S+)", install_and_run
    )
    assert prompts is not None
    assert (ROOT / prompts[1]).is_file()
    assert install_and_test == ".venv/bin/pip install '.[test]' && .venv/bin/python -m pytest"


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:|#)([^)#]+)\)", (ROOT / "README.md").read_text()))
def test_links_lead_to_files(link: str) -> None:
    assert (ROOT / link).exists()
