"""BlockPool: counts are exact, ids are unique, misuse is loud."""

from __future__ import annotations

import pytest

from chatserve.cache.block_pool import BlockPool


def test_allocation_gives_distinct_blocks_and_release_returns_them() -> None:
    """No id is handed out twice, and all come back."""
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(5)
    assert sorted(first + second) == list(range(8))
    assert pool.num_free == 0
    pool.release(first)
    pool.release(second)
    pool.check()
    assert pool.num_free == 8


def test_a_freed_run_is_given_out_again_in_its_own_order() -> None:
    """Blocks are freed in reverse, so heads are reused first and tails stay contiguous."""
    pool = BlockPool(4)
    run = pool.allocate(4)
    pool.release(run)
    assert pool.allocate(4) == run


def test_idle_is_cached_without_a_sequence() -> None:
    """free + idle + held = total through the whole life of a cached block."""
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.hold_cached(blocks)
    assert (pool.num_free, pool.num_idle, pool.num_held) == (1, 0, 2)
    pool.release(blocks)
    assert (pool.num_free, pool.num_idle, pool.num_held) == (1, 2, 0)
    pool.acquire(blocks[:1])
    assert (pool.num_free, pool.num_idle, pool.num_held) == (1, 1, 1)
    pool.drop_cached(blocks)
    assert (pool.num_free, pool.num_idle, pool.num_held) == (2, 0, 1)
    pool.release(blocks[:1])
    pool.check()
    assert pool.num_free == 3


def test_releasing_too_often_raises() -> None:
    """A double free is an error at once, not a duplicate id later (vllm-ascend#15990)."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks)


def test_allocating_more_than_free_raises_and_changes_nothing() -> None:
    """The caller has to ask first; a mistake must not corrupt the free list."""
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="asked for"):
        pool.allocate(3)
    pool.check()
    assert pool.num_free == 2
