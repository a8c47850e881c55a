"""The random driver in CI size: every kind of event must have happened, and nothing may be wrong."""

from __future__ import annotations

import os

import pytest

from chatserve.scheduler.invariants import check_scheduler
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
