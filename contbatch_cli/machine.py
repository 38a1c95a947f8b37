"""What this machine has, without torch: memory that is free for us, a C compiler, and whether there is a CUDA device."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> int:
    """Main memory that a new allocation may take without swapping: what is available, within the limit of our control group."""
    limits = [_available_bytes(), _cgroup_free_bytes(_CGROUP)]
    return min(limit for limit in limits if limit is not None)


def num_threads() -> int:
    """How many threads a run computes with on a CPU, as torch will decide: by the environment, else the cores that it may use."""
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def c_compiler() -> tuple[str, ...] | None:
    """The C compiler's command: the environment's CC, else the first of cc, gcc and clang; None where there is none of them."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen and shutil.which(chosen[0]):
        return tuple(chosen)
    return next(((name,) for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def wanted_kernels() -> str:
    """The environment's word on the compiled kernels: `off` for none of them, `no-amx` for those without the matrix unit."""
    word = os.environ.get("CONTBATCH_KERNELS", "").lower()
    return "off" if word in ("0", "no") else word


def has_kernels() -> bool:
    """Whether the compiled kernels for a CPU are wanted and there is what compiles them."""
    return wanted_kernels() != "off" and os.name == "posix" and c_compiler() is not None


def has_cuda() -> bool:
    """Whether an NVIDIA driver is loaded. torch decides in a real run; a rehearsal goes by this."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_free_bytes(root: Path) -> int | None:
    """What a version 2 control group leaves; file cache that it holds can be reclaimed. None without a limit."""
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((root / "memory.current").read_text(encoding="ascii")) - int(statistics.get("inactive_file", 0))
        return max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None


def gpu_name() -> str:
    """The first NVIDIA device's name as its driver tells it, "cuda" where it does not."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return "cuda"
