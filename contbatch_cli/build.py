"""The composition root: the one place where the parts of a run are wired. torch is imported only by `build_executor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from contbatch_cli import machine
from contbatch_cli.config import Config, ModelConfig
from contbatch_cli.config_files import Effective
from contbatch_cli.core.divergence import Divergence
from contbatch_cli.core.job_order import Choice, JobQueue, choose_order, shared_fraction
from contbatch_cli.core.kv_cache_manager import KVCacheManager
from contbatch_cli.core.policies import POLICIES
from contbatch_cli.core.request import Request
from contbatch_cli.core.scheduler import StallFreeScheduler, StopRule
from contbatch_cli.core.stop import first_of, repetition_rule, standard_stop_rule
from contbatch_cli.core.windowed_cache import GroupedKVCacheManager, WindowedKVCacheManager, window_span
from contbatch_cli.data import model_store
from contbatch_cli.data.chat_template import ChatTemplate, split_reasoning
from contbatch_cli.data.detokenizer import StopStringRule
from contbatch_cli.data.job_rows import JobRows, Patience, ReadRow, RowReader, Waiting, forever
from contbatch_cli.data.model_files import ModelInfo, fingerprint, num_adapter_parameters
from contbatch_cli.data.prepare import ModelLimits, PreparedRow, Preparer, SamplingDefaults
from contbatch_cli.data.readers import InputOptions, read_rows
from contbatch_cli.data.records import Completion
from contbatch_cli.data.response_format import grammar_text, has_grammar_support
from contbatch_cli.data.rows import ChatPrompt, Row, RowFault
from contbatch_cli.data.sources import can_be_read_twice
from contbatch_cli.data.template_rows import template_text
from contbatch_cli.data.tokenizer import Tokenizer
from contbatch_cli.engine import Clock, Engine, InferenceEngine, Runner
from contbatch_cli.errors import UsageError
from contbatch_cli.sizing import (
    DeviceMemory,
    JobDemand,
    LayerWindows,
    Sizes,
    WindowShare,
    block_size_of,
    largest_step,
    most_blocks,
    resolve_sizes,
)
from contbatch_cli.units import counted

if TYPE_CHECKING:
    from contbatch_cli.model.grammar import LazyGrammarMasks
    from contbatch_cli.model.kv_cache import WindowPool
    from contbatch_cli.model.loading import LoadedModel
    from contbatch_cli.model.packing import Packing
    from contbatch_cli.model.tensor_parallel import SplitModel

PROMPT_END_TOKENS = 16
"""How much of a prompt is looked at for an opening that its template wrote."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model without its weights: what text, limits and sizes need; and the directories of its adapters by name."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @property
    def num_adapter_parameters(self) -> int:
        """Those of all adapters, which are loaded beside the model's own."""
        return sum(map(num_adapter_parameters, self.adapters.values()))


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
    """A job ready to be executed, by a model or in a rehearsal. `windows`: which layers give back what they cannot read.

    `demand` is what the sizes were found by, and `limit_rows` tells rows that are yet to be read how many blocks the cache has; a
    replica, whose sizes are given and to whom requests are sent, has neither.
    """

    config: Config
    model: TextModel
    rows: JobRows
    queue: JobQueue
    order: Choice
    sizes: Sizes
    memory: DeviceMemory
    windows: LayerWindows | None = None
    demand: JobDemand | None = None
    limit_rows: Callable[[int], None] | None = None

    @property
    def has_work(self) -> bool:
        """Whether some request is to be run, or may still come."""
        return len(self.queue) > 0 or not self.queue.is_exhausted


@dataclass(frozen=True, slots=True)
class Executor:
    """What executes a job's plans; `stop_rules` end rows by what it knows, `description` is for the header.

    `first_divergence` runs a finished request again alone and says where it differs; it changes nothing of the run. Instead of
    a runner for the engine of this process there may be another engine, made by `make_engine`. `job` is there where building changed
    it: it is the one to be run, its cache as large as measured memory allows.
    """

    runner: Runner | None
    description: str
    stop_rules: tuple[StopRule, ...] = ()
    first_divergence: Callable[[Request], Divergence | None] | None = None
    make_engine: Callable[[Job, Clock], Engine] | None = None
    job: Job | None = None


