"""The config tree: frozen dataclasses with the built-in defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Auto = Literal["auto"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str = "smollm2-135m-instruct"
    revision: str | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    policy: Literal["stall_free", "prefill_first", "static"] = "stall_free"
    token_budget: int | Auto = "auto"
    max_batch_size: int | Auto = "auto"
    job_order: Literal["auto", "input", "longest_first", "prefix"] = "auto"
    window: int = 65536


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int | Auto = "auto"
    num_blocks: int | Auto = "auto"
    memory: str | float | None = None
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class EngineConfig:
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    from_model: bool = False


@dataclass(frozen=True, slots=True)
class OutputConfig:
    order: Literal["completion", "input"] = "completion"
    token_ids: bool = False
    metrics: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
