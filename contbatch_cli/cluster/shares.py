"""How the devices of a cluster are shared out between replicas: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from contbatch_cli.errors import UsageError
from contbatch_cli.units import counted


class Node(NamedTuple):
    """A machine of the cluster, by what Ray says that it has."""

    num_cpus: float
    num_gpus: float


class Share(NamedTuple):
    """What each replica gets. `num_cpus` is what Ray sets aside for it, `num_threads` how many threads it computes with.

    `num_gpus` is 0 on a CPU.
    """

    num_replicas: int
    kind: Literal["cpu", "cuda"]
    num_cpus: float
    num_threads: int
    num_gpus: int = 0


def share_out(nodes: Sequence[Node], replicas: int | Literal["auto"], device: str, gpus_each: int = 1) -> Share:
    """A share for each of `replicas`; auto is one for each GPU or `gpus_each` of a machine, without GPUs one for each machine.

    `device` is `model.device`: cpu uses no GPU, cuda nothing else. Raises UsageError, with numbers, for more than there is.
    """
    num_gpus = sum(int(node.num_gpus) for node in nodes)
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"model.device {device}: each replica has a device of its own; give auto, cpu or cuda")
    if device == "cuda" or (device == "auto" and num_gpus):
        return _gpu_share(nodes, replicas, gpus_each)
    num_machines = sum(node.num_cpus > 0 for node in nodes)
    if not num_machines:
        raise UsageError(f"cluster.replicas {replicas}: none of {counted(len(nodes), 'machine')} has CPUs to compute with")
    return _cpu_share([node.num_cpus for node in nodes], num_machines if replicas == "auto" else replicas)


def _gpu_share(nodes: Sequence[Node], replicas: int | Literal["auto"], gpus_each: int) -> Share:
    num_gpus = sum(int(node.num_gpus) for node in nodes)
    most = sum(int(node.num_gpus) // gpus_each for node in nodes)
    wanted = most if replicas == "auto" else replicas
    if wanted > most or not most:
        need = "a GPU" if gpus_each == 1 else f"{gpus_each} GPUs of one machine"
        raise UsageError(f"cluster.replicas {replicas}: each needs {need}: {num_gpus} on {counted(len(nodes), 'machine')}")
    per_gpu = min(node.num_cpus / node.num_gpus for node in nodes if node.num_gpus >= gpus_each)
    cpus = per_gpu * gpus_each
    return Share(wanted, "cuda", min(1.0, cpus), max(int(cpus), 1), gpus_each)


def _cpu_share(cpus: Sequence[float], replicas: int) -> Share:
    """The most whole CPUs for each with which all replicas find room; less than one for each where there are more of them."""
    for share in range(int(max(cpus)), 0, -1):
        if sum(int(count // share) for count in cpus) >= replicas:
            return Share(replicas, "cpu", share, share)
    total = sum(cpus)
    return Share(replicas, "cpu", int(100 * total / replicas) / 100 if len(cpus) == 1 else 0.01, 1)
