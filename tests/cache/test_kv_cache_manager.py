"""KVCacheManager: yes with blocks, or not now with nothing changed; partial blocks, forks, epochs."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chatserve.cache.block_table import BlockTable
from chatserve.cache.invariants import check_manager
from chatserve.cache.kv_cache_manager import KVCacheManager, xxh3_hash

SIZE = 4
ME = (1,)


def ids(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


class Desk:
    """A manager and the sequences that live on it."""

    def __init__(self, num_blocks: int = 32, num_host_blocks: int = 0) -> None:
        self.manager = KVCacheManager(num_blocks, SIZE, xxh3_hash(0), num_host_blocks=num_host_blocks)
        self.now = 0

    def admit(self, tokens: list[int], max_total: int = 100, scopes: tuple[int, ...] = ME) -> BlockTable | None:
        self.now += 1
        match = self.manager.match(ids(tokens), scopes, self.now)
        admission = self.manager.admit(match, scopes, len(tokens), max_total)
        self.cached = admission.num_cached if admission else None
        return admission.table if admission else None

    def finish(self, table: BlockTable, tokens: list[int], computed: int | None = None) -> None:
        self.now += 1
        self.manager.take_copies()
        self.manager.finish_step()
        self.manager.release(table, np.array(tokens, np.int32), len(tokens) if computed is None else computed, self.now)
        check_manager(self.manager, [])

    def serve(self, tokens: list[int], scopes: tuple[int, ...] = ME) -> int:
        table = self.admit(tokens, max_total=len(tokens) + 1, scopes=scopes)
        assert table is not None
        cached = self.cached
        assert cached is not None
        self.finish(table, tokens)
        return cached


def test_a_whole_prompt_hit_leaves_the_last_token_to_compute() -> None:
    """Its logits are needed: lengths around the block boundary, asked twice (vllm#11186, nano-vllm#144)."""
    for length in range(1, 14):
        desk = Desk()
        prompt = list(range(length))
        assert desk.serve(prompt) == 0
        assert desk.serve(prompt) == length - 1


def test_divergence_inside_a_block_reuses_exactly_the_common_part() -> None:
    """At every offset, also far into the run (Mooncake#4153)."""
    for offset in range(1, 16):
        desk = Desk()
        desk.serve(list(range(16)))
        assert desk.serve([*range(offset), *range(90, 99)]) == offset


def test_a_partial_tail_is_taken_over_not_copied() -> None:
    """The next turn of a conversation writes on in the block where the last one ended."""
    desk = Desk()
    desk.serve(list(range(6)))
    table = desk.admit([*range(6), 50, 51])
    assert table is not None
    assert desk.cached == 6
    assert desk.manager.num_copies == 0
    desk.finish(table, [*range(6), 50, 51])


def test_a_tail_that_others_may_want_is_copied() -> None:
    """Matched only in part, or owned by a wider scope: taking it over would lose it for them."""
    desk = Desk()
    desk.serve(list(range(7)), scopes=(0,))
    for expected, prompt in ((7, [*range(7), 50]), (5, [*range(5), 60, 61])):
        table = desk.admit(prompt, scopes=(0, 1))
        assert table is not None
        assert desk.cached == expected
        desk.finish(table, prompt)
    assert desk.manager.num_copies == 2
    assert desk.serve([*range(7), 70, 71], scopes=(0,)) == 7


def test_not_now_changes_nothing() -> None:
    """Refused admission and refused growth leave counts, tree and tables as they were."""
    desk = Desk(4)
    desk.serve(list(range(8)))
    holder = desk.admit([*range(100, 107)], max_total=12)
    assert holder is not None
    before = desk.manager.pool.refs.copy()
    assert desk.admit([*range(8), 1, 2, 3, 4, 5]) is None
    assert desk.manager.pool.refs == before
    assert desk.manager.take_copies().copies == b""
    assert desk.manager.grow(holder, 17) is None
    assert desk.manager.pool.refs == before
    check_manager(desk.manager, [holder])


def test_lookup_pins_before_allocation() -> None:
    """A request's own allocation does not evict what its lookup found (vllm#42948)."""
    desk = Desk(6)
    desk.serve(list(range(12)))
    desk.serve(list(range(50, 62)))
    assert desk.serve([*range(12), 1, 2, 3, 4, 5, 6, 7]) == 12


def test_exact_fit_is_served_even_if_the_copy_source_is_in_the_way() -> None:
    """A partial hit gives way when source and copy together do not fit: the pool never wedges."""
    desk = Desk(2)
    desk.serve([1, 2, 3, 4, 5, 6, 7])
    table = desk.admit([1, 2, 9, 9, 9, 9], max_total=9)
    assert table is not None
    assert desk.cached == 0
    desk.finish(table, [1, 2, 9, 9, 9, 9])


def test_fork_shares_all_blocks_and_copies_only_the_partial_last() -> None:
    """n children of a prompt that ends inside a block: n - 1 copies of one block, the last writes in place."""
    desk = Desk()
    manager = desk.manager
    prompt = list(range(10))
    table = desk.admit(prompt)
    assert table is not None
    children = [manager.fork(table, 10) for _ in range(3)]
    shared = table.blocks[:3]
    assert all(child.blocks == shared for child in children)
    family = [*children, table]
    for each in family:
        assert manager.grow(each, 11) is not None
    assert manager.num_copies == 3
    assert len({each.blocks[2] for each in family}) == 4
    assert all(each.blocks[:2] == shared[:2] for each in family)
    manager.take_copies()
    manager.finish_step()
    check_manager(manager, family)


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    """Full blocks stay shared for good."""
    desk = Desk()
    table = desk.admit(list(range(8)))
    assert table is not None
    child = desk.manager.fork(table, 8)
    for each in (table, child):
        assert desk.manager.grow(each, 9) is not None
    assert desk.manager.num_copies == 0
    assert child.blocks[:2] == table.blocks[:2]


def test_a_purged_scope_is_not_written_to_by_older_sequences() -> None:
    """A purge holds against those who were running: they end, and nothing of theirs is found."""
    desk = Desk()
    table = desk.admit(list(range(10)))
    assert table is not None
    desk.manager.publish(table, np.arange(10, dtype=np.int32), 8, desk.now)
    desk.manager.purge(1)
    desk.finish(table, list(range(10)))
    assert desk.manager.pool.num_idle == 0
    assert desk.serve(list(range(10))) == 0
    assert desk.serve(list(range(10))) == 9


def test_discarded_work_leaves_the_tree_with_all_that_was_built_on_it() -> None:
    """What a sequence with broken numbers had published goes; what it had found stays."""
    desk = Desk()
    desk.serve(list(range(8)))
    bad = desk.admit(list(range(20)))
    assert bad is not None
    desk.manager.publish(bad, np.arange(20, dtype=np.int32), 16, desk.now)
    desk.manager.discard(bad)
    desk.finish(bad, list(range(20)))
    assert desk.serve(list(range(20))) == 8


def test_never_is_decided_by_an_empty_pool() -> None:
    """The last token's KV is never written, so it needs no slot."""
    manager = KVCacheManager(4, SIZE, xxh3_hash(0))
    assert manager.fits_ever(17)
    assert not manager.fits_ever(18)


def test_evicted_blocks_come_back_from_the_host() -> None:
    """A conversation that lost its device blocks is found on the host, tail included, and copied back."""
    desk = Desk(8, num_host_blocks=8)
    desk.serve(list(range(14)))
    desk.serve(list(range(50, 82)))
    assert desk.manager.evictor.num_demotions > 0
    assert desk.serve([*range(14), 90]) == 14
    assert desk.manager.num_promotions == 4


def test_a_host_block_freed_by_a_promotion_is_not_given_out_in_the_same_plan() -> None:
    """Its content is read after the demotions of that plan have been written."""
    desk = Desk(4, num_host_blocks=4)
    desk.serve(list(range(16)))
    desk.serve(list(range(50, 66)))
    table = desk.admit(list(range(15)), max_total=16)
    assert table is not None
    copies = desk.manager.take_copies()
    demoted = np.frombuffer(copies.demotions, np.int32).reshape(-1, 2)[:, 1].tolist()
    promoted = np.frombuffer(copies.promotions, np.int32).reshape(-1, 2)[:, 0].tolist()
    assert promoted
    assert set(demoted).isdisjoint(promoted)
    desk.finish(table, list(range(15)))


def test_a_full_host_tier_drops_what_is_oldest_and_never_waits() -> None:
    """The least recently used run leaves the host; the device always gets its blocks."""
    desk = Desk(4, num_host_blocks=4)
    for start in (0, 100, 200, 300):
        desk.serve(list(range(start, start + 16)))
    assert desk.manager.evictor.num_host_drops > 0
    assert desk.serve(list(range(16))) == 0
    assert desk.serve(list(range(300, 316))) > 0


def test_the_host_tier_honours_scopes() -> None:
    """Demoted blocks of one tenant are invisible to another, and found by their owner (sglang#26747)."""
    desk = Desk(4, num_host_blocks=16)
    desk.serve(list(range(15)), scopes=(1,))
    desk.serve(list(range(50, 65)), scopes=(1,))
    assert desk.manager.tree.host_usage[0] > 0
    assert desk.serve(list(range(15)), scopes=(2,)) == 0
    assert desk.serve(list(range(15)), scopes=(1,)) == 14


def test_purge_forgets_both_tiers() -> None:
    """Nothing of a purged scope is left on the host either."""
    desk = Desk(4, num_host_blocks=16)
    desk.serve(list(range(15)), scopes=(1,))
    desk.serve(list(range(50, 65)), scopes=(1,))
    desk.manager.purge(1)
    assert desk.manager.host_pool.num_free == 16
    assert desk.serve(list(range(15)), scopes=(1,)) == 0


class ManagerMachine(RuleBasedStateMachine):
    """Conservation and isolation under any order of admit, grow, publish, fork, release, purge and steps."""

    num_host_blocks = 0

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(12, 2, lambda tokens: tokens[0] % 2, num_host_blocks=self.num_host_blocks)
        self.live: list[tuple[BlockTable, list[int], int]] = []
        self.now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        extra=st.integers(1, 6),
        scopes=st.sampled_from([(0,), (0, 1), (0, 2), (0, 3, 4)]),
    )
    def admit(self, tokens: list[int], extra: int, scopes: tuple[int, ...]) -> None:
        match = self.manager.match(ids(tokens), scopes, self.tick())
        total = len(tokens) + extra
        refs = self.manager.pool.refs.copy()
        admission = self.manager.admit(match, scopes, len(tokens), total)
        if admission is None:
            assert self.manager.pool.refs == refs
            assert self.live or not self.manager.fits_ever(total)
            return
        assert admission.num_cached < len(tokens)
        self.live.append((admission.table, list(tokens), admission.num_cached))

    def _pick(self, index: int) -> tuple[BlockTable, list[int], int]:
        return self.live[index % len(self.live)]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def compute_and_publish(self, index: int) -> None:
        table, tokens, _ = self._pick(index)
        self.manager.publish(table, np.array(tokens, np.int32), len(tokens), self.tick())
        self.live[index % len(self.live)] = (table, tokens, len(tokens))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20), token=st.integers(0, 2))
    def decode(self, index: int, token: int) -> None:
        table, tokens, computed = self._pick(index)
        if computed == len(tokens) and self.manager.grow(table, len(tokens) + 1) is not None:
            self.live[index % len(self.live)] = (table, [*tokens, token], computed + 1)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def fork(self, index: int) -> None:
        table, tokens, computed = self._pick(index)
        if computed == len(tokens) and not table.shared_tail:
            self.manager.publish(table, np.array(tokens, np.int32), computed, self.tick())
            self.live.append((self.manager.fork(table, computed), list(tokens), computed))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def extend(self, index: int) -> None:
        table, tokens, computed = self._pick(index)
        if computed < len(tokens):
            found, _ = self.manager.extend_match(table, ids(tokens), computed, self.tick())
            assert computed <= found < len(tokens)
            self.live[index % len(self.live)] = (table, tokens, found)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        self.end_step()
        table, tokens, computed = self.live.pop(index % len(self.live))
        self.manager.release(table, np.array(tokens, np.int32), computed, self.tick())

    @rule(scope=st.integers(0, 4))
    def purge(self, scope: int) -> None:
        self.manager.purge(scope)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def discard(self, index: int) -> None:
        self.manager.discard(self._pick(index)[0])

    @rule()
    def end_step(self) -> None:
        self.manager.take_copies()
        self.manager.finish_step()

    @invariant()
    def counts_equal_holders(self) -> None:
        manager = self.manager
        check_manager(manager, [table for table, _, _ in self.live])
        assert manager.pool.num_free + manager.pool.num_idle + manager.pool.num_held == manager.pool.num_blocks

    def teardown(self) -> None:
        self.end_step()
        for table, tokens, computed in self.live:
            self.manager.release(table, np.array(tokens, np.int32), computed, self.tick())
        check_manager(self.manager, [])
        assert self.manager.pool.num_held == 0


class TwoTierMachine(ManagerMachine):
    """The same with a host tier that is too small for everything."""

    num_host_blocks = 7


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTwoTierMachine = TwoTierMachine.TestCase
TestTwoTierMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
