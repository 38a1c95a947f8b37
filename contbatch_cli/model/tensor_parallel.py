"""One engine on several devices: weights and KV cache of a model split over ranks, by transformers' own tensor parallelism.

    rank 0, this process    plan -> forward, its heads, its part of each product -> logits -> sampler -> results
    ranks 1 to N - 1        plan -> forward, theirs; sums over all ranks in each layer -> dropped

Rank 0 schedules, and sends every plan to the others, which turn it into the same flat batch. A rank's attention is called with the
rank's own heads, so its cache holds just those, in blocks of the same numbers. The last product is gathered, and rank 0 samples.

Ranks are in step between plans, and a plan is run by all of them or is the last. A forward pass that fails in one rank leaves the
others in a sum which it will not join, and that cannot be called off: it is an EngineError, also when memory ran out. What fails in
rank 0 after the forward pass, in the sampler, finds the others waiting for the next plan: that step may be split and run again.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from contbatch_cli.config import ModelConfig
from contbatch_cli.core.batch import BatchResult, ScheduledBatch, ScheduledSequence, SequenceResult
from contbatch_cli.core.gather import FlatBatch, flatten
from contbatch_cli.errors import EngineError, ExitStatus, UsageError
from contbatch_cli.model.kv_cache import KVCache, WindowPool
from contbatch_cli.model.loading import LoadedModel, load_model, read_config, resolve_device
from contbatch_cli.model.memory import is_out_of_memory
from contbatch_cli.model.rank import END, GO, READY, RankTask, in_one_line
from contbatch_cli.model.runner import LogitsSampler, ModelRunner
from contbatch_cli.units import counted

HOST = "127.0.0.1"
STDERR = 2
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""After this, a sum that some rank does not join is an error. The first one waits for the weights of all."""
START_TIMEOUT_S = 600.0
NEWS_S = 5.0
"""How long a failed forward pass waits to hear of a rank that failed first."""
STUCK_S = 20.0
"""How long rank 0 may go on waiting for a rank that is gone, before the process is ended."""
CLOSE_S = 3.0
KV_PROJECTIONS = frozenset({"k_proj", "qkv_proj", "query_key_value", "kv_b_proj"})
"""The products that give the attention's keys, by their names in transformers' plans."""
COMMAND = "import sys; sys.path[:] = sys.argv[3:]; from contbatch_cli.model.rank import serve; serve(*map(int, sys.argv[1:3]))"


class CacheSizes(NamedTuple):
    """The blocks that each rank's cache has."""

    num_blocks: int
    block_size: int
    window_pool: WindowPool | None = None


@dataclass(frozen=True, slots=True)
class SplitModel:
    """Rank 0's part of a model, and the ranks that have the others."""

    loaded: LoadedModel
    ranks: Ranks

    def runner(self, cache: KVCache, sampler: LogitsSampler) -> SplitRunner:
        return SplitRunner(self.ranks, self.loaded, cache, sampler)

    def __str__(self) -> str:
        size, device = self.ranks.size, self.loaded.device
        if device.type == "cuda":
            return f"{size} devices, tensor parallel"
        return f"{size} processes of {counted(torch.get_num_threads(), 'thread')}, tensor parallel"


