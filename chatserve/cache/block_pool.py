"""The physical blocks of one tier: who holds them, which are free.

Knows reference counts and nothing of tokens, trees or tensors. A block's holders are the radix tree (at most
once, marked in `cached`) and every live sequence whose table contains it. `KVCacheManager` and `RadixTree` are
the only callers. Plain lists, not arrays: most calls concern one block.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Reference counts and the free list of ``num_blocks`` blocks.

    Invariant: ``num_free + num_idle + num_held == num_blocks``, where an *idle* block is one whose only holder is
    the tree, and a *held* one is in some sequence's table.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.cached = bytearray(num_blocks)
        self.num_idle = 0
        # Popped from the end: low ids first on a fresh pool, most recently freed first later (still warm).
        self.free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks without any holder."""
        return len(self.free)

    @property
    def num_held(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - len(self.free) - self.num_idle

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks for one holder. The caller has made sure that they exist."""
        free, refs = self.free, self.refs
        if count > len(free):
            raise RuntimeError(f"{count} blocks asked for, {len(free)} free")
        taken = free[len(free) - count :]
        del free[len(free) - count :]
        taken.reverse()
        for block in taken:
            refs[block] = 1
        return taken

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add one sequence as a holder of each (distinct, already held) block."""
        refs = self.refs
        for block in blocks:
            count = refs[block]
            refs[block] = count + 1
            if count == 1 and self.cached[block]:
                self.num_idle -= 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one sequence as a holder of each (distinct) block; those without holders become free.

        Freed in reverse, so that the first blocks of a run are given out again first.
        """
        refs = self.refs
        for block in reversed(blocks):
            count = refs[block] - 1
            refs[block] = count
            if count == 0:
                self.free.append(block)
            elif count == 1 and self.cached[block]:
                self.num_idle += 1
            elif count < 0:
                raise RuntimeError("a block was released more often than it was held")

    def hold_cached(self, blocks: Sequence[int]) -> None:
        """The tree becomes a holder of blocks that a sequence holds."""
        refs, cached = self.refs, self.cached
        for block in blocks:
            refs[block] += 1
            cached[block] = 1

    def drop_cached(self, blocks: Sequence[int]) -> None:
        """The tree gives blocks up; those without another holder become free."""
        refs, cached = self.refs, self.cached
        for block in reversed(blocks):
            count = refs[block] - 1
            refs[block] = count
            cached[block] = 0
            if count == 0:
                self.free.append(block)
                self.num_idle -= 1

    def hand_over(self, block: int) -> None:
        """The tree's hold on an idle block becomes a sequence's hold, without the block becoming free."""
        self.cached[block] = 0
        self.num_idle -= 1

    def recount(self) -> tuple[int, int]:
        """(held, idle) counted from the references. O(num_blocks)."""
        held = idle = 0
        for count, cached in zip(self.refs, self.cached, strict=True):
            if count == 1 and cached:
                idle += 1
            elif count:
                held += 1
        return held, idle

    def check(self) -> None:
        """Recount everything and raise on the first contradiction. For tests and idle probes."""
        free, refs = self.free, self.refs
        if len(set(free)) != len(free):
            raise RuntimeError("a block is twice in the free list")
        if refs.count(0) != len(free) or any(refs[block] for block in free):
            raise RuntimeError("free list and reference counts disagree")
        if any(count < 0 for count in refs) or any(self.cached[block] for block in free):
            raise RuntimeError("negative count, or a free block marked as cached")
        if self.recount() != (self.num_held, self.num_idle):
            raise RuntimeError("held or idle count is wrong")
