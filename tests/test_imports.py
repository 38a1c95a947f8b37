"""The direction of imports: cli -> build_replicas -> {build, cluster} -> {model lazily, data, engine, simulate} -> core."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "contbatch_cli"
FOR_ALL = {"config", "errors", "units", "__init__"}
CORE = {"core", *FOR_ALL}
WIRED = {"config_schema", "config_files", "data", "engine", "metrics", "trace", "sizing", "cost_model", "simulate", "machine"}

# What each part may import of the package. A part is a package, or a module of the top level.
MAY_IMPORT = {
    "core": {"core", "errors"},
    "errors": set[str](),
    "units": set[str](),
    "config": {"units"},
    "config_schema": {*FOR_ALL, "config_schema"},
    "config_files": {*FOR_ALL, "config_schema"},
    "sizing": CORE,
    "cost_model": CORE,
    "machine": set[str](),
    "engine": CORE,
    "trace": {*CORE, "engine"},
    "metrics": {*CORE, "engine", "trace"},
    "simulate": {*CORE, "cost_model"},
    "data": {*CORE, "data"},
    "model": {*CORE, "machine", "model"},
    "cluster": {*CORE, "engine", "sizing", "cluster"},
    "build": {*CORE, *WIRED},
    "build_replicas": {*CORE, *WIRED, "build", "cluster"},
    "cli": {*CORE, *WIRED, "build", "build_replicas", "cluster", "cli"},
    "__main__": {"cli"},
}
# What may be imported where it is needed only, inside a function.
MAY_IMPORT_LAZILY = {"build": {"model"}, "cli": {"model"}}
HEAVY = {"torch", "transformers", "accelerate", "gguf", "ray"}


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    is_lazy: bool

    @property
    def part(self) -> str:
        """The part of the package that is imported, "" for another package."""
        names = self.module.split(".")
        return "" if names[0] != PACKAGE.name else names[1] if len(names) > 1 else "__init__"

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE)}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lazy = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in typing_only(tree):
        lazy.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name, node in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            for alias in node.names:
                is_submodule = (PACKAGE.parent / node.module.replace(".", "/") / f"{alias.name}.py").is_file()
                yield Import(file, node.lineno, f"{node.module}.{alias.name}" if is_submodule else node.module, node in lazy)


def typing_only(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements under `if TYPE_CHECKING:`, which never run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from node.body


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


ALL_IMPORTS = [found for file in sorted(PACKAGE.rglob("*.py")) for found in imports_of(file)]


def test_every_part_has_its_line_in_the_table() -> None:
    parts = {part_of(file) for file in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts - set(MAY_IMPORT) == set()


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_point_one_way(part: str) -> None:
    def is_allowed(found: Import) -> bool:
        return found.part in MAY_IMPORT[part] or (found.is_lazy and found.part in MAY_IMPORT_LAZILY.get(part, ()))

    ours = [found for found in ALL_IMPORTS if part_of(found.file) == part and found.part]
    assert [str(found) for found in ours if not is_allowed(found)] == []


@pytest.mark.parametrize("part", ["core", "errors", "units", "config", "engine"])
def test_the_pure_parts_use_the_standard_library_only(part: str) -> None:
    foreign = [found for found in ALL_IMPORTS if part_of(found.file) == part and not found.part]
    assert [str(found) for found in foreign if found.module.split(".")[0] not in sys.stdlib_module_names] == []


def test_core_has_no_clock_no_randomness_no_io() -> None:
    banned = {"time", "random", "secrets", "os", "io", "pathlib", "socket", "subprocess", "threading", "logging", "datetime"}
    assert [str(found) for found in ALL_IMPORTS if part_of(found.file) == "core" and found.module.split(".")[0] in banned] == []


def test_heavy_libraries_are_imported_by_the_model_side_only() -> None:
    outside = [found for found in ALL_IMPORTS if part_of(found.file) != "model" and found.module.split(".")[0] in HEAVY]
    assert [str(found) for found in outside if not found.is_lazy] == []


def test_no_file_is_named_after_nothing() -> None:
    assert [file for file in PACKAGE.rglob("*.py") if file.stem in ("utils", "helpers", "common", "misc")] == []


def test_a_wrong_import_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("import torch\ndef later():\n    from contbatch_cli.model import loading\n")
    found = [(entry.module, entry.part, entry.is_lazy) for entry in imports_of(file)]
    assert found[0] == ("torch", "", False)
    assert found[1][1:] == ("model", True)
