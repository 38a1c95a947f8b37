"""The composition root: the one place where the parts of a run are wired. torch is imported only by `build_runner`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contbatch_cli import machine
from contbatch_cli.config import Config, ModelConfig
from contbatch_cli.config_files import Effective
from contbatch_cli.core.job_order import Choice, JobQueue, choose_order, shared_fraction
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.policies import POLICIES
from contbatch_cli.core.request import Request
from contbatch_cli.core.scheduler import StallFreeScheduler, StopRule
from contbatch_cli.core.stop import first_of, repetition_rule, standard_stop_rule
from contbatch_cli.data import model_store
from contbatch_cli.data.chat_template import ChatTemplate
from contbatch_cli.data.detokenizer import StopStringRule
from contbatch_cli.data.job_rows import JobRows, ReadRow, RowReader
from contbatch_cli.data.model_files import ModelInfo
from contbatch_cli.data.prepare import ModelLimits, Preparer, SamplingDefaults
from contbatch_cli.data.readers import InputOptions, read_rows
from contbatch_cli.data.rows import RowFault
from contbatch_cli.data.sources import can_be_read_twice
from contbatch_cli.data.tokenizer import Tokenizer
from contbatch_cli.sizing import DeviceMemory, JobDemand, Sizes, block_size_of, most_blocks, resolve_sizes

if TYPE_CHECKING:
    from contbatch_cli.engine import Runner

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model without its weights: what text, limits and sizes need."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a command line says of the rows: sources in order, and how to read them."""

    sources: tuple[str, ...]
    options: InputOptions
    chat_template: Path | None = None

    @property
    def are_live(self) -> bool:
        """Whether some input is a pipe, whose rows arrive when they arrive."""
        return not all(can_be_read_twice(source) for source in self.sources)


@dataclass(frozen=True, slots=True)
class Job:
    """A job ready to be executed, by a model or in a rehearsal."""

    config: Config
    model: TextModel
    rows: JobRows
    queue: JobQueue
    order: Choice
    sizes: Sizes
    scheduler: StallFreeScheduler
    texts: StopStringRule


def open_model(config: ModelConfig, chat_template: Path | None = None) -> TextModel:
    """Find a model, fetching or converting it when it is not there yet, and read all but its weights."""
    directory = model_store.resolve(config.name, config.revision)
    return TextModel(
        ModelInfo.from_directory(directory),
        Tokenizer.from_directory(directory),
        ChatTemplate.from_directory(directory, chat_template=chat_template),
    )


def device_kind(config: ModelConfig) -> str:
    """"cpu" or "cuda", as far as it can be told without torch."""
    if config.device == "auto":
        return "cuda" if machine.has_cuda() else "cpu"
    return config.device.partition(":")[0]


def cpu_memory(config: ModelConfig, info: ModelInfo) -> DeviceMemory:
    """Main memory that is free once the weights are there."""
    weights_bytes = info.num_parameters * DTYPE_BYTES.get(config.dtype, 4)
    return DeviceMemory("cpu", max(machine.free_memory_bytes() - weights_bytes, 0))


def prepare_job(
    effective: Effective,
    inputs: Inputs,
    model: TextModel,
    memory: DeviceMemory,
    on_fault: Callable[[RowFault], None],
    keep: Callable[[ReadRow], bool] = lambda row: True,
    stop_rule: StopRule | None = None,
) -> Job:
    """Read the first window of rows, and resolve order and sizes by it. Faults met on the way go to `on_fault`.

    `stop_rule` replaces the real one in a rehearsal. Raises UsageError for what makes the run impossible.
    """
    config = effective.config
    block_size = int(block_size_of(config.cache).value)
    block_bytes = block_size * model.info.kv_bytes_per_token(_kv_dtype_bytes(config.model, memory.kind, model.info))
    limit = most_blocks(config.cache, block_bytes, memory)
    preparer = make_preparer(effective, model, block_size, int(limit.value))
    reader = RowReader(read_rows(inputs.sources, inputs.options), inputs.are_live)
    rows = JobRows(reader, preparer.prepare, on_fault, keep)
    queue = JobQueue(rows, config.scheduler.window)
    window = queue.look_ahead()
    sizes = _sizes(config, block_size, limit, memory, window, queue.is_exhausted, model.info)
    order = _order(config, window, sizes)
    queue.set_order(order.value)
    texts = StopStringRule(model.tokenizer)
    kv = KVCacheManager(sizes.num_blocks, block_size, _shares_prefixes(config, model.info))
    scheduler = POLICIES[config.scheduler.policy](
        kv, sizes.token_budget, sizes.max_batch_size, stop_rule or first_of(texts, standard_stop_rule, repetition_rule)
    )
    return Job(config, model, rows, queue, order, sizes, scheduler, texts)