BuildExecutor = Callable[[Job], Executor]


def open_model(config: ModelConfig, chat_template: Path | None = None) -> TextModel:
    """Find a model, fetching or converting it when it is not there yet, and read all but its weights."""
    directory = model_store.resolve(config.name, config.revision)
    tokenizer = Tokenizer.from_directory(directory)
    template = ChatTemplate.from_directory(directory, tokenizer.special_tokens, chat_template)
    adapters = {name: model_store.resolve_adapter(name, source) for name, source in config.adapters.items()}
    return TextModel(ModelInfo.from_directory(directory), tokenizer, template, adapters)


def text_settings(effective: Effective, inputs: Inputs, model: TextModel, kind: str) -> dict[str, object]:
    """What shapes the text of a run: an output is resumed only with the same."""
    config = effective.config
    template = inputs.options.template
    return {
        "model.name": config.model.name,
        "model.revision": config.model.revision,
        "model.fingerprint": model.info.fingerprint,
        "model.dtype": dtype_name(config.model, kind, model.info),
        "model.weights": config.model.weights if config.model.weights != "auto" else None,
        "model.adapters": {name: fingerprint(path) for name, path in sorted(model.adapters.items())} or None,
        "engine.deterministic": config.engine.deterministic,
        **{f"sampling.{name}": value for name, value in asdict(config.sampling).items()},
        "--template": template_text(template) if template is not None else None,
        "--raw": inputs.options.raw,
        "--system": inputs.options.system,
        "--chat-template": dict(model.template.sources) if inputs.chat_template else None,
    }


def device_kind(config: ModelConfig) -> str:
    """ "cpu" or "cuda", as far as it can be told without torch."""
    if config.device == "auto":
        return "cuda" if machine.has_cuda() else "cpu"
    return config.device.partition(":")[0]


def device_memory(config: Config, model: TextModel) -> DeviceMemory:
    """What will be free on the device once the weights are there, those of adapters too. Imports torch for a CUDA device."""
    kind = device_kind(config.model)
    free_bytes = _cuda_free_bytes(config.model) if kind == "cuda" else None
    if free_bytes is None:
        kind, free_bytes = "cpu", machine.free_memory_bytes()
    return DeviceMemory(kind, max(free_bytes - weights_bytes(config, kind, model), 0))


def weights_bytes(config: Config, kind: str, model: TextModel) -> int:
    info, dtype = model.info, dtype_name(config.model, kind, model.info)
    own = info.num_parameters * bytes_per_weight(config, kind, info)
    if config.model.weights == "int8":
        own += info.vocab_size * info.hidden_size * DTYPE_BYTES["bfloat16" if stays_bfloat16(config, kind, info) else dtype]
    return own + model.num_adapter_parameters * DTYPE_BYTES[dtype]


def bytes_per_weight(config: Config, kind: str, info: ModelInfo) -> int:
    """Of the weights of linear layers, as they are held."""
    if config.model.weights == "int8":
        return 1
    return DTYPE_BYTES["bfloat16" if stays_bfloat16(config, kind, info) else dtype_name(config.model, kind, info)]


def stays_bfloat16(config: Config, kind: str, info: ModelInfo) -> bool:
    """Whether weights stored as bfloat16 are kept in 16 bits although the arithmetic is float32, of which they are a part.

    The compiled kernels do it, where there is a compiler for them.
    """
    is_wanted = kind == "cpu" and info.is_all_bfloat16 and dtype_name(config.model, kind, info) == "float32"
    is_packed = config.model.tensor_parallel == 1 and config.model.attention in ("auto", "cpu", "cpu_native")
    return is_wanted and is_packed and machine.has_kernels()


