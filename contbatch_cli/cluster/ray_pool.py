"""Replicas as Ray actors. The one module that imports Ray, and only when it is used.

Each actor runs one call at a time, in the order in which they were made, so what a replica does is a sequence of stretches.
Ray restarts nothing by itself: a replica that is lost is killed for good, told of, and another actor takes its place.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from contbatch_cli.cluster.cluster_engine import Event, Joined, Lost, Stepped
from contbatch_cli.cluster.replica import IterationDigest, Replica
from contbatch_cli.cluster.shares import Node, Share, share_out
from contbatch_cli.config import ClusterConfig, ModelConfig
from contbatch_cli.core.divergence import Divergence
from contbatch_cli.core.request import Request
from contbatch_cli.engine import Clock
from contbatch_cli.errors import ContbatchError, EngineError, UsageError
from contbatch_cli.sizing import DeviceMemory, Sizes
from contbatch_cli.units import counted

WAIT_S = 0.5
PROBE_GRACE_S = 20.0
"""How long the other replicas are waited for once the first has told of its memory."""
EXPECTED_S = 60.0
"""How long rows are kept for a replica that still loads."""
OBJECT_STORE_BYTES = 100 * 2**20
ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


class Probe(NamedTuple):
    """What a replica finds on its machine before it loads: memory as if it were alone there, and which model it would run."""

    machine: str
    memory: DeviceMemory
    fingerprint: str


class Loaded(NamedTuple):
    """A replica is ready: its seats, what it says of itself, and the time of its clock."""

    seats: int
    description: str
    now_s: float


class ReplicaBuilder(Protocol):
    """Makes a replica where it is to run; crosses the border to another process by pickle."""

    def probe(self) -> tuple[DeviceMemory, str]:
        """The device's free memory without the weights, and the model's fingerprint."""
        ...

    def build(self, sizes: Sizes, clock: Clock) -> tuple[Replica, str]:
        """The replica with its model loaded, and a description of model and device."""
        ...


class ReplicaActor:
    """What runs inside the actor."""

    def __init__(self, builder: ReplicaBuilder, num_threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        self._builder = builder
        self._replica: Replica | None = None

    def probe(self) -> Probe:
        return Probe(socket.gethostname(), *self._builder.probe())

    def load(self, sizes: Sizes) -> Loaded:
        self._replica, description = self._builder.build(sizes, time.monotonic)
        return Loaded(self._replica.seats, description, time.monotonic())

    def step(self, requests: Sequence[Request], limit_s: float, is_more: bool) -> list[IterationDigest]:
        assert self._replica is not None, "a stretch was asked for before the model was loaded"
        return self._replica.step(requests, limit_s, is_more)

    def first_divergence(self, request: Request) -> Divergence | None:
        assert self._replica is not None and self._replica.first_divergence is not None, "this replica cannot run rows alone"
        return self._replica.first_divergence(request)


@dataclass(slots=True)
class _Member:
    """A replica's actor and its calls under way, oldest first. `offset_s` takes its clock to ours."""

    number: int
    actor: Any
    started_s: float
    calls: deque[tuple[str, Any]] = field(default_factory=deque)
    num_restarts: int = 0
    probe: Probe | None = None
    has_loaded: bool = False
    is_gone: bool = False
    offset_s: float = 0.0

    @property
    def is_starting(self) -> bool:
        return not self.has_loaded and not self.is_gone


