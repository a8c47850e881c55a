"""Which rows of a step begin with the same physical blocks, so that attention reads those once for all of them.

The radix tree gives sequences with a common prefix the same blocks, so equal leading entries of block tables are the
tree's shared path. `SharedPrefixes` keeps the tables as the worker sees them and finds the runs again only where rows
or leading blocks changed: the usual step costs one comparison. `chatserve.scheduler.plan` is the caller.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chatserve.scheduler.output import NewSequence, SharedRuns

Int32s = npt.NDArray[np.int32]

_FIRST_CAPACITY = 64

# Changes of tables that are kept as they came until the tables are looked at.
_MAX_PENDING = 512


class SharedPrefixes:
    """Block tables by row, and the runs of the last step."""

    def __init__(self, max_num_seqs: int) -> None:
        self._tables: Int32s = np.zeros((max_num_seqs, _FIRST_CAPACITY), np.int32)
        self._lengths = [0] * max_num_seqs
        self._pending: list[tuple[int, int, int]] = []
        self._rows: Int32s = np.empty(0, np.int32)
        self._runs: SharedRuns | None = None
        self._stale = True

    def place(self, sequence: NewSequence) -> None:
        """A sequence has appeared in its row."""
        self._apply_pending()
        blocks = np.frombuffer(sequence.block_table, np.int32)
        self._reserve(len(blocks))
        self._tables[sequence.row, : len(blocks)] = blocks
        self._lengths[sequence.row] = len(blocks)
        self._stale = True

    def change(self, changes: list[tuple[int, int, int]]) -> None:
        """Blocks of tables have changed: (row, index, block) each, in this order."""
        lengths = self._lengths
        for row, index, _ in changes:
            # A block appended changes nothing that is shared; one exchanged may.
            if index == lengths[row]:
                lengths[row] = index + 1
            else:
                self._stale = True
        self._pending += changes
        if len(self._pending) > _MAX_PENDING:
            self._apply_pending()

    def runs(self, rows: Int32s, computed: bytes, block_size: int) -> SharedRuns | None:
        """Runs of blocks that several of ``rows`` [n] begin with, ``None`` if there are none.

        Args:
            computed: int32 [n], tokens of those rows in the cache; only blocks full of them are shared.
        """
        if rows is not self._rows:
            self._stale = self._stale or not np.array_equal(rows, self._rows)
            self._rows = rows  # mostly the same object again, and comparing those costs nothing
        if self._stale:
            self._runs, limited = self._find(rows, np.frombuffer(computed, np.int32) // block_size)
            # Where the cache was the limit and not the tables, there may be more to share in the next step.
            self._stale = limited
        return self._runs

    def _apply_pending(self) -> None:
        if self._pending:
            rows, indices, blocks = np.array(self._pending, np.int32).T
            self._reserve(int(indices.max()) + 1)
            self._tables[rows, indices] = blocks
            self._pending.clear()

    def _reserve(self, num_blocks: int) -> None:
        rows, capacity = self._tables.shape
        if num_blocks > capacity:
            wider = np.zeros((rows, max(num_blocks, 2 * capacity)), np.int32)
            wider[:, :capacity] = self._tables
            self._tables = wider

    def _find(self, rows: Int32s, full: Int32s) -> tuple[SharedRuns | None, bool]:
        self._apply_pending()
        n = len(rows)
        first = self._tables[rows, 0].tolist()
        if len(set(first)) == n:
            return None, False
        width = int(full.max())
        tables = self._tables[rows, :width]
        # Beyond what is full, entries that equal no other row's.
        tables = np.where(np.arange(width) < full[:, None], tables, -1 - np.arange(n, dtype=np.int32)[:, None])
        keys = [row.tobytes() for row in tables]
        order = sorted(range(n), key=keys.__getitem__)
        tables = tables[order]
        equal = np.zeros((n - 1, width + 1), np.bool_)
        np.equal(tables[1:], tables[:-1], out=equal[:, :width])
        common = equal.argmin(axis=1)
        # Every row has a block for its next token, so the first entry that is not full is there.
        ordered = rows[order]
        limited = bool((self._tables[ordered[1:], common] == self._tables[ordered[:-1], common]).any())
        return _runs_of(order, common.tolist()), limited


def _runs_of(order: list[int], common: list[int]) -> SharedRuns | None:
    """Every range of neighbours that begin with the same blocks, a longer run after those that it continues.

    Args:
        order: indices of rows, sorted by their blocks.
        common: number of blocks that each shares with the next.
    """
    found: list[tuple[int, int, int]] = []
    open_runs = [(0, 0)]
    for i, length in enumerate([*common, 0], start=1):
        left = i - 1
        while open_runs[-1][0] > length:
            blocks, left = open_runs.pop()
            found.append((blocks, left, i))
        if open_runs[-1][0] < length:
            open_runs.append((length, left))
    if not found:
        return None
    found.sort()
    members = [order[left:right] for _, left, right in found]
    starts = np.cumsum([0, *map(len, members)], dtype=np.int32)
    return SharedRuns(
        blocks=np.array([blocks for blocks, _, _ in found], np.int32).tobytes(),
        starts=starts.tobytes(),
        members=np.concatenate(members).astype(np.int32).tobytes(),
    )
