"""The config tree: frozen dataclasses with the built-in defaults.

Each key carries what it means and what it may be (`Rule`), from which checks, messages and the JSON Schema are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from contbatch_cli.units import memory_bytes

Auto = Literal["auto"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a key means, and the limits that its type alone does not state. Bounds are inclusive, `above` is not."""

    doc: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    above: int | float | None = None
    pattern: str | None = None
    """A regular expression that the whole of a string value has to match."""
    expects: str | None = None
    """Names the values in words where type and bounds would not: "must be EXPECTS"."""
    check: Callable[[Any], object] | None = None
    """Raises ValueError with a message for a value that passes everything else and is wrong."""


def key(default: T, rule: Rule) -> T:
    """A dataclass field with its built-in default and its rule."""
    if isinstance(default, dict):
        return cast(T, field(default_factory=default.copy, metadata={"rule": rule}))
    return field(default=default, metadata={"rule": rule})


def _check_memory(memory: str | float | None) -> None:
    if memory is not None:
        memory_bytes(memory, 1)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str = key("smollm2-135m-instruct", Rule("A built-in name, a directory, a .gguf file, or a hub id.", pattern=r"\S.*"))
    revision: str | None = key(None, Rule("Branch, tag or commit of a hub id; null is the hub's default."))
    device: str = key(
        "auto",
        Rule(
            "Where the model runs. auto takes CUDA where there is one.",
            pattern=r"auto|cpu|cuda(:\d+)?",
            expects="auto, cpu, cuda or cuda:N",
        ),
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", Rule("Type of weights and arithmetic. auto is float32 on a CPU without native bfloat16.")
    )
    weights: Literal["auto", "int8"] = key(
        "auto", Rule("Precision of the weights. auto is that of dtype; int8 rounds those of linear layers, on a CPU only.")
    )
    attention: str = key("auto", Rule("Attention backend; auto takes the fastest that fits the device and the model."))
    tensor_parallel: int = key(
        1,
        Rule(
            "How many devices hold the model together, each a part of all weights and of the KV cache: GPUs from the device on, "
            "or processes on a CPU.",
            minimum=1,
        ),
    )
    trust_remote_code: bool = key(False, Rule("Whether Python code that a model repository brings along may run."))
    adapters: Mapping[str, str] = key(
        {},
        Rule(
            "LoRA adapters that rows may name: the name, and the directory or hub id of a checkpoint in PEFT's format.",
            pattern=r"\S.*",
            expects="a mapping of names to directories or hub ids",
        ),
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    policy: Literal["stall_free", "prefill_first", "static"] = key(
        "stall_free", Rule("How iterations are made up. stall_free never lets a prompt hold up running decodes.")
    )
    token_budget: int | Auto = key(
        "auto", Rule("The most tokens computed in one iteration, prefill and decode together.", minimum=1)
    )
    max_batch_size: int | Auto = key(
        "auto", Rule("The most requests that run at once; a smaller token_budget lowers it.", minimum=1)
    )
    draft_tokens: int | Auto = key(
        "auto",
        Rule(
            "Once nothing waits, smaller iterations are filled up to this many tokens with exact n-gram drafts; 0 is none.",
            minimum=0,
        ),
    )
    job_order: Literal["auto", "input", "longest_first", "prefix"] = key(
        "auto", Rule("Order in which rows are started, inside the look-ahead window.")
    )
    window: int = key(65536, Rule("Rows looked ahead for the job order and for duplicate rows.", minimum=1))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int | Auto = key(
        "auto", Rule("Tokens in one block of the KV cache; auto is 16 unless a backend needs more.", minimum=1)
    )
    num_blocks: int | Auto = key(
        "auto", Rule("Blocks in the KV cache; auto is what the job can use and the memory holds.", minimum=1)
    )
    memory: str | float | None = key(
        None,
        Rule(
            'Memory of the KV cache, instead of num_blocks: a size such as "2GiB", or a fraction of what is free.',
            expects='a size such as "2GiB", a fraction above 0 and up to 1 of the free memory, or null',
            check=_check_memory,
            above=0,
            maximum=1,
        ),
    )
    prefix_caching: bool = key(True, Rule("Whether rows that begin with the same tokens share the blocks that hold them."))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    deterministic: bool = key(False, Rule("Whether a row's logits are bitwise the same whatever runs beside it."))


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Defaults for rows that do not say. All but `seed` and `from_model` are a row's own parameters, by the same names."""

    max_tokens: int = key(
        256, Rule("The most tokens generated for a row; clamped to the context that its prompt leaves.", minimum=0)
    )
    min_tokens: int = key(0, Rule("Tokens before which a row does not end by EOS, stop token or stop string.", minimum=0))
    temperature: float = key(0.0, Rule("0 is greedy; otherwise the logits are divided by it.", minimum=0, maximum=2))
    top_p: float = key(
        1.0, Rule("Keeps the likeliest tokens that together have this probability; 1 is off.", above=0, maximum=1)
    )
    top_k: int = key(0, Rule("Keeps this many of the likeliest tokens; 0 is off.", minimum=0))
    min_p: float = key(
        0.0, Rule("Drops tokens less likely than this share of the likeliest one; 0 is off.", minimum=0, maximum=1)
    )
    presence_penalty: float = key(
        0.0, Rule("Subtracted from the logit of each token already generated.", minimum=-2, maximum=2)
    )
    frequency_penalty: float = key(
        0.0, Rule("Subtracted from a token's logit each time that it was generated.", minimum=-2, maximum=2)
    )
    repetition_penalty: float = key(
        1.0, Rule("Divides positive and multiplies negative logits of tokens seen; 1 is off.", above=0, maximum=100)
    )
    stop: tuple[str, ...] = key((), Rule("Strings that end a row where they appear in its text; cut off.", pattern=r"(?s).+"))
    ignore_eos: bool = key(False, Rule("Whether a row goes on after the model's end-of-sequence tokens."))
    stop_on_repetition: bool = key(False, Rule("Whether a row ends once it only repeats itself."))
    seed: int = key(0, Rule("The run seed, from which rows without a seed of their own get theirs.", minimum=0))
    from_model: bool = key(False, Rule("Whether the model's own generation_config stands before the built-in defaults."))


@dataclass(frozen=True, slots=True)
class OutputConfig:
    order: Literal["completion", "input"] = key("completion", Rule("Order of the records: as rows finish, or as in the input."))
    token_ids: bool = key(False, Rule("Whether records carry the generated token ids."))
    metrics: bool = key(False, Rule("Whether records carry the row's own times and counts."))


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    replicas: int | Auto | None = key(
        None,
        Rule(
            "Engines that share the job, each on a device of its own, through Ray. auto is one for each GPU, without GPUs one "
            "for each machine. null: one engine in this process, without Ray.",
            minimum=1,
        ),
    )
    address: str | None = key(
        None,
        Rule("A Ray cluster that runs: auto, or HOST:PORT of its head. null starts Ray on this machine.", pattern=r"\S+"),
    )
    max_attempts: int = key(
        3, Rule("How often a row is run again elsewhere after its replica was lost, counting the first time.", minimum=1)
    )
    max_restarts: int = key(3, Rule("How often a replica is started again after it was lost.", minimum=0))
    start_timeout_s: int = key(1800, Rule("Seconds after which a replica that has not started counts as lost.", minimum=1))


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
