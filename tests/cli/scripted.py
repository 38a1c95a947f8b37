"""A test-only program: the product's own command line with a scripted runner in the place of the model. Never imports torch.

    python -m tests.cli.scripted generate ...

The runner keeps a make-believe KV cache in which the entry of a token is a hash of all tokens before it, and takes the next
token from the newest entry: a fixed function of the row's tokens. A scheduler that planned a wrong slot, position or order would
change the text. Environment variables set what it does beside that:

    SCRIPTED_STEP_S   seconds that each step takes
    SCRIPTED_LOAD_S   seconds that loading takes
    SCRIPTED_NOISE    written to descriptor 1 in each step, as a library might
    SCRIPTED_FAIL_AT  number of the step that raises
    SCRIPTED_LOOPS    every row repeats one token
    SCRIPTED_TIMES    a file for the CPU time of the runner itself and of the bare necessities of rows; see `Times`
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unittest.mock import patch

from contbatch_cli import build
from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.drafts import accepted, sampled_runs
from contbatch_cli.data.tokenizer import byte_alphabet

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
LETTERS = b"abcdefghijklmnopqrstuvwxyz     .,"
EOS_EVERY = 16
"""One token in so many is the end of its row."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('no odd roles') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_MASK = (1 << 61) - 1
ROOT = Path(__file__).parents[2]


def write_model(directory: Path, context: int = 512) -> Path:
    """A model directory without weights: a byte-level tokenizer, a chat template, a config of a tiny Llama."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: byte for character, byte in byte_alphabet().items()}
    added = [
        {"id": 256 + number, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, token in enumerate((EOS, IM_START, IM_END))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_records(source: Path | bytes) -> list[dict[str, Any]]:
    """The records of a file or of standard output; every line is whole."""
    content = source.read_bytes() if isinstance(source, Path) else source
    assert not content or content.endswith(b"\n"), f"a torn end: {content[-80:]!r}"
    return [json.loads(line) for line in content.splitlines()]


def command(*arguments: object) -> list[str]:
    """The command line of this program."""
    return [sys.executable, "-m", "tests.cli.scripted", *map(str, arguments)]


def environment(**script: object) -> dict[str, str]:
    """The environment of a run: `STEP_S=0.01` and the like set what the runner does."""
    return {**os.environ, **{f"SCRIPTED_{name}": str(value) for name, value in script.items()}}


def generate(
    *arguments: object, stdin: bytes = b"", script: Mapping[str, object] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs `generate` to its end; no run of the tests leaves a traceback unless its runner was told to fail."""
    script = script or {}
    done = subprocess.run(
        command("generate", *arguments), input=stdin, capture_output=True, env=environment(**script), cwd=ROOT, timeout=120
    )
    assert "FAIL_AT" in script or b"Traceback" not in done.stderr, done.stderr.decode()
    return done


class Done(NamedTuple):
    """How a run ended: its status, standard output and standard error."""

    status: int
    output: bytes
    errors: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Those of standard output, in order of their indices."""
        return sorted(read_records(self.output), key=lambda record: record["index"])


def call(*arguments: object, script: Mapping[str, object] | None = None) -> Done:
    """Runs a command within this process, its standard streams in files. Standard input is empty."""
    from contbatch_cli.cli.app import main as contbatch

    with ExitStack() as stack:
        output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        stack.enter_context(patch.object(build, "build_executor", build_scripted_executor))
        stack.enter_context(patch.dict(os.environ, environment(**script or {})))
        with _standard_streams(output, errors):
            try:
                contbatch(list(map(str, arguments)))
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
        output.seek(0)
        errors.seek(0)
        return Done(status, output.read(), errors.read().decode())


@contextmanager
def _standard_streams(output: BinaryIO, errors: BinaryIO) -> Iterator[None]:
    """These files in the place of descriptors 1 and 2 and of Python's streams on them."""
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    try:
        with (
            open(os.devnull, encoding="utf-8") as nothing,
            open(os.dup(1), "w", encoding="utf-8") as own_output,
            open(os.dup(2), "w", encoding="utf-8") as own_errors,
            patch.multiple(sys, stdin=nothing, stdout=own_output, stderr=own_errors),
        ):
            yield
    finally:
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