def _cuda_free_bytes(config: ModelConfig) -> int | None:
    """Free memory of the device, or of those that hold the model together, each as if it had the least of them.

    None where a driver is loaded and torch still finds nothing that `auto` could take. Raises UsageError for a device that the
    user named and that is not there.
    """
    import torch

    from contbatch_cli.model.loading import resolve_device

    device = torch.device(resolve_device(config.device))
    if device.type != "cuda":
        return None
    if config.tensor_parallel > 1:
        from contbatch_cli.model.tensor_parallel import split_devices

        devices = split_devices(config.device, config.tensor_parallel)
        return len(devices) * min(torch.cuda.mem_get_info(one)[0] for one in devices)
    return torch.cuda.mem_get_info(device)[0]


def stop_rule(texts: StopStringRule, executor: Executor) -> StopRule:
    """Every rule that may end a row; a stop string wins over what its last token would mean otherwise."""
    return first_of(texts, *executor.stop_rules, standard_stop_rule, repetition_rule)


def dtype_name(config: ModelConfig, kind: str, info: ModelInfo) -> str:
    """The type of weights and arithmetic: `model.dtype` with `auto` resolved."""
    if config.dtype != "auto":
        return config.dtype
    if kind == "cpu":
        return "float32"
    return info.weights_dtype if info.weights_dtype in DTYPE_BYTES else "bfloat16"


def arithmetic_name(config: ModelConfig, kind: str, info: ModelInfo) -> str:
    """What a step's time depends on besides the model and the device: the dtype, and whether weights are of 8 bits."""
    return f"{dtype_name(config, kind, info)}{'-int8' if config.weights == 'int8' else ''}"


def prepare_job(
    effective: Effective,
    inputs: Inputs,
    model: TextModel,
    memory: DeviceMemory,
    on_fault: Callable[[RowFault], None],
    remaining: Callable[[Iterator[ReadRow]], Iterator[ReadRow]] = iter,
    waiting: Waiting = nullcontext,
    patience: Patience = forever,
) -> Job:
    """Read the first window of rows, and resolve order and sizes by it. Faults met on the way go to `on_fault`.

    `remaining` leaves out the rows that a resumed output has; `waiting` is entered while a pipe is waited for, as long as
    `patience` allows. Raises UsageError for what makes the run impossible.
    """
    config = effective.config
    block_size, limit = cache_limit(config, model.info, memory)
    preparer = make_preparer(effective, model, memory.kind, block_size, int(limit.value))
    reader = RowReader(remaining(read_rows(inputs.sources, inputs.options)), inputs.are_live, waiting, patience)
    rows = JobRows(reader, preparer.prepare, on_fault)
    queue = JobQueue(rows, config.scheduler.window)
    window = queue.look_ahead()
    demand = job_demand(config, model.info, window, queue.is_exhausted)
    sizes = sizes_for(config, model.info, memory, demand)
    order = job_order(config, window, sizes)
    queue.set_order(order.value)
    windows = layer_windows(model.info)
    return Job(config, model, rows, queue, order, sizes, memory, windows, demand, preparer.limit_cache)


def with_measured_memory(job: Job, memory: DeviceMemory) -> Job:
    """The same with a cache that fits what was measured, though no smaller than the largest row needs that was let in before."""
    assert job.demand is not None and job.limit_rows is not None
    sizes = sizes_for(job.config, job.model.info, memory, job.demand)
    job.limit_rows(sizes.num_blocks)
    return replace(job, sizes=sizes, memory=memory)


def layer_windows(info: ModelInfo) -> LayerWindows | None:
    """The layers whose window is shorter than the context, None when there are none. The longest window counts for all of them."""
    windows = {i: window for i, window in enumerate(info.layer_windows) if window is not None and window < info.max_context}
    return LayerWindows(max(windows.values()), frozenset(windows), info.num_layers) if windows else None


def without_windows(job: Job) -> Job:
    """The same with one pool of blocks for all layers, none of which gives blocks back before its row ends."""
    return replace(job, windows=None, sizes=replace(job.sizes, num_window_blocks=0))


