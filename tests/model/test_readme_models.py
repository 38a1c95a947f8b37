"""The README's table of families is the tests' own."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from tests.model.readme_models import parts, table
from tests.model.test_families import SINCE


@pytest.mark.skipif(
    any(Version(transformers.__version__) < Version(since) for since in SINCE.values()), reason="not all families run here"
)
def test_the_readme_lists_the_tested_families():
    assert parts()[1] == table(), "run python -m tests.model.readme_models"
