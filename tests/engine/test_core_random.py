"""The random driver in CI size: every kind of event must have happened, and nothing may be wrong."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from chatserve.scheduler.invariants import check_scheduler
from tests.oracle import OracleError
from tests.random_driver import Storm, run_storm

OPERATIONS = int(os.environ.get("CHATSERVE_STORM_OPERATIONS", "100000"))


@pytest.mark.timeout(3600)
def test_storm(capsys: pytest.CaptureFixture[str]) -> None:
    """10^5 operations (more by ``CHATSERVE_STORM_OPERATIONS``): no wrong token, no leaked block, no empty event."""
    report = run_storm(OPERATIONS, seed=20261129)
    with capsys.disabled():
        print("\nstorm: " + "  ".join(f"{key}={value:,}" for key, value in report.items()))
    empty = [kind for kind, count in report.items() if count == 0]
    assert not empty, f"the storm contained no {', '.join(empty)}"


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_num_seqs", "hash_bits"),
    [(1, 200, 8, 64), (16, 12, 8, 64), (16, 60, 16, 64), (2, 90, 3, 64), (4, 160, 12, 0), (4, 60, 8, 2)],
)
def test_storms_of_other_shapes(block_size: int, num_blocks: int, max_num_seqs: int, hash_bits: int) -> None:
    """Other units, pools near one request, few slots, worthless hashes; everything recounted often."""
    hash_block = None if hash_bits == 64 else (lambda tokens: tokens[0] % 2**hash_bits)
    storm = Storm(7, block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs, hash_block=hash_block)
    for index in range(1500):
        storm.operate()
        storm.check_counts()
        if index % 10 == 0:
            check_scheduler(storm.core.scheduler, storm.core.publications.tables)
    storm.drain()
    assert storm.counts["finished"] > 100


def run_until_fault(storm: Storm, every_50: Callable[[], object] = lambda: None) -> str:
    """What the oracle says at the first fault."""
    for index in range(6000):
        try:
            storm.operate()
        except OracleError as error:
            return str(error)
        if index % 50 == 0:
            every_50()
    return "nothing was noticed"


def test_the_storm_notices_a_swapped_block_that_changed() -> None:
    """One bit on the host turns: the checksum of the next block that comes back is wrong."""
    storm = Storm(3, num_host_blocks=64, delayed_copies=True)
    executor = storm.executor

    def turn_a_bit() -> None:
        executor.host_content[:, 0] ^= np.uint64(1)

    assert "does not hold what was sent there" in run_until_fault(storm, turn_a_bit)


def test_the_storm_notices_a_source_given_out_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host blocks that a plan has yet to copy from are not held until it has run."""
    storm = Storm(3, num_host_blocks=64, delayed_copies=True)
    manager = storm.core.manager

    def hold_nothing(blocks: list[int]) -> None:
        manager.host_pool.acquire(blocks)
        for block in blocks:
            manager.host_pool.release([block])
            manager.tree.note_host_idle(block)

    monkeypatch.setattr(manager, "_hold_host", hold_nothing)
    assert "read by one that may see" in run_until_fault(storm)
