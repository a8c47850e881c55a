"""RadixTree: runs, splits, partial blocks, scopes, eviction order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from chatserve.cache.invariants import check_tree
from chatserve.cache.kv_cache_manager import KVCacheManager, xxh3_hash
from chatserve.cache.node import common_prefix

SIZE = 4
ME = (1,)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


class Shelf:
    """A tree with a pool, and sequences that publish and leave at once."""

    def __init__(self, num_blocks: int = 64, constant_hash: bool = False) -> None:
        self.manager = KVCacheManager(num_blocks, SIZE, (lambda _: 0) if constant_hash else xxh3_hash(0))
        self.pool, self.tree = self.manager.pool, self.manager.tree
        self.now = 0

    def put(self, tokens: list[int], scopes: tuple[int, ...] = ME) -> list[int]:
        """Publish whole blocks and the rest as a tail, as a finished sequence does; returns the whole blocks."""
        self.now += 1
        whole = len(tokens) // SIZE
        own = self.pool.allocate(whole)
        blocks = self.tree.publish(scopes, [], ids(*tokens[: whole * SIZE]), own, self.now) if whole else []
        adopted = [b for b, mine in zip(blocks, own, strict=True) if b != mine]
        self.pool.acquire(adopted)
        self.pool.release([mine for b, mine in zip(blocks, own, strict=True) if b != mine])
        rest = tokens[whole * SIZE :]
        if rest:
            [tail] = self.pool.allocate(1)
            self.tree.publish_tail(scopes, blocks, ids(*rest), tail, self.now)
            self.pool.release([tail])
            self.tree.note_idle(tail)
        self.pool.release(blocks)
        if blocks:
            self.tree.note_idle(blocks[-1])
        check_tree(self.tree)
        self.pool.check()
        return blocks

    def evict(self, count: int) -> int:
        before = self.pool.num_free
        self.manager.evictor.free_device(count)
        check_tree(self.tree)
        return self.pool.num_free - before

    def cached(self, tokens: list[int], scopes: tuple[int, ...] = ME) -> int:
        self.now += 1
        return self.tree.match(ids(*tokens), scopes, self.now).num_tokens


@pytest.mark.parametrize("constant_hash", [False, True])
def test_match_length_is_the_longest_common_prefix(constant_hash: bool) -> None:
    """To the token, also inside blocks, whatever the hash is worth (vllm#12621, openvino.genai#3722)."""
    rng = random.Random(3)
    shelf = Shelf(2000, constant_hash)
    known: list[list[int]] = []
    for _ in range(60):
        base = rng.choice(known) if known and rng.random() < 0.7 else []
        run = base[: rng.randint(0, len(base))] + [rng.randint(0, 3) for _ in range(rng.randint(1, 20))]
        shelf.put(run)
        known.append(run)
        query = rng.choice(known)[: rng.randint(1, 30)] + [rng.randint(0, 3) for _ in range(5)]
        want = max(common_prefix(ids(*each), 0, ids(*query), 0) // 4 for each in known)
        assert shelf.cached(query) == want


def test_a_run_grows_in_place_while_it_is_a_leaf() -> None:
    """A conversation of many turns stays one node, so lookups stay short."""
    shelf = Shelf()
    tokens = list(range(40))
    for end in range(SIZE, 41, SIZE):
        shelf.put(tokens[:end])
    [(_, nodes)] = shelf.tree.root.ordered.values()
    assert [len(node.blocks) for node in nodes] == [10]


def test_a_split_keeps_the_way_from_block_to_node() -> None:
    """node_of is true on both sides of a split, and both continuations are found."""
    shelf = Shelf()
    shelf.put([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])
    shelf.put([1, 2, 3, 4, 5, 6, 7, 8, 7, 7, 7, 7])
    assert shelf.cached([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]) == 12
    assert shelf.cached([1, 2, 3, 4, 5, 6, 7, 8, 7, 7, 7, 7]) == 12
    assert shelf.cached([1, 2, 3, 4, 5, 6, 0, 0]) == 6


def test_publishing_twice_keeps_one_copy() -> None:
    """The second finds the first's blocks and its own become free (vllm#14073)."""
    shelf = Shelf()
    first = shelf.put(list(range(8)))
    second = shelf.put(list(range(8)))
    assert first == second
    assert shelf.pool.num_idle == 2


def test_a_longer_run_removes_the_partial_block_it_covers() -> None:
    """No stale partial key beside the full block (vllm#49125)."""
    shelf = Shelf()
    shelf.put([1, 2])
    shelf.put([1, 2, 3])
    assert shelf.pool.num_idle == 1
    shelf.put([1, 2, 3, 4, 5])
    assert shelf.pool.num_idle == 2
    assert shelf.cached([1, 2, 3, 9]) == 3


def test_scopes_are_compared_on_every_hit() -> None:
    """Same tokens, other scope: nothing; own scope: all. Hash collisions do not matter."""
    for constant in (False, True):
        shelf = Shelf(constant_hash=constant)
        shelf.put([1, 2, 3, 4, 5, 6], (1,))
        assert shelf.cached([1, 2, 3, 4, 5, 6], (2,)) == 0
        assert shelf.cached([1, 2, 3, 4, 5, 6], (1,)) == 6


def test_private_runs_hang_below_public_ones_and_only_their_owner_sees_them() -> None:
    """One public prefix, two tenants, each with a continuation of its own."""
    shelf = Shelf()
    public = shelf.put(list(range(8)), (0,))
    assert shelf.put([*range(8), 21, 22, 23, 24], (0, 1))[:2] == public
    assert shelf.put([*range(8), 31, 32, 33, 34], (0, 2))[:2] == public
    assert shelf.cached([*range(8), 21, 22, 23, 24], (0, 1)) == 12
    assert shelf.cached([*range(8), 21, 22, 23, 24], (0, 2)) == 8
    assert shelf.cached([*range(8), 21, 22, 23, 24], (0,)) == 8


def test_the_longer_private_branch_beats_the_shorter_public_one() -> None:
    """A tenant that was there before publication keeps its own, longer copy."""
    shelf = Shelf()
    shelf.put([*range(8), 21, 22, 23, 24, 25], (1,))
    shelf.put([*range(8)], (0,))
    assert shelf.cached([*range(8), 21, 22, 23, 24, 25], (0, 1)) == 13


def test_at_equal_length_the_shared_copy_wins() -> None:
    """So that private duplicates fall idle and are evicted first."""
    shelf = Shelf()
    mine = shelf.put(list(range(8)), (1,))
    public = shelf.put(list(range(8)), (0,))
    assert mine != public
    assert shelf.tree.match(ids(*range(8)), (0, 1), 99).blocks == public


def test_eviction_takes_the_tail_of_the_least_recently_used_run() -> None:
    """The old run goes from its end; the fresh one stays whole."""
    shelf = Shelf(8)
    old, fresh = list(range(16)), list(range(50, 66))
    shelf.put(old)
    shelf.put(fresh)
    assert shelf.evict(3) == 3
    check_tree(shelf.tree)
    assert shelf.cached(old) == 4
    assert shelf.cached(fresh) == 16
    # Both were looked up just now, `fresh` last, so `old` is still the first to go.
    assert shelf.evict(1) == 1
    assert shelf.cached(old) == 0


def test_what_a_sequence_holds_is_never_evicted() -> None:
    """Nor anything above it (vllm#4764)."""
    shelf = Shelf(8)
    blocks = shelf.put(list(range(16)))
    shelf.pool.acquire(blocks[:2])
    assert shelf.evict(8) == 2
    assert shelf.cached(list(range(16))) == 8
    shelf.pool.release(blocks[:2])
    shelf.tree.note_idle(blocks[1])
    assert shelf.evict(8) == 2
    assert shelf.pool.num_free == 8


def test_an_evicted_run_is_not_found_again_under_its_old_key() -> None:
    """Blocks reused for Q never answer for P (kvcached#362)."""
    shelf = Shelf(4)
    shelf.put(list(range(16)))
    shelf.evict(4)
    shelf.put(list(range(50, 66)))
    assert shelf.cached(list(range(16))) == 0
    assert shelf.cached(list(range(50, 66))) == 16


def test_dropping_a_scope_leaves_the_others() -> None:
    """Purging a tenant takes its runs, wherever they hang."""
    shelf = Shelf()
    shelf.put(list(range(8)), (0,))
    shelf.put([*range(8), 21, 22, 23, 24], (0, 1))
    shelf.put([5, 5, 5, 5], (1,))
    shelf.put([*range(8), 31, 32, 33, 34], (0, 2))
    shelf.tree.drop_scope(1)
    check_tree(shelf.tree)
    assert shelf.cached([*range(8), 21, 22, 23, 24], (0, 1)) == 8
    assert shelf.cached([5, 5, 5, 5], (1,)) == 0
    assert shelf.cached([*range(8), 31, 32, 33, 34], (0, 2)) == 12


def test_eviction_does_not_walk_the_tree() -> None:
    """Freeing one block of 20,000 nodes costs what it costs with 200 (sglang#26796): counted in heap moves."""

    def pops(nodes: int) -> int:
        shelf = Shelf(nodes + 1)
        tree, pool = shelf.tree, shelf.pool
        for i in range(nodes):
            [block] = pool.allocate(1)
            tree.publish(ME, [], ids(i, i, i, i), [block], i + 1)
            pool.release([block])
            tree.note_idle(block)
        calls = 0
        original = tree.is_device_evictable

        def counted(node: object) -> bool:
            nonlocal calls
            calls += 1
            return original(node)  # type: ignore[arg-type]

        tree.device_order._is_evictable = counted
        assert shelf.evict(5) == 5
        return calls

    assert pops(20_000) == pops(200)


def test_publishing_beside_many_siblings_looks_at_few_of_them() -> None:
    """A tenant with 5,000 prompts that begin alike slows nobody's steps down: a few bisections, never a walk."""
    shelf = Shelf(5002)
    tree, pool = shelf.tree, shelf.pool
    for i in range(5000):
        [block] = pool.allocate(1)
        tree.publish(ME, [], ids(7, i, i, i), [block], i + 1)
        pool.release([block])
        tree.note_idle(block)
    for partial in ((7, 6001), (7, 6001, 6002)):
        [block] = pool.allocate(1)
        tree.publish_tail(ME, [], ids(*partial), block, 6000)
        pool.release([block])
        tree.note_idle(block)
    check_tree(tree)
    looked_at = 0

    class Counting(list[bytes]):
        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(index)  # type: ignore[index]

    keys, nodes = tree.root.ordered[ME[0]]
    assert sum(len(key) < SIZE * 4 for key in keys) == 1  # a longer partial block replaces what it covers
    tree.root.ordered[ME[0]] = (Counting(keys), nodes)
    [block] = pool.allocate(1)
    tree.publish(ME, [], ids(7, 6001, 6002, 6003), [block], 7000)
    assert 0 < looked_at < 200
    keys, _ = tree.root.ordered[ME[0]]
    assert all(len(key) == SIZE * 4 for key in keys)
    tree.root.ordered[ME[0]] = (list(keys), nodes)
    check_tree(tree)
