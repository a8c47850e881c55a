"""Limits of control groups are honoured, in both versions' file formats; missing files mean no limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatserve.worker import machine


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    return folder


def test_cpu_quota_of_both_versions(tmp_path: Path) -> None:
    """Quota over period is the number of cores; ``max`` and -1 mean none."""
    assert machine.cpu_quota(tmp_path) is None
    assert machine.cpu_quota(write(tmp_path, cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")) == 1.5
    assert machine.cpu_quota(write(tmp_path, cpu__cfs_quota_us="-1")) is None
    assert machine.cpu_quota(write(tmp_path, cpu__max="200000 100000")) == 2.0
    assert machine.cpu_quota(write(tmp_path, cpu__max="max 100000", cpu__cfs_quota_us="-1")) is None


def test_memory_headroom_of_both_versions(tmp_path: Path) -> None:
    """Limit less usage, where page cache that can be dropped does not count as used."""
    assert machine.memory_headroom(tmp_path) is None
    v1 = {"memory__limit_in_bytes": "1000", "memory__usage_in_bytes": "600", "memory__stat": "total_inactive_file 50"}
    assert machine.memory_headroom(write(tmp_path, **v1)) == 450
    v2 = {"memory__max": "5000", "memory__current": "4500", "memory__stat": "anon 3\ninactive_file 200"}
    assert machine.memory_headroom(write(tmp_path, **v2)) == 700
    assert machine.memory_headroom(write(tmp_path, memory__current="9000")) == 0


def test_this_process_can_use_something() -> None:
    """At least one core, at most those of its affinity; some memory, less than an exabyte."""
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    assert 2**20 < machine.available_memory() < 2**60


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity cannot be set on this system")
def test_affinity_is_honoured() -> None:
    """A process pinned to one core starts one thread."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