def block_bytes(config: Config, info: ModelInfo, memory: DeviceMemory) -> int:
    """Bytes of one block of the KV cache, without those of a pool of their own for layers with a window."""
    windows = layer_windows(info)
    num_layers = info.num_layers - (len(windows.layers) if windows is not None and not windows.are_all else 0)
    return num_layers * _layer_block_bytes(config, info, memory)


def window_block_bytes(config: Config, info: ModelInfo, memory: DeviceMemory) -> int:
    """Bytes of one block of the pool of their own that layers with a window have where others see everything; else 0."""
    windows = layer_windows(info)
    if windows is None or windows.are_all:
        return 0
    return len(windows.layers) * _layer_block_bytes(config, info, memory)


def _layer_block_bytes(config: Config, info: ModelInfo, memory: DeviceMemory) -> int:
    per_token = info.kv_bytes_per_token(DTYPE_BYTES[dtype_name(config.model, memory.kind, info)])
    return int(block_size_of(config.cache).value) * per_token // info.num_layers


def cache_limit(config: Config, info: ModelInfo, memory: DeviceMemory) -> tuple[int, Choice]:
    """The size of a block in tokens, and the most blocks. Raises UsageError when that is none."""
    block_size, windows, own = int(block_size_of(config.cache).value), layer_windows(info), None
    if windows is not None and not windows.are_all:
        seats, budget = largest_step(config.scheduler, memory.kind)
        own = WindowShare(window_block_bytes(config, info, memory), seats * window_span(windows.window, budget, block_size))
    return block_size, most_blocks(config.cache, block_bytes(config, info, memory), memory, own)


def prepared_rows(
    effective: Effective, inputs: Inputs, model: TextModel, memory: DeviceMemory
) -> Iterator[PreparedRow | RowFault]:
    """All rows of the inputs, ready to run or not. Raises UsageError at once for what makes the run impossible."""
    block_size, limit = cache_limit(effective.config, model.info, memory)
    preparer = make_preparer(effective, model, memory.kind, block_size, int(limit.value))
    rows = read_rows(inputs.sources, inputs.options)
    return (preparer.prepare(row) if isinstance(row, Row) else row for row in rows)


def build_engine(job: Job, runner: Runner, stop_rule: StopRule, clock: Clock) -> InferenceEngine:
    """The engine of a job, by its policy and sizes."""
    return InferenceEngine(build_scheduler(job, stop_rule), runner, job.queue, clock)


def engine_of(job: Job, executor: Executor, stop_rule: StopRule, clock: Clock) -> Engine:
    """The engine that runs a job on an executor."""
    if executor.make_engine is not None:
        return executor.make_engine(job, clock)
    assert executor.runner is not None, "an executor has a runner or makes an engine"
    return build_engine(job, executor.runner, stop_rule, clock)


def build_scheduler(job: Job, stop_rule: StopRule) -> StallFreeScheduler:
    """The scheduler of one device, with its empty cache."""
    policy = POLICIES[job.config.scheduler.policy]
    sizes = job.sizes
    return policy(build_cache(job), sizes.token_budget, sizes.max_batch_size, stop_rule, sizes.draft_tokens)


def build_cache(job: Job) -> KVCacheManager | GroupedKVCacheManager:
    """The cache's bookkeeping: one pool of blocks, or two where some layers see a window and others everything."""
    sizes, windows = job.sizes, job.windows
    size = sizes.block_size
    if windows is None:
        return KVCacheManager(sizes.num_blocks, size, shares_prefixes(job.config, job.model.info))
    if windows.are_all:
        return WindowedKVCacheManager(sizes.num_blocks, size, windows.window, sizes.token_budget)
    own = WindowedKVCacheManager(sizes.num_window_blocks, size, windows.window, sizes.token_budget)
    return GroupedKVCacheManager(KVCacheManager(sizes.num_blocks, size, prefix_caching=False), own)