class Times:
    """CPU seconds of the runner, and of a measure of this machine's speed at that time: the bare necessities of one row.

    These are its line parsed, its prompt tokenized, its text made from tokens, its record printed and written, by the libraries
    alone. They are done `ROWS` times every `EVERY` steps, so that the times are of the same seconds, and stand in the file `path`.
    """

    EVERY = 32
    ROWS = 32

    def __init__(self, path: str, job: build.Job) -> None:
        self._path = path
        self._backend = job.model.tokenizer.backend
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        self._num_steps = 0
        self._runner_s = self._bare_s = 0.0
        self._num_rows = 0
        atexit.register(self._save)

    @contextmanager
    def of_step(self) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        ended_s = time.thread_time()
        self._runner_s += ended_s - began_s
        self._num_steps += 1
        if self._num_steps % self.EVERY == 0:
            for _ in range(self.ROWS):
                self._bare_row(self._num_rows)
                self._num_rows += 1
            self._bare_s += time.thread_time() - ended_s

    def _bare_row(self, number: int) -> None:
        row = json.loads(f'{{"id":"row-{number}","prompt":"Say {number}","max_tokens":2}}')
        ids = self._backend.encode(row["prompt"]).ids
        usage = {"prompt_tokens": len(ids), "completion_tokens": 2, "cached_tokens": 0}
        record = {"index": number, "id": row["id"], "text": self._backend.decode(ids[:2]), "finish_reason": "length"}
        record |= {
            "stop_reason": None,
            "usage": usage,
            "error": None,
            "row_hash": hashlib.blake2b(b"", digest_size=8).hexdigest(),
        }
        os.write(self._nowhere, json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def _save(self) -> None:
        times = {"runner_s": self._runner_s, "bare_s": self._bare_s, "bare_rows": self._num_rows}
        Path(self._path).write_text(json.dumps(times), encoding="utf-8")


class ScriptedRunner:
    """Executes plans without a model; see the module."""

    def __init__(self, job: build.Job) -> None:
        self._block_size = job.sizes.block_size
        self._entries = [0] * (job.sizes.num_blocks * job.sizes.block_size)
        self._step_s = float(os.environ.get("SCRIPTED_STEP_S", "0"))
        self._noise = os.environ.get("SCRIPTED_NOISE", "").encode()
        self._fail_at = int(os.environ.get("SCRIPTED_FAIL_AT", "-1"))
        self._loops = "SCRIPTED_LOOPS" in os.environ
        self._times = Times(path, job) if (path := os.environ.get("SCRIPTED_TIMES")) else None
        self._num_steps = 0

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        if self._num_steps == self._fail_at:
            raise RuntimeError("scripted failure")
        self._num_steps += 1
        if self._noise:
            os.write(1, self._noise)
        if self._step_s:
            time.sleep(self._step_s)
        with self._times.of_step() if self._times else nullcontext():
            return BatchResult([self._result(sequence) for sequence in batch.sequences])

    def _result(self, sequence: ScheduledSequence) -> SequenceResult:
        if sequence.num_drafts:
            return accepted(sequence, [self._sampled(run) for run in sampled_runs(sequence)])
        return self._sampled(sequence)

    def _sampled(self, sequence: ScheduledSequence) -> SequenceResult:
        entry = self._written(sequence)
        if not sequence.samples:
            return SequenceResult()
        if self._loops:
            return SequenceResult((LETTERS[0],))
        draw = entry >> 20
        return SequenceResult((256 if draw % EOS_EVERY == 0 else LETTERS[draw // EOS_EVERY % len(LETTERS)],))

    def _written(self, sequence: ScheduledSequence) -> int:
        """Writes the run's entries; the last one."""
        size, blocks, entries, position = self._block_size, sequence.block_ids, self._entries, sequence.start
        entry = entries[blocks[(position - 1) // size] * size + (position - 1) % size] if position else 1
        for token in sequence.tokens:
            entry = (entry * 6364136223846793005 + token + 1442695040888963407) & _MASK
            entries[blocks[position // size] * size + position % size] = entry
            position += 1
        return entry


def build_scripted_executor(job: build.Job) -> build.Executor:
    time.sleep(float(os.environ.get("SCRIPTED_LOAD_S", "0")))
    return build.Executor(ScriptedRunner(job), "scripted")


def main() -> None:
    build.build_executor = build_scripted_executor
    from contbatch_cli.cli.app import main as contbatch

    try:
        contbatch()
    finally:
        assert "torch" not in sys.modules, "torch was imported"


if __name__ == "__main__":
    main()