def make_preparer(effective: Effective, model: TextModel, block_size: int, num_blocks: int) -> Preparer:
    """What turns rows into requests for this model, by the precedence of the contract."""
    info = model.info
    eos = {*info.eos_token_ids, *([model.tokenizer.eos_token_id] if model.tokenizer.eos_token_id is not None else [])}
    limits = ModelLimits(
        vocab_size=info.vocab_size,
        max_context=min(info.max_context, info.rope_limit_tokens or info.max_context),
        block_size=block_size,
        num_blocks=num_blocks,
        eos_token_ids=tuple(sorted(eos)),
    )
    defaults = SamplingDefaults(
        command_line=effective.command_line_sampling(),
        config_file=effective.file_sampling(),
        from_model=_model_sampling(info) if effective.config.sampling.from_model else {},
        built_in=effective.default_sampling(),
        run_seed=effective.config.sampling.seed,
    )
    return Preparer(model.tokenizer, model.template, limits, defaults)


def build_runner(job: Job) -> Runner:
    """The model with its weights on its device, its cache and its sampler. Imports torch."""
    from contbatch_cli.model.deterministic import deterministic_model
    from contbatch_cli.model.kv_cache import KVCache
    from contbatch_cli.model.loading import load_model
    from contbatch_cli.model.memory import is_out_of_memory, release_unused
    from contbatch_cli.model.runner import ModelRunner
    from contbatch_cli.model.sampler import Sampler
    from contbatch_cli.model.splitting import SplittingRunner

    loaded = load_model(job.model.info.path, job.config.model)
    if job.config.engine.deterministic:
        loaded = deterministic_model(loaded)
    cache = KVCache(loaded.layers, job.sizes.num_blocks, job.sizes.block_size, loaded.dtype, loaded.device)
    sampler = Sampler(loaded.vocab_size, loaded.device)
    runner = ModelRunner(loaded.model, cache, loaded.backend, sampler, loaded.device)
    return SplittingRunner(runner, is_out_of_memory, lambda: release_unused(loaded.device))


def _kv_dtype_bytes(config: ModelConfig, kind: str, info: ModelInfo) -> int:
    if config.dtype != "auto":
        return DTYPE_BYTES[config.dtype]
    return 4 if kind == "cpu" else DTYPE_BYTES.get(info.weights_dtype, 2)


def _shares_prefixes(config: Config, info: ModelInfo) -> bool:
    """Windowed layers may have dropped what a hit would need, so those models take no hits."""
    return config.cache.prefix_caching and not any(window is not None for window in info.layer_windows)


def _sizes(
    config: Config, block_size: int, limit: Choice, memory: DeviceMemory, window: list[Request], is_whole: bool, info: ModelInfo
) -> Sizes:
    shares = _shares_prefixes(config, info) and shared_fraction(window, block_size) > 0
    demand = JobDemand([request.max_num_tokens for request in window], is_whole, shares, info.max_context)
    is_limit_set = config.cache.num_blocks != "auto" or config.cache.memory is not None
    return resolve_sizes(config.scheduler, block_size, limit, memory.kind, demand, is_limit_set)


def _order(config: Config, window: list[Request], sizes: Sizes) -> Choice:
    if config.scheduler.job_order != "auto":
        return Choice(config.scheduler.job_order, "as set")
    if config.output.order == "input":
        return Choice("input", "output.order is input")
    return choose_order(window, sizes.block_size, min(sizes.max_batch_size, sizes.token_budget))


def _model_sampling(info: ModelInfo) -> dict[str, object]:
    """The sampling settings of the model's generation_config, under the parameters' names."""
    generation = info.generation
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(generation, name)) is not None}
