"""Devices shared out between replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch_cli.build_replicas import least_bytes
from contbatch_cli.cluster.ray_pool import Probe
from contbatch_cli.cluster.shares import Node, Share, share_out
from contbatch_cli.errors import UsageError
from contbatch_cli.sizing import DeviceMemory


@given(st.lists(st.integers(0, 64), min_size=1, max_size=6), st.integers(1, 40))
def test_cpu_replicas_find_room_and_leave_less_than_another_share(cpus: list[int], replicas: int) -> None:
    if not any(cpus):
        return
    share = share_out([Node(count, 0) for count in cpus], replicas, "auto")
    assert (share.num_replicas, share.kind) == (replicas, "cpu")
    if share.num_cpus >= 1:
        assert sum(count // share.num_threads for count in cpus) >= replicas
        assert sum(count // (share.num_threads + 1) for count in cpus) < replicas
    else:
        assert replicas > sum(cpus)
        assert share.num_threads == 1


@pytest.mark.parametrize(
    ("nodes", "replicas", "device", "share"),
    [
        ([Node(8, 0)], "auto", "auto", Share(1, "cpu", 8, 8)),
        ([Node(8, 0), Node(0, 0), Node(8, 0)], "auto", "auto", Share(2, "cpu", 8, 8)),
        ([Node(8, 0)], 3, "cpu", Share(3, "cpu", 2, 2)),
        ([Node(64, 8)], "auto", "auto", Share(8, "cuda", 1, 8, 1)),
        ([Node(64, 8), Node(16, 4)], "auto", "cuda", Share(12, "cuda", 1, 4, 1)),
        ([Node(64, 8)], 2, "auto", Share(2, "cuda", 1, 8, 1)),
        ([Node(64, 8)], "auto", "cpu", Share(1, "cpu", 64, 64)),
        ([Node(2, 4)], "auto", "auto", Share(4, "cuda", 0.5, 1, 1)),
    ],
)
def test_shares(nodes: list[Node], replicas: int, device: str, share: Share) -> None:
    assert share_out(nodes, replicas, device) == share  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "replicas", "device", "message"),
    [
        ([Node(8, 2)], 3, "auto", "cluster.replicas 3: each needs a GPU: 2 on 1 machine"),
        ([Node(8, 0)], "auto", "cuda", "cluster.replicas auto: each needs a GPU: 0 on 1 machine"),
        ([Node(8, 2)], 2, "cuda:1", "model.device cuda:1: each replica has a device of its own"),
        ([Node(0, 0)], 2, "cpu", "none of 1 machine has CPUs"),
    ],
)
def test_what_there_is_not_is_refused(nodes: list[Node], replicas: int, device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        share_out(nodes, replicas, device)  # type: ignore[arg-type]


def test_replicas_of_several_gpus_stay_on_one_machine() -> None:
    nodes = [Node(64, 8), Node(16, 3)]
    assert share_out(nodes, "auto", "auto", 2) == Share(5, "cuda", 1, 10, 2)
    assert share_out(nodes, 2, "cuda", 4) == Share(2, "cuda", 1, 32, 4)
    with pytest.raises(UsageError, match="cluster.replicas 3: each needs 4 GPUs of one machine: 11 on 2 machines"):
        share_out(nodes, 3, "auto", 4)
    with pytest.raises(UsageError, match="each needs 16 GPUs of one machine"):
        share_out(nodes, "auto", "auto", 16)


def test_main_memory_is_shared_by_the_replicas_of_a_machine() -> None:
    """One machine with 100 free beside weights of 20 (so 80 are told) holds two: 50 each, weights of their own, 30 left."""
    alone = Probe("b", DeviceMemory("cpu", 70), "m")
    assert least_bytes([alone], 20) == 70
    assert least_bytes([Probe("a", DeviceMemory("cpu", 80), "m")] * 2 + [alone], 20) == 30
    assert least_bytes([Probe("a", DeviceMemory("cuda", 80), "m")] * 2 + [Probe("a", DeviceMemory("cuda", 60), "m")], 20) == 60
    assert least_bytes([Probe("a", DeviceMemory("cpu", 80), "m")] * 20, 20) == 0