def complete(texts: StopStringRule, model: TextModel, request: Request, row: Row) -> Completion:
    """The text of a finished request; a chat's reasoning split off where the model marks it."""
    text = texts.text(request)
    texts.forget(request.request_id)
    markers = model.template.reasoning_markers
    if markers is None or not isinstance(row.prompt, ChatPrompt):
        return Completion(request, text)
    prompt_end = model.tokenizer.decode(request.prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    reasoning, content = split_reasoning(text, markers, prompt_end)
    return Completion(request, content, reasoning)


def make_preparer(effective: Effective, model: TextModel, kind: str, block_size: int, num_blocks: int) -> Preparer:
    """What turns rows into requests for this model on a device of that kind, by the precedence of the contract."""
    info, windows = model.info, layer_windows(model.info)
    _, budget = largest_step(effective.config.scheduler, kind)
    limits = ModelLimits(
        vocab_size=info.vocab_size,
        max_context=min(info.max_context, info.rope_limit_tokens or info.max_context),
        context_reason=_context_reason(info),
        block_size=block_size,
        num_blocks=num_blocks,
        most_row_blocks=window_span(windows.window, budget, block_size) if windows is not None and windows.are_all else None,
        eos_token_ids=_eos_token_ids(model),
        adapters=frozenset(model.adapters),
    )
    defaults = SamplingDefaults(
        command_line=effective.command_line_sampling(),
        config_file=effective.file_sampling(),
        from_model=_model_sampling(info) if effective.config.sampling.from_model else {},
        built_in=effective.default_sampling(),
        run_seed=effective.config.sampling.seed,
    )
    return Preparer(model.tokenizer, model.template, limits, defaults)


def _context_reason(info: ModelInfo) -> str:
    if info.rope_limit_tokens is None or info.rope_limit_tokens >= info.max_context:
        return ""
    return f" of {info.max_context:,}: beyond that its RoPE ({info.rope_type}) changes with the longest row beside it"


def build_executor(job: Job) -> Executor:
    """The model with its weights on its device, its cache and its sampler. Imports torch.

    On a GPU the cache takes what a step at its fullest leaves of the memory, which is measured once the weights are there.
    """
    from contbatch_cli.model.kv_cache import KVCache
    from contbatch_cli.model.memory import is_out_of_memory, release_unused
    from contbatch_cli.model.runner import ModelRunner
    from contbatch_cli.model.sampler import Sampler
    from contbatch_cli.model.splitting import SplittingRunner
    from contbatch_cli.model.verification import LoneRunner

    is_int8 = job.config.model.weights == "int8"
    _check_int8(job)
    split = _load_split(job) if job.config.model.tensor_parallel > 1 else None
    if split is not None:
        loaded, how = split.loaded, f"{split}, attention {split.loaded.attention_choice}"
    elif job.config.engine.deterministic:
        loaded, how = _load_deterministic(job)
    else:
        loaded, how = _load_packed(job)
    _check_windows(job, loaded)
    is_measured = takes_measured_memory(job, loaded)
    if is_measured:
        job = with_measured_memory(job, measured_memory(job, loaded))
    sizes, own = job.sizes, _window_pool(job)
    cache = KVCache(loaded.layers, sizes.num_blocks, sizes.block_size, loaded.dtype, loaded.device, own)
    masks = _grammar_masks(job, loaded.vocab_size)
    sampler = Sampler(loaded.vocab_size, loaded.device, masks)
    runner = (
        split.runner(cache, sampler)
        if split
        else ModelRunner(loaded.model, cache, loaded.backend, sampler, loaded.device, loaded.adapters)
    )
    splitting = SplittingRunner(runner, is_out_of_memory, lambda: release_unused(loaded.device))
    description = f"{loaded.dtype_choice} on {loaded.device_choice} ({loaded.device_choice.reason}), {how}"
    rules = (masks.stop_rule,) if masks is not None else ()
    # Inputs that are rounded to 8 bits make much of a rounding in another layer's code; the question is what the batch changes.
    lone = LoneRunner(lambda: loaded, masks, loaded.backend) if is_int8 else LoneRunner(lambda: _plain(job, loaded), masks)
    return Executor(splitting, description, rules, lone.first_divergence, job=job if is_measured else None)


def _load_packed(job: Job) -> tuple[LoadedModel, str]:
    """The model as it runs by default, and a word for the header: on a CPU its weights are packed for the processor."""
    from contbatch_cli.model.loading import load_model

    as_stored = stays_bfloat16(job.config, job.memory.kind, job.model.info)
    loaded = load_model(job.model.info.path, job.config.model, job.model.adapters, as_stored)
    packing = _pack(job.config.model, loaded)
    return loaded, f"attention {loaded.attention_choice}{f', {packing}' if packing else ''}"


def _pack(config: ModelConfig, loaded: LoadedModel) -> Packing | None:
    """Pack the model where it runs with one of a CPU's own backends."""
    from contbatch_cli.model.packing import pack_model

    is_int8 = config.weights == "int8"
    if not is_int8 and (loaded.device.type != "cpu" or loaded.attention_choice not in ("cpu", "cpu_native")):
        return None
    return pack_model(loaded.model, loaded.attention_choice, is_int8, loaded.dtype)


def _load_deterministic(job: Job) -> tuple[LoadedModel, str]:
    """The model with rows that nothing beside them changes: as it runs by default where that is so of it, else in tiles."""
    from contbatch_cli.model.deterministic import make_deterministic, rows_are_independent
    from contbatch_cli.model.loading import load_model

    _refuse_adapters(job.model)
    if job.memory.kind == "cpu" and machine.has_kernels():
        as_stored = stays_bfloat16(job.config, job.memory.kind, job.model.info)
        loaded = load_model(job.model.info.path, job.config.model, None, as_stored)
        packing = _pack(job.config.model, loaded)
        if packing is not None and packing.is_whole and rows_are_independent(loaded, job.sizes.token_budget):
            return loaded, f"deterministic, attention {loaded.attention_choice}, {packing}"
        del loaded, packing
    loaded = load_model(job.model.info.path, replace(job.config.model, attention="deterministic"))
    model, tiles = make_deterministic(loaded.model, loaded.layers, loaded.dtype, job.sizes.token_budget)
    return replace(loaded, model=model), f"deterministic: {tiles}"


def takes_measured_memory(job: Job, loaded: LoadedModel) -> bool:
    """Whether the cache is to have what the device has left: a GPU that has the model for itself, if blocks are not set."""
    is_alone = job.config.model.tensor_parallel == 1 and job.demand is not None
    return loaded.device.type == "cuda" and is_alone and job.config.cache.num_blocks == "auto"


def measured_memory(job: Job, loaded: LoadedModel) -> DeviceMemory:
    """The memory of the device that holds the weights, and what the job's fullest step leaves of it for the cache."""
    from contbatch_cli.model.kv_cache import KVCache
    from contbatch_cli.model.memory import free_bytes, left_for_cache
    from contbatch_cli.model.runner import ModelRunner
    from contbatch_cli.model.sampler import Sampler

    def make_runner(num_blocks: int) -> ModelRunner:
        cache = KVCache(loaded.layers, num_blocks, job.sizes.block_size, loaded.dtype, loaded.device)
        sampler = Sampler(loaded.vocab_size, loaded.device)
        return ModelRunner(loaded.model, cache, loaded.backend, sampler, loaded.device, loaded.adapters)

    sizes = job.sizes
    left = left_for_cache(make_runner, loaded.device, sizes.token_budget, sizes.max_batch_size, sizes.block_size)
    return DeviceMemory(loaded.device.type, free_bytes(loaded.device), left.num_bytes, left.reason)


def _window_pool(job: Job) -> WindowPool | None:
    """The pool of blocks of the layers with a window, where others have none."""
    from contbatch_cli.model.kv_cache import WindowPool

    return WindowPool(job.windows.layers, job.sizes.num_window_blocks) if job.windows and not job.windows.are_all else None


def _load_split(job: Job) -> SplitModel:
    """The model over several devices, each with the same blocks of the cache."""
    from contbatch_cli.model.tensor_parallel import CacheSizes, load_split

    size = job.config.model.tensor_parallel
    if job.config.engine.deterministic:
        raise UsageError(f"model.tensor_parallel {size}: cannot be had with engine.deterministic")
    if job.model.adapters:
        names = ", ".join(sorted(job.model.adapters))
        raise UsageError(f"model.tensor_parallel {size}: cannot be had with model.adapters ({names})")
    sizes = CacheSizes(job.sizes.num_blocks, job.sizes.block_size, _window_pool(job))
    return load_split(job.model.info.path, job.config.model, sizes)


def _plain(job: Job, loaded: LoadedModel) -> LoadedModel:
    """The whole model with transformers' own layers: on a CPU, where they may have been swapped or split, it is loaded anew."""
    from contbatch_cli.model.loading import load_model

    if loaded.device.type != "cpu":
        return loaded
    settings = replace(job.config.model, attention="reference", tensor_parallel=1)
    return load_model(job.model.info.path, settings, job.model.adapters)


def _check_windows(job: Job, loaded: LoadedModel) -> None:
    """A layer that reads further back than config.json says would read blocks that were given back."""
    for layer in sorted(job.windows.layers) if job.windows else ():
        assert job.windows is not None
        window = loaded.windows[layer]
        if window is None or window > job.windows.window:
            raise UsageError(
                f"model: layer {layer} of {job.config.model.name} sees {'all tokens' if window is None else counted(window, 'token')}, "
                f"a window of {job.windows.window:,} was read from its config.json"
            )


def _check_int8(job: Job) -> None:
    """Raises UsageError, naming what is in the way, where weights of 8 bits are asked for and cannot be had."""
    config, kind = job.config, job.memory.kind
    if config.model.weights != "int8":
        return
    from contbatch_cli.model import cpu_kernels

    dtype = dtype_name(config.model, kind, job.model.info)
    if kind != "cpu":
        reason = f"run on a CPU only, and model.device is {config.model.device} ({kind})"
    elif dtype != "float32":
        reason = f"compute in float32, and model.dtype is {dtype}"
    elif config.engine.deterministic or config.model.tensor_parallel > 1:
        reason = f"cannot be had with {'engine.deterministic' if config.engine.deterministic else 'model.tensor_parallel'}"
    elif cpu_kernels.library() is None:
        reason = "need the compiled kernels, which are not there (no C compiler, or CONTBATCH_KERNELS is off)"
    else:
        return
    raise UsageError(f"model.weights: int8 weights {reason}; set model.weights=auto")


def _refuse_adapters(model: TextModel) -> None:
    """Tokens of one adapter are computed together, as many as the step happens to have: the opposite of what is promised."""
    if model.adapters:
        raise UsageError(f"engine.deterministic: cannot be had with model.adapters ({', '.join(sorted(model.adapters))})")


def _grammar_masks(job: Job, vocab_size: int) -> LazyGrammarMasks | None:
    """What holds rows to their `response_format`, where the grammar library is installed."""
    if not has_grammar_support():
        return None
    from contbatch_cli.model.grammar import GrammarMasks, LazyGrammarMasks

    tokenizer_json = job.model.tokenizer.backend.to_str
    eos_token_ids = _eos_token_ids(job.model)
    return LazyGrammarMasks(lambda: GrammarMasks(tokenizer_json(), vocab_size, eos_token_ids, grammar_text))


def _eos_token_ids(model: TextModel) -> tuple[int, ...]:
    """The union of all sources: generation_config, config and tokenizer."""
    own = model.tokenizer.eos_token_id
    return tuple(sorted({*model.info.eos_token_ids, *([own] if own is not None else [])}))


def resolved_config(job: Job) -> dict[str, object]:
    """The config with every `auto` replaced by what it became: what a trace's header holds and a rehearsal goes by."""
    config = asdict(job.config)
    config["model"]["dtype"] = dtype_name(job.config.model, job.memory.kind, job.model.info)
    config["model"]["device"] = job.config.model.device if job.config.model.device != "auto" else job.memory.kind
    config["scheduler"]["job_order"] = job.order.value
    config["scheduler"]["token_budget"] = job.sizes.token_budget
    config["scheduler"]["max_batch_size"] = job.sizes.max_batch_size
    config["scheduler"]["draft_tokens"] = job.sizes.draft_tokens
    config["cache"]["block_size"] = job.sizes.block_size
    config["cache"]["num_blocks"] = job.sizes.num_blocks
    return config


def header_lines(job: Job, executor: Executor) -> list[str]:
    """What a run says before its first iteration: the resolved values, each with its reason."""
    sizes, reasons = job.sizes, job.sizes.reasons
    tokens = sizes.num_blocks * sizes.block_size
    info = job.model.info
    caching = "on" if shares_prefixes(job.config, info) else prefix_caching_off_reason(job.config, info)
    return [
        f"model     {job.config.model.name}, {executor.description}{_adapters_clause(job.model)}",
        f"schedule  {job.config.scheduler.policy}, budget {sizes.token_budget:,} ({reasons['scheduler.token_budget']}), "
        f"batch {sizes.max_batch_size:,} ({reasons['scheduler.max_batch_size']}), order {job.order.value} ({job.order.reason})"
        f"{_drafts_clause(sizes)}",
        f"cache     {counted(sizes.num_blocks, 'block')} of {sizes.block_size} = {counted(tokens, 'token')} "
        f"({reasons['cache.num_blocks']}){_windows_clause(job)}, prefix cache {caching}",
    ]


def _drafts_clause(sizes: Sizes) -> str:
    if not sizes.draft_tokens:
        return ""
    return f", drafts up to {counted(sizes.draft_tokens, 'token')} a step ({sizes.reasons['scheduler.draft_tokens']})"


def _windows_clause(job: Job) -> str:
    windows = job.windows
    if windows is None:
        return ""
    if windows.are_all:
        return f", for the last {counted(windows.window, 'token')} of each row"
    own = f"{job.sizes.num_window_blocks:,} for {len(windows.layers)} of {counted(windows.num_layers, 'layer')}"
    return f", {own} with a window of {windows.window:,}"


def _adapters_clause(model: TextModel) -> str:
    return f", adapters {', '.join(sorted(model.adapters))}" if model.adapters else ""


def prefix_caching_off_reason(config: Config, info: ModelInfo) -> str:
    if not config.cache.prefix_caching:
        return "off (cache.prefix_caching)"
    windows = layer_windows(info)
    assert windows is not None
    return f"off ({len(windows.layers)} of {info.num_layers} layers see a sliding window)"


def shares_prefixes(config: Config, info: ModelInfo) -> bool:
    """Windowed layers may have dropped what a hit would need, so those models take no hits."""
    return config.cache.prefix_caching and layer_windows(info) is None


def job_demand(config: Config, info: ModelInfo, window: list[Request], is_whole: bool) -> JobDemand:
    """What the first window of requests tells of the job; `is_whole` when these are all."""
    shares = shares_prefixes(config, info) and shared_fraction(window, int(block_size_of(config.cache).value)) > 0
    return JobDemand([request.max_num_tokens for request in window], is_whole, shares, info.max_context)


def sizes_for(config: Config, info: ModelInfo, memory: DeviceMemory, demand: JobDemand) -> Sizes:
    """The sizes of a run. Raises UsageError."""
    block_size, limit = cache_limit(config, info, memory)
    is_limit_set = config.cache.num_blocks != "auto" or config.cache.memory is not None
    windows = layer_windows(info)
    is_measured = memory.cache_bytes is not None
    return resolve_sizes(config.scheduler, block_size, limit, memory.kind, demand, is_limit_set, windows, is_measured)


def job_order(config: Config, window: list[Request], sizes: Sizes) -> Choice:
    """The order of a run by its first window of requests."""
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