class RayPool:
    """The replicas of a run, from the connection to Ray on. A context manager: no actor outlives it.

    `waiting` is entered while something is waited for. Raises UsageError for a cluster that cannot be what the config asks.
    """

    def __init__(
        self,
        config: ClusterConfig,
        model: ModelConfig,
        make_builder: Callable[[Share], ReplicaBuilder],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._sizes: Sizes | None = None
        self._events: list[Event] = []
        self._descriptions: dict[int, str] = {}
        self._errors: list[BaseException] = []
        self._ray = _imported_ray()
        self._owns_connection = not self._ray.is_initialized()
        try:
            if self._owns_connection:
                _connect(self._ray, config)
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            found = [Node(one.get("CPU", 0), one.get("GPU", 0)) for one in nodes]
            self.share = share_out(found, _number(config), model.device, model.tensor_parallel)
            self._builder = make_builder(self.share)
            self._members = [self._started(number) for number in range(self.share.num_replicas)]
        except BaseException:
            self._disconnect()
            raise

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every actor, and the connection if it was made here."""
        for member in self._members:
            self._kill(member)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_connection:
            with _own_signal_handlers():
                self._ray.shutdown()

    # Starting

    def probes(self) -> list[Probe]:
        """What the replicas found on their machines: all of them, or those that have answered a while after the first.

        Raises EngineError, or what a replica raised for the user, when none could start.
        """
        patience_ends_s = float("inf")
        while (
            any(member.probe is None and not member.is_gone for member in self._members) and time.monotonic() < patience_ends_s
        ):
            self._events += self._wait()
            if patience_ends_s == float("inf") and self._probed():
                patience_ends_s = time.monotonic() + PROBE_GRACE_S
        if not self._probed():
            self._raise_why()
        return self._probed()

    def _probed(self) -> list[Probe]:
        return [member.probe for member in self._members if member.probe is not None and not member.is_gone]

    def load(self, sizes: Sizes) -> str:
        """Let all replicas load the model; returns the first one's description once it is there. Raises as `probes`."""
        self._sizes = sizes
        for member in self._members:
            if member.probe is not None and not member.is_gone:
                self._call(member, "load", sizes)
        while not self._descriptions:
            if not any(member.is_starting for member in self._members):
                self._raise_why()
            self._events += self._wait()
        return next(iter(self._descriptions.values()))

    def _raise_why(self) -> None:
        error = self._errors[-1] if self._errors else None
        if isinstance(error, ContbatchError):
            raise error
        raise EngineError(f"none of {counted(len(self._members), 'replica')} could start: {error}")

    def _started(self, number: int, num_restarts: int = 0) -> _Member:
        share = self.share
        actor = (
            self._ray.remote(ReplicaActor)
            .options(
                num_cpus=share.num_cpus,
                num_gpus=share.num_gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD",
            )
            .remote(self._builder, share.num_threads)
        )
        member = _Member(number, actor, time.monotonic(), num_restarts=num_restarts)
        self._call(member, "probe")
        return member

    # The pool of an engine

    @property
    def num_starting(self) -> int:
        untold = sum(isinstance(event, Joined) for event in self._events)
        return untold + sum(member.is_starting for member in self._members)

    @property
    def num_expected(self) -> int:
        """Those of them for which rows are kept: they start for the first time, and not for long yet."""
        limit_s = time.monotonic() - EXPECTED_S
        return sum(one.is_starting and not one.num_restarts and one.started_s > limit_s for one in self._members)

    def step(self, replica: int, requests: Sequence[Request], limit_s: float, is_more: bool) -> None:
        self._call(self._members[replica], "step", requests, limit_s, is_more)

    def wait(self) -> Sequence[Event]:
        """What happened; waits up to half a second for something to happen."""
        if not self._events:
            return self._wait()
        events, self._events = self._events, []
        return events

    def first_divergence(self, request: Request) -> Divergence | None:
        """Lets some replica run a finished request again alone. Raises EngineError when none is left."""
        member = next((member for member in self._members if member.has_loaded and not member.is_gone), None)
        if member is None:
            raise EngineError(f"row {request.request_id.row} cannot be verified: no replica is left")
        call = member.actor.first_divergence.remote(request)
        while True:
            with self._waiting():
                done, _ = self._ray.wait([call], timeout=WAIT_S)
            if done:
                break
        try:
            return self._ray.get(call)  # type: ignore[no-any-return]
        except self._ray.exceptions.RayError as error:
            message = f"row {request.request_id.row} could not be verified: {_in_one_line(_cause(error))}"
            raise EngineError(message) from None

    def _call(self, member: _Member, method: str, *arguments: object) -> None:
        member.calls.append((method, getattr(member.actor, method).remote(*arguments)))

    def _wait(self) -> list[Event]:
        """Only the oldest call of each replica is waited for, so reports of a replica keep their order."""
        heads = {member.calls[0][1]: member for member in self._members if member.calls}
        if not heads:
            return []
        with self._waiting():
            done, _ = self._ray.wait(list(heads), num_returns=1, timeout=WAIT_S)
            if len(heads) > 1:
                done, _ = self._ray.wait(list(heads), num_returns=len(heads), timeout=0)
        events = [event for call in done for event in self._done(heads[call])]
        return events + self._overdue()

    def _done(self, member: _Member) -> list[Event]:
        method, call = member.calls.popleft()
        try:
            value = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            return [self._lose(member, _cause(error))]
        if method == "step":
            digests = [one._replace(start_s=one.start_s + member.offset_s) for one in value]
            return [Stepped(member.number, digests)]
        if method == "probe":
            return self._take_probe(member, value)
        member.has_loaded = True
        member.offset_s = time.monotonic() - value.now_s
        self._descriptions[member.number] = value.description
        return [Joined(member.number, value.seats)]

    def _take_probe(self, member: _Member, probe: Probe) -> list[Event]:
        first = next((one.probe for one in self._members if one.probe is not None), probe)
        if probe.fingerprint != first.fingerprint:
            other = f"the model on {probe.machine} is another one than on {first.machine}"
            return [self._lose(member, UsageError(f"{other}: fingerprints {probe.fingerprint}, {first.fingerprint}"))]
        member.probe = probe
        if self._sizes is not None:
            self._call(member, "load", self._sizes)
        return []

    def _overdue(self) -> list[Event]:
        limit_s = time.monotonic() - self._config.start_timeout_s
        late = [member for member in self._members if member.is_starting and member.started_s < limit_s]
        message = f"it has not started within {self._config.start_timeout_s} s (cluster.start_timeout_s)"
        return [self._lose(member, EngineError(message)) for member in late]

    def _lose(self, member: _Member, error: BaseException) -> Lost:
        """A replica is gone; another takes its place, unless it was lost too often or for a reason that would stay."""
        self._errors.append(error)
        self._kill(member)
        if member.num_restarts < self._config.max_restarts and not isinstance(error, ContbatchError):
            self._members[member.number] = self._started(member.number, member.num_restarts + 1)
        return Lost(member.number, _in_one_line(error))

    def _kill(self, member: _Member) -> None:
        member.is_gone = True
        member.calls.clear()
        with suppress(Exception):
            self._ray.kill(member.actor, no_restart=True)


def _imported_ray() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UsageError("cluster.replicas: several engines need Ray: pip install 'contbatch[ray]'") from None
    return ray


def _connect(ray: Any, config: ClusterConfig) -> None:
    """Join the cluster of the config or of the environment, or start Ray on this machine for as long as this process lives."""
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES} if address == "local" else {}
    try:
        with _own_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"cluster.address {address}: {_in_one_line(error)}") from None


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray puts handlers of its own in place of those that let a run end in order: put them back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _number(config: ClusterConfig) -> Any:
    return "auto" if config.replicas is None else config.replicas


def _cause(error: BaseException) -> BaseException:
    """What was raised inside the actor, where that is why the call failed."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    named = text if isinstance(error, ContbatchError) else f"{type(error).__name__}: {text}"
    return named if len(named) <= 300 else f"{named[:297]}..."
