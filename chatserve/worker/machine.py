"""What this process may use of the machine: cores, memory, bfloat16.

Reads affinity, cgroup (v1 and v2) limits and ``/proc``; where a file is missing there is no limit to honour. Knows
nothing of models. Executors size themselves with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores this process may use: its affinity, capped by the CPU quota of its control groups; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    for folder in _cgroup_folders("cpu"):
        quota = cpu_quota(folder)
        if quota is not None:
            cores = min(cores, math.ceil(quota))
    return max(1, cores)


def cpu_quota(folder: Path) -> float | None:
    """Cores per wall second that the control group in ``folder`` may use; ``None`` for no limit."""
    v2 = _read(folder / "cpu.max").split()
    if len(v2) == 2 and v2[0] != "max":
        return int(v2[0]) / int(v2[1])
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def available_memory() -> int:
    """Bytes that can be allocated without swapping or hitting a control group's limit."""
    available = _meminfo_available()
    for folder in _cgroup_folders("memory"):
        headroom = memory_headroom(folder)
        if headroom is not None:
            available = min(available, headroom)
    return available


def memory_headroom(folder: Path) -> int | None:
    """Bytes below the memory limit of the control group in ``folder``; ``None`` for no limit."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _read(folder / limit_file), _read(folder / usage_file)
        if limit.isdecimal() and usage.isdecimal():
            # Page cache counts as used but gives way; what is certainly there is at least this much.
            reclaimable = _reclaimable_cache(folder)
            return max(0, int(limit) - int(usage) + reclaimable)
    return None


def bfloat16_is_fast() -> bool:
    """Whether the CPU multiplies bfloat16 natively (AVX-512 BF16 or AMX)."""
    return any(
        line.startswith("flags") and ("avx512_bf16" in line or "amx_bf16" in line)
        for line in _read(Path("/proc/cpuinfo")).splitlines()
    )


def _meminfo_available() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2


def _reclaimable_cache(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Folders of the control groups this process is in, innermost first, for cgroup v2 and one v1 controller."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
        folder = root / name.lstrip("/")
        # Inside a container the path named may lie outside its own view; the root is then the container's group.
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