def load_split(directory: Path, settings: ModelConfig, sizes: CacheSizes) -> SplitModel:
    """The model over `settings.tensor_parallel` devices, this process being rank 0; on a CPU its threads are shared out.

    Raises UsageError, before any weights are read, for what cannot be split, and EngineError when a rank does not start.
    """
    size = settings.tensor_parallel
    devices = split_devices(settings.device, size)
    refuse_unsplittable(read_config(directory, settings.trust_remote_code), size)
    num_threads = max(torch.get_num_threads() // (size if devices[0].type == "cpu" else 1), 1)
    task = RankTask(0, size, 0, directory, settings, *sizes, num_threads)
    ranks = Ranks(task, devices)
    try:
        with ranks.meeting():
            loaded = load_model(directory, settings)
    except BaseException:
        ranks.close()
        raise
    return SplitModel(loaded, ranks)


def split_devices(wanted: str, size: int) -> list[torch.device]:
    """The devices of the ranks for `model.device`: CUDA devices from that one on, or the CPU for all. Raises UsageError."""
    first = torch.device(resolve_device(wanted))
    if first.type == "cpu":
        if torch.cuda.is_available():
            reason = "transformers splits over GPUs where it sees any; hide them (CUDA_VISIBLE_DEVICES='')"
            raise UsageError(f"model.tensor_parallel {size}: not on the CPU of this machine: {reason}")
        return [first] * size
    start = first.index or 0
    count = torch.cuda.device_count() - start
    if count < size:
        raise UsageError(f"model.tensor_parallel {size}: torch sees {counted(count, 'CUDA device')} from cuda:{start} on")
    return [torch.device("cuda", start + rank) for rank in range(size)]


def refuse_unsplittable(config: PretrainedConfig, size: int) -> None:
    """Raises UsageError, with numbers, for a model that cannot be split into `size` parts, going by its config."""
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    if not dist.is_available() or distributed_config() is None:
        raise UsageError(f"model.tensor_parallel {size}: the installed torch or transformers has no tensor parallelism")
    if getattr(config, "quantization_config", None) is not None:
        raise _unsplittable(name, size, "its weights are quantised")
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise _unsplittable(name, size, "transformers has no plan for it (base_model_tp_plan)")
    if not any(key.rsplit(".", 1)[-1] in KV_PROJECTIONS and style == "colwise" for key, style in plan.items()):
        raise _unsplittable(name, size, "by transformers' plan every device would hold all of its key/value heads")
    num_heads = config.num_attention_heads
    for kind, count in (("attention", num_heads), ("key/value", getattr(config, "num_key_value_heads", None) or num_heads)):
        if count % size:
            raise _unsplittable(
                name, size, f"{counted(count, f'{kind} head')} cannot be shared out evenly between {size} devices"
            )


def _unsplittable(name: str, size: int, reason: str) -> UsageError:
    return UsageError(f"model.tensor_parallel {size}: {name} cannot be split: {reason}")


def distributed_config() -> Any:
    """transformers' class for how a model is split; None where it has none."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return None
    return DistributedConfig


# What every rank does


def join_group(task: RankTask, store: dist.TCPStore | None = None) -> None:
    """Take the rank's place in torch's default process group; returns once all have. `store` is rank 0's, which hosts it."""
    torch.set_num_threads(task.num_threads)
    device = torch.device(task.settings.device)
    if store is None:
        store = dist.TCPStore(HOST, task.port, task.size, is_master=False)
    if device.type == "cpu":
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend, bound = "gloo", None
    else:
        os.environ["LOCAL_RANK"] = str(device.index)  # by which transformers takes the device
        torch.cuda.set_device(device)
        backend, bound = "nccl", device
    dist.init_process_group(
        backend, store=store, rank=task.rank, world_size=task.size, timeout=COLLECTIVE_TIMEOUT, device_id=bound
    )


def load_rank(task: RankTask) -> ModelRunner:
    """A rank's part of the model and of the cache; its results mean nothing."""
    loaded = load_model(task.directory, task.settings)
    cache = KVCache(loaded.layers, task.num_blocks, task.block_size, loaded.dtype, loaded.device, task.window_pool)
    return ForwardRunner(loaded.model, cache, loaded.backend, NoSampler(), loaded.device)


def _hosted_store(size: int) -> dist.TCPStore:
    """Where the ranks find each other, on a free port that this machine alone can reach."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(HOST, port, size, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


class NoSampler:
    """Stands where a rank without a sampler has none to call."""

    def sample(self, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> Sequence[SequenceResult]:
        raise AssertionError("only rank 0 samples")


class ForwardRunner(ModelRunner):
    """Runs the forward passes of plans; all results are empty."""

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> BatchResult:
        self._forward(batch, flatten(batch, self.cache.block_size))
        finish_forward(self.device)
        return BatchResult([SequenceResult()] * len(batch.sequences))


def finish_forward(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a failure shows here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# What rank 0 does


class SplitRunner(ModelRunner):
    """Rank 0's runner: its forward passes are run by all ranks."""

    def __init__(self, ranks: Ranks, loaded: LoadedModel, cache: KVCache, sampler: LogitsSampler) -> None:
        super().__init__(loaded.model, cache, loaded.backend, sampler, loaded.device)
        self.ranks = ranks

    def _forward(self, batch: ScheduledBatch, flat: FlatBatch) -> torch.Tensor:
        self.ranks.send(batch)
        with self.ranks.meeting():
            logits = super()._forward(batch, flat)
            finish_forward(self.device)
        return logits


class Ranks:
    """The processes of the ranks from 1 on. They end with this process, however it ends, or by `close`.

    torch has one default process group: the ranks that were there before are closed.
    """

    _current: Ranks | None = None

    def __init__(self, task: RankTask, devices: Sequence[torch.device]) -> None:
        """Start them and form the group; `task` is rank 0's. Raises EngineError when one does not start."""
        if Ranks._current is not None:
            Ranks._current.close()
        if dist.is_initialized():
            raise UsageError(f"model.tensor_parallel {task.size}: this process is in a torch process group already")
        self.size = task.size
        self.lost: str | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._meeting_since_s: float | None = None
        self._news = threading.Event()
        self._is_closed = False
        Ranks._current = self
        atexit.register(self.close)
        try:
            self._start(task, devices)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, batch: ScheduledBatch) -> None:
        """Give every rank the plan, without what only the sampler reads. Raises EngineError when one is gone."""
        sequences = tuple(one if one.history is None else one._replace(history=None) for one in batch.sequences)
        message = pickle.dumps(batch._replace(sequences=sequences), pickle.HIGHEST_PROTOCOL)
        if self.lost is not None:
            raise EngineError(self.lost)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError as error:
            raise self._why(error) from error

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around what all ranks do together. Whatever is raised within, the ranks are out of step for good.

        Raises EngineError when a rank was lost or memory ran out; other errors of this process pass through.
        """
        self._meeting_since_s = time.monotonic()
        try:
            yield
        except Exception as error:
            reason = self._why(error)
            self.lost = str(reason)
            if isinstance(error, UsageError) or not (self._news.is_set() or is_out_of_memory(error)):
                raise
            raise reason from error
        except BaseException as error:
            self.lost = f"model.tensor_parallel: rank 0 was stopped in a step ({type(error).__name__})"
            raise
        finally:
            self._meeting_since_s = None

    def close(self) -> None:
        """End the ranks and leave the group."""
        if self._is_closed:
            return
        self._is_closed = True
        self.lost = self.lost or "model.tensor_parallel: the ranks have been ended"
        atexit.unregister(self.close)
        Ranks._current = None
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(END)
        deadline_s = time.monotonic() + CLOSE_S
        for process in self._processes:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _start(self, task: RankTask, devices: Sequence[torch.device]) -> None:
        """All processes first, so that they import at the same time; the group only when none can be missing any more."""
        store = _hosted_store(self.size)
        for rank in range(1, self.size):
            settings = replace(task.settings, device=str(devices[rank]))
            self._spawn(task._replace(rank=rank, port=store.port, settings=settings))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for rank, pipe in enumerate(self._pipes, 1):
            while not pipe.poll(0.5):
                if time.monotonic() > deadline_s:
                    raise EngineError(f"{self._name(rank)} has not started within {START_TIMEOUT_S:.0f} s")
            if self._heard_from(rank) != READY:
                raise EngineError(str(self.lost))
        for pipe in self._pipes:
            pipe.send_bytes(GO)
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()
        with self.meeting():
            join_group(task._replace(settings=replace(task.settings, device=str(devices[0]))), store)

    def _spawn(self, task: RankTask) -> None:
        ours, theirs = socket.socketpair()
        dies_with = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(theirs.fileno()), str(dies_with), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                env={**os.environ, "OMP_NUM_THREADS": str(task.num_threads)},
                pass_fds=[theirs.fileno()],
            )
        self._processes.append(process)
        self._pipes.append(Connection(ours.detach()))
        self._pipes[-1].send_bytes(pickle.dumps(task))

    def _listen(self) -> None:
        """Ranks say nothing unless they fail. Then rank 0 hears of it by its own failure, before long or never: it is ended."""
        first = wait(self._pipes)[0]
        if self._is_closed:
            return
        self._heard_from(1 + self._pipes.index(cast(Connection, first)))
        self._news.set()
        heard_s = time.monotonic()
        while not self._is_closed:
            began_s = self._meeting_since_s
            if began_s is not None and time.monotonic() > max(began_s, heard_s) + STUCK_S:
                os.write(2, f"contbatch: {self.lost}\n".encode())
                os._exit(int(ExitStatus.FAILED))
            time.sleep(0.5)

    def _heard_from(self, rank: int) -> bytes:
        """The next message of a rank, b"" when there is none; `lost` says so unless it is READY."""
        try:
            message = self._pipes[rank - 1].recv_bytes()
        except (EOFError, OSError):
            message = b""
        if message != READY:
            self.lost = f"{self._name(rank)} {f'failed: {message.decode()}' if message else self._how_it_ended(rank)}"
        return message

    def _how_it_ended(self, rank: int) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self._processes[rank - 1].wait(1.0)
            return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return "closed its pipe"

    def _name(self, rank: int) -> str:
        return f"model.tensor_parallel {self.size}: rank {rank} (process {self._processes[rank - 1].pid})"

    def _why(self, error: Exception) -> EngineError:
        """Why a step failed: what is heard of a rank within NEWS_S, else what rank 0 says itself."""
        is_own = isinstance(error, UsageError) or is_out_of_memory(error)
        if not is_own and self._news.wait(NEWS_S) and self.lost is not None:
            return EngineError(self.lost)
        advice = "; lower scheduler.token_budget or cache.memory" if is_out_of_memory(error) else ""
        return EngineError(f"model.tensor_parallel {self.size}: a step failed in rank 0 ({in_one_line(error)}){advice}")
