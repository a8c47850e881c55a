"""The only door to KV memory: match, admit, grow, publish, fork, release.

Owns every sequence's block table and the order in which pool and tree change. Each question about space is
answered with blocks or with *not now*, and on *not now* nothing has changed. Knows logical time (step numbers)
and interned scopes; knows neither requests nor tensors. The scheduler is its only caller.

    table of one sequence, in blocks:

    [ published: held by the tree too ][ private: computed or being computed ][ growth ]
    0                     num_published                                  computed/B      len(blocks)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.block_table import Admission, BlockCopies, BlockTable, TableChange
from chatserve.cache.eviction import EvictionOrder, Evictor, Shares
from chatserve.cache.match import Match
from chatserve.cache.node import TOKEN_BYTES
from chatserve.cache.radix_tree import RadixTree

Int32s = npt.NDArray[np.int32]


def xxh3_hash(seed: int) -> Callable[[bytes], int]:
    """The tree's block hash. ``seed`` is random per process, so that collisions cannot be prepared."""

    def hash_block(tokens: bytes) -> int:
        return xxhash.xxh3_64_intdigest(tokens, seed)

    return hash_block


class KVCacheManager:
    """Facade over the pools of both tiers, the tree and its eviction.

    Attributes:
        copy_sources, host_blocks_in_flight: held by plans that have not run yet.
    """

    def __init__(
        self, num_blocks: int, block_size: int, hash_block: Callable[[bytes], int], *, num_host_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.tree = tree = RadixTree(self.pool, self.host_pool, block_size, hash_block)
        self.shares = Shares(num_blocks)
        tree.device_order = EvictionOrder(tree.is_device_evictable, tree.owner, tree.device_usage, self.shares)
        tree.host_order = EvictionOrder(tree.is_host_evictable, tree.owner, tree.host_usage, Shares(num_host_blocks))
        self.evictor = Evictor(tree)
        self.num_copies = 0
        self.num_promotions = 0
        self.num_partial_hits = 0
        self.copy_sources: list[int] = []
        self.host_blocks_in_flight: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._promotions: list[tuple[int, int]] = []
        self.num_pinned = 0
        self._epochs: dict[int, int] = {}
        self._clears: set[int] = set()
        self._host_clears: set[int] = set()

    # ------------------------------------------------------------------ questions

    @property
    def num_available(self) -> int:
        """Blocks that can be given out now: free, or idle in the tree."""
        return self.pool.num_free + self.pool.num_idle

    def fits_ever(self, max_total_tokens: int) -> bool:
        """Whether an empty pool, less what is pinned, holds one sequence of this many tokens.

        The last token's KV is never written, so it needs no slot.
        """
        return self._blocks_for(max_total_tokens - 1) <= self.pool.num_blocks - self.num_pinned

    def match(self, tokens: bytes, scopes: tuple[int, ...], now: int, limit: int | None = None) -> Match:
        """Longest cached prefix of int32 ``tokens`` that leaves at least the last token to compute.

        Args:
            limit: match at most this many tokens.
        """
        end = len(tokens) - TOKEN_BYTES
        if limit is not None:
            end = min(end, limit * TOKEN_BYTES)
        return self.tree.match(tokens[:end], scopes, now)

    def blocks_missing(self, match: Match, num_known: int, max_total_tokens: int) -> int:
        """How many blocks beyond those available now an admission of this match would need."""
        fresh = self._admission_blocks(num_known, max_total_tokens) - len(match.blocks)
        idle = self._idle_among(match.blocks)
        return fresh - (self.num_available - idle)

    def _admission_blocks(self, num_known: int, max_total_tokens: int) -> int:
        """Every known token and one block of growth, but never more than the finished sequence needs."""
        known = self._blocks_for(num_known)
        return max(known, min(known + 1, self._blocks_for(max_total_tokens - 1)))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _idle_among(self, blocks: list[int]) -> int:
        # Matched blocks are all cached; idle are those without a second holder.
        refs = self.pool.refs
        return sum(1 for block in blocks if refs[block] == 1)

    # ------------------------------------------------------------------ taking

    def admit(self, match: Match, scopes: tuple[int, ...], num_known: int, max_total_tokens: int) -> Admission | None:
        """Take the match, promote its host part, and take the blocks of all other known tokens and one block of
        growth together, or nothing.

        Args:
            match: of this very state of the tree (nothing happened since).
            num_known: tokens known so far, prompt and output.
            max_total_tokens: tokens the sequence may reach.
        """
        pool = self.pool
        fresh = self._admission_blocks(num_known, max_total_tokens) - len(match.blocks)
        available = self.num_available - self._idle_among(match.blocks)
        if fresh > available:
            return None
        tail = match.tail_block
        taken_over = match.tail_takeable and not match.tail_on_host and tail is not None and pool.refs[tail] == 1
        copies = tail is not None and not match.tail_on_host and not taken_over
        if copies and tail is not None and pool.refs[tail] == 1 and fresh > available - 1:
            # The copy's source could not stay: the partial block is given up, not the admission.
            tail, copies = None, False
        pool.acquire(match.blocks)
        self._hold_host(match.host_blocks)
        table = BlockTable(list(match.blocks), match.num_blocks, scopes, self._epochs.get(scopes[-1], 0))
        num_cached = match.num_blocks * self.block_size
        if tail is not None:
            num_cached = match.num_tokens
            self.num_partial_hits += 1
            if taken_over:
                self.tree.take_over(tail)
            elif copies:
                pool.acquire([tail])
            else:
                self._hold_host([tail])
        blocks = self._take(fresh - taken_over)
        promoted = blocks[: len(match.host_blocks)]
        self._promote(match.host_blocks, promoted)
        self.tree.promote(match.host_blocks, promoted)
        rest = blocks[len(promoted) :]
        if tail is not None:
            if taken_over:
                rest.insert(0, tail)
            elif copies:
                self._plan_copy(tail, rest[0])
            else:
                self._promote([tail], rest[:1])
                if match.tail_takeable:
                    self.tree.take_over_host(tail)
        table.blocks += promoted + rest
        return Admission(table, num_cached)

    def _take(self, count: int) -> list[int]:
        short = count - self.pool.num_free
        if short > 0:
            evictor = self.evictor
            before = len(evictor.demotions)
            evictor.free_device(short)
            self.host_blocks_in_flight += (host for _, host in evictor.demotions[before:])
        return self.pool.allocate(count)

    def _hold_host(self, host_blocks: list[int]) -> None:
        self.host_pool.acquire(host_blocks)
        self.host_blocks_in_flight += host_blocks

    def _promote(self, host_blocks: list[int], blocks: list[int]) -> None:
        """Copy host blocks, held by the plan, to device blocks."""
        self._promotions += zip(host_blocks, blocks, strict=True)
        self.num_promotions += len(blocks)

    def _plan_copy(self, source: int, destination: int) -> None:
        """Copy a block before the forward; the caller has acquired ``source``, which stays held until then."""
        self._copies.append((source, destination))
        self.copy_sources.append(source)
        self.num_copies += 1

    @property
    def must_clear(self) -> bool:
        """Whether purged blocks wait to be zeroed."""
        return bool(self._clears or self._host_clears)

    def take_copies(self) -> BlockCopies:
        """The planned copies; they are due before the next forward."""
        evictor = self.evictor
        if not (self._copies or self._promotions or evictor.demotions or self.must_clear):
            return _NO_COPIES
        taken = BlockCopies(
            _ids(self._clears),
            _ids(self._host_clears),
            _pairs(evictor.demotions),
            _pairs(self._promotions),
            _pairs(self._copies),
        )
        self._clears.clear()
        self._host_clears.clear()
        evictor.demotions.clear()
        self._promotions.clear()
        self._copies.clear()
        return taken

    def finish_step(self) -> None:
        """The plan that contained the taken copies has run: what it read and wrote is released."""
        if self.copy_sources:
            for source in self.copy_sources:
                self.pool.release([source])
                self.tree.note_idle(source)
            self.copy_sources.clear()
        if self.host_blocks_in_flight:
            for block in self.host_blocks_in_flight:
                self.host_pool.release([block])
                self.tree.note_host_idle(block)
            self.host_blocks_in_flight.clear()

    def grow(self, table: BlockTable, num_tokens: int) -> list[TableChange] | None:
        """Make positions up to ``num_tokens`` writable: add blocks, and copy a shared last block first.

        Returns:
            The changed places of the table, or ``None`` for *not now*.
        """
        changes: list[TableChange] = []
        last = (num_tokens - 1) // self.block_size
        copies = table.shared_tail and last < len(table.blocks) and self._num_holders(table.blocks[last]) > 1
        fresh = 1 if copies else last + 1 - len(table.blocks)
        if fresh > self.num_available:
            return None
        if copies:
            shared = table.blocks[last]
            [block] = self._take(1)
            # This sequence's own hold on the shared block becomes the copy's hold on its source.
            self._plan_copy(shared, block)
            table.blocks[last] = block
            changes.append((last, block))
        elif fresh > 0:
            for block in self._take(fresh):
                changes.append((len(table.blocks), block))
                table.blocks.append(block)
        table.shared_tail = False
        return changes

    def _num_holders(self, block: int) -> int:
        """Holders that still want the block's content after this plan's copies."""
        return self.pool.refs[block] - self.copy_sources.count(block)

    def extend_match(
        self, table: BlockTable, tokens: bytes, num_computed: int, now: int
    ) -> tuple[int, list[TableChange]]:
        """Adopt what others have published since, for a sequence that is still prefilling.

        Args:
            tokens: int32, all known tokens.

        Returns:
            The new number of computed tokens, and the changed places of the table.
        """
        if table.detached or table.num_published * self.block_size != num_computed:
            return num_computed, []
        match = self.match(tokens, table.scopes, now)
        if (
            match.num_tokens <= num_computed
            or match.blocks[: table.num_published] != (table.blocks[: table.num_published])
        ):
            return num_computed, []
        changes = self._adopt(table, match.blocks[table.num_published :])
        computed = table.num_published * self.block_size
        # What lies on the host was found at admission; promoting in the middle of a prefill is not worth a path.
        if match.tail_block is not None and not match.host_blocks and not match.tail_on_host:
            self.pool.acquire([match.tail_block])
            self._plan_copy(match.tail_block, table.blocks[table.num_published])
            self.num_partial_hits += 1
            computed = match.num_tokens
        return max(computed, num_computed), changes

    def _adopt(self, table: BlockTable, blocks: list[int]) -> list[TableChange]:
        """Replace the table's next blocks by the tree's, free those, and count the run as published."""
        start = table.num_published
        changes: list[TableChange] = []
        dropped: list[int] = []
        taken: list[int] = []
        for index, block in enumerate(blocks, start):
            own = table.blocks[index]
            if own != block:
                taken.append(block)
                dropped.append(own)
                table.blocks[index] = block
                changes.append((index, block))
        self.pool.acquire(taken)
        self.pool.release(dropped)
        table.num_published = start + len(blocks)
        return changes

    # ------------------------------------------------------------------ giving

    def publish(self, table: BlockTable, tokens: Int32s, num_computed: int, now: int) -> list[TableChange]:
        """Show every whole computed block to the scope; where the tree has it already, adopt the tree's.

        Returns:
            The changed places of the table.
        """
        start, end = table.num_published, num_computed // self.block_size
        if end <= start or not self._attached(table):
            return []
        run = tokens[start * self.block_size : end * self.block_size].tobytes()
        own = table.blocks[start:end]
        found = self.tree.publish(table.scopes, table.blocks[:start], run, own, now)
        if found is own:
            table.num_published = end
            if table.first_own is None:
                table.first_own = start
            return []
        if table.first_own is None:
            for index, (mine, theirs) in enumerate(zip(own, found, strict=True), start):
                if mine == theirs:
                    table.first_own = index
                    break
        return self._adopt(table, found)

    def _attached(self, table: BlockTable) -> bool:
        """Whether the table's published prefix is still in the tree, in the same epoch."""
        if not table.detached:
            gone = table.num_published > 0 and self.tree.node_of[table.blocks[table.num_published - 1]] is None
            table.detached = gone or table.epoch != self._epochs.get(table.scopes[-1], 0)
        return not table.detached

    def discard(self, table: BlockTable) -> None:
        """What this sequence computed is not to be trusted: unpublish it and all that was built on it."""
        if table.first_own is not None:
            self.tree.drop_from(table.blocks[table.first_own])
        table.detached = True

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A second sequence with the same first ``num_tokens``: their blocks are shared, nothing is copied yet."""
        shared = table.blocks[: self._blocks_for(num_tokens)]
        self.pool.acquire(shared)
        child = BlockTable(shared, table.num_published, table.scopes, table.epoch)
        child.detached = table.detached
        child.shared_tail = table.shared_tail = True
        return child

    def follow(self, child: BlockTable, parent: BlockTable) -> list[TableChange]:
        """Bring a fork up to what its parent has published since: the same blocks, in the same places.

        Without this the two could end up on different paths of the tree with some blocks in common.
        """
        child.detached = parent.detached
        return self._adopt(child, parent.blocks[child.num_published : parent.num_published])

    def release(self, table: BlockTable, tokens: Int32s, num_computed: int, now: int) -> None:
        """End a sequence's hold: publish what it computed, the partial last block included, then let go."""
        self.publish(table, tokens, num_computed, now)
        full = num_computed // self.block_size
        rest = num_computed % self.block_size
        blocks = table.blocks
        if rest and self._attached(table) and table.num_published == full:
            start = full * self.block_size
            tail = tokens[start : start + rest].tobytes()
            self.tree.publish_tail(table.scopes, blocks[:full], tail, blocks[full], now)
        self.pool.release(blocks)
        if table.epoch != self._epochs.get(table.scopes[-1], 0):
            self._clears.update(block for block in blocks if not self.pool.refs[block])
        self._note_deepest(blocks)
        table.blocks = []
        table.num_published = 0

    def _note_deepest(self, blocks: list[int]) -> None:
        """Of a released table the deepest block in the tree may be evictable now, whoever put it there.

        It may be a fork's tail that a sibling published, or an earlier block where a purge took what hung below.
        """
        node_of = self.tree.node_of
        deepest = next((block for block in reversed(blocks) if node_of[block] is not None), None)
        if deepest is not None:
            self.tree.note_idle(deepest)

    def purge(self, scope: int) -> tuple[int, int]:
        """Forget everything a scope has cached on both tiers, to be zeroed by the next plan.

        Sequences admitted before publish nothing there any more; their blocks are zeroed when they let go.

        Returns:
            Device and host blocks forgotten.
        """
        self._epochs[scope] = self._epochs.get(scope, 0) + 1
        blocks, host_blocks = self.tree.drop_scope(scope)
        self._clears.update(block for block in blocks if not self.pool.refs[block])
        self._host_clears.update(block for block in host_blocks if not self.host_pool.refs[block])
        return len(blocks), len(host_blocks)

    def forget_scope(self, scope: int) -> bool:
        """Drop what is kept about a scope that no sequence uses any more, if nothing of it is cached either."""
        if self.tree.nodes_of(scope):
            return False
        self._epochs.pop(scope, None)
        self.tree.owner_of_scope.pop(scope, None)
        return True

    def pin(self, tokens: bytes, scopes: tuple[int, ...], now: int) -> BlockTable | None:
        """Hold all blocks of a cached prefix, the partial last one too; ``None`` if it is not all on the device."""
        match = self.tree.match(tokens, scopes, now)
        if match.num_tokens * TOKEN_BYTES < len(tokens) or match.host_blocks or match.tail_on_host:
            return None
        blocks = list(match.blocks) if match.tail_block is None else [*match.blocks, match.tail_block]
        self.pool.acquire(blocks)
        self.num_pinned += len(blocks)
        return BlockTable(blocks, len(match.blocks), scopes, self._epochs.get(scopes[-1], 0))

    def unpin(self, table: BlockTable) -> None:
        """End a pin; the blocks stay cached like any others."""
        self.num_pinned -= len(table.blocks)
        self.pool.release(table.blocks)
        self._note_deepest(table.blocks)
        table.blocks = []


_NO_COPIES = BlockCopies(b"", b"", b"", b"", b"")


def _pairs(pairs: list[tuple[int, int]]) -> bytes:
    return np.array(pairs, np.int32).tobytes() if pairs else b""


def _ids(blocks: set[int]) -> bytes:
    return np.array(sorted(blocks), np.int32).tobytes() if blocks else b""
