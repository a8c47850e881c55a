"""The physical blocks of one tier: who holds them, which are free.

Knows reference counts and nothing of tokens, trees or tensors. A block's holders are the radix tree (at most
once, marked in `cached`) and every live sequence whose table contains it. `KVCacheManager` and `RadixTree` are
the only callers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockPool:
    """Reference counts and the free list of ``num_blocks`` blocks.

    Invariant: ``num_free + num_idle + (blocks held by a sequence) == num_blocks``, where an *idle* block is one
    whose only holder is the tree.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self.cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self.num_idle = 0
        # Popped from the end: low ids first on a fresh pool, most recently freed first later (still warm).
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks without any holder."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - len(self._free) - self.num_idle

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks for one holder. The caller has made sure that they exist."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        if count == 1:
            block = self._free.pop()
            self.refs[block] = 1
            return [block]
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        self.refs[taken] = 1
        return taken

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add one sequence as a holder of each (distinct, already held) block."""
        if not blocks:
            return
        ids = np.asarray(blocks)
        refs = self.refs[ids]
        self.num_idle -= int(np.count_nonzero(self.cached[ids] & (refs == 1)))
        self.refs[ids] = refs + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one sequence as a holder of each (distinct) block; those without holders become free.

        Freed in reverse, so that the first blocks of a run are given out again first.
        """
        if not blocks:
            return
        ids = np.asarray(blocks)
        refs = self.refs[ids] - 1
        if refs.min() < 0:
            raise RuntimeError("a block was released more often than it was held")
        self.refs[ids] = refs
        self.num_idle += int(np.count_nonzero(self.cached[ids] & (refs == 1)))
        if refs.min() == 0:
            self._free.extend(ids[refs == 0][::-1].tolist())

    def hold_cached(self, blocks: Sequence[int]) -> None:
        """The tree becomes a holder of blocks that a sequence holds."""
        ids = np.asarray(blocks)
        self.cached[ids] = True
        self.refs[ids] += 1

    def drop_cached(self, blocks: Sequence[int]) -> None:
        """The tree gives blocks up; those without another holder become free."""
        ids = np.asarray(blocks)
        refs = self.refs[ids] - 1
        self.refs[ids] = refs
        self.cached[ids] = False
        unheld = ids[refs == 0]
        self.num_idle -= len(unheld)
        self._free.extend(unheld[::-1].tolist())

    def hand_over(self, block: int) -> None:
        """The tree's hold on an idle block becomes a sequence's hold, without the block becoming free."""
        self.cached[block] = False
        self.num_idle -= 1

    def check(self) -> None:
        """Recount everything and raise on the first contradiction. O(num_blocks): for tests and idle probes."""
        free = self._free
        if len(set(free)) != len(free):
            raise RuntimeError("a block is twice in the free list")
        if np.count_nonzero(self.refs == 0) != len(free) or self.refs[free].any():
            raise RuntimeError("free list and reference counts disagree")
        if self.refs.min(initial=0) < 0 or self.cached[free].any():
            raise RuntimeError("negative count, or a free block marked as cached")
        if int(np.count_nonzero(self.cached & (self.refs == 1))) != self.num_idle:
            raise RuntimeError("idle count is wrong")
