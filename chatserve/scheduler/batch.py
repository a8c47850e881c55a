"""The persistent batch: one row per running sequence, its counters in columns.

Columns instead of attributes, because the usual step (every row decodes one token) must cost a few vector
operations, not a loop over sequences. Written by `Scheduler` alone.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from chatserve.scheduler.request import Sequence
from chatserve.scheduler.shared_prefixes import SharedPrefixes

NEVER = np.iinfo(np.int32).max

Int32s = npt.NDArray[np.int32]

Index = slice | Int32s
"""Rows as numpy wants them: a slice where they are the first ones, all of them; a view costs a tenth of a gather."""


class Batch:
    """Rows, and the order in which they are served.

    ``tokens[row]`` is the sequence's own token array, here because the usual step only appends to it.
    Columns (int32 unless said otherwise), meaningful where ``sequences[row]`` is set:
        known, computed: tokens known, and tokens whose KV is in the cache.
        capacity: tokens that may be computed before the block table must change.
        publish_at: computed tokens at which the next whole block is due for publication; NEVER if none is.
        max_total: known tokens at which the output ends for length.
        stop_after: known tokens beyond which stop tokens count.
        num_prompt: prompt tokens.
        last_token: the last known token.
        uses_eos (bool): the model's end tokens end this output.
        own_stops (bool): it has stop token ids of its own.
        tenants: index of who is charged.
        request_ids (int64), choices: whose stream the row's tokens belong to.
    ``ones`` and ``indices`` are constants, kept to be sliced. ``prefixes`` knows which rows begin with the same blocks.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.tokens: list[array[int]] = [array("i")] * max_num_seqs
        self.num_own_stops = 0
        self.known: Int32s = np.zeros(max_num_seqs, np.int32)
        self.computed: Int32s = np.zeros(max_num_seqs, np.int32)
        self.capacity: Int32s = np.zeros(max_num_seqs, np.int32)
        self.publish_at: Int32s = np.full(max_num_seqs, NEVER, np.int32)
        self.max_total: Int32s = np.zeros(max_num_seqs, np.int32)
        self.stop_after: Int32s = np.zeros(max_num_seqs, np.int32)
        self.num_prompt: Int32s = np.zeros(max_num_seqs, np.int32)
        self.last_token: Int32s = np.zeros(max_num_seqs, np.int32)
        self.uses_eos = np.zeros(max_num_seqs, np.bool_)
        self.own_stops = np.zeros(max_num_seqs, np.bool_)
        self.request_ids = np.zeros(max_num_seqs, np.int64)
        self.choices: Int32s = np.zeros(max_num_seqs, np.int32)
        self.tenants: Int32s = np.zeros(max_num_seqs, np.int32)
        self.ones: Int32s = np.ones(max_num_seqs, np.int32)
        self.indices: Int32s = np.arange(max_num_seqs, dtype=np.int32)
        self.prefixes = SharedPrefixes(max_num_seqs)
        self._free_rows = list(range(max_num_seqs))
        self._order: list[Sequence] = []
        self._order_keys: list[tuple[int, int]] = []
        self._rows: Int32s | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_free_rows(self) -> int:
        """Sequences that could still be placed."""
        return len(self._free_rows)

    @property
    def order(self) -> list[Sequence]:
        """Running sequences, best class first, then in order of admission; the last is the first victim."""
        return self._order

    def rows(self) -> Int32s:
        """Rows in use, ascending."""
        if self._rows is None:
            self._rows = np.sort(np.fromiter((s.row for s in self._order), np.int32, len(self._order)))
        return self._rows

    def index(self) -> Index:
        """`rows` for indexing columns."""
        rows = self.rows()
        # Free rows are given out lowest first, so a batch that is full, or filling up, is the first rows, all of them.
        if len(rows) and rows[-1] + 1 == len(rows):
            return slice(0, len(rows))
        return rows

    def place(self, sequence: Sequence, num_computed: int) -> int:
        """Give a sequence a row and fill its columns; its table is set already."""
        row = heapq.heappop(self._free_rows)
        request, sampling = sequence.request, sequence.sampling
        sequence.row = row
        self.sequences[row] = sequence
        self.tokens[row] = sequence.tokens
        self.known[row] = len(sequence.tokens)
        self.computed[row] = num_computed
        self.max_total[row] = request.max_total
        self.stop_after[row] = request.num_prompt + sampling.min_tokens
        self.num_prompt[row] = request.num_prompt
        self.last_token[row] = sequence.tokens[-1]
        self.uses_eos[row] = not sampling.ignore_eos
        self.own_stops[row] = bool(sampling.stop_token_ids)
        self.num_own_stops += bool(sampling.stop_token_ids)
        self.request_ids[row] = request.request_id
        self.choices[row] = sequence.choice
        self.tenants[row] = request.tenant
        key = (request.priority_class, sequence.admission)
        at = bisect_left(self._order_keys, key)
        self._order_keys.insert(at, key)
        self._order.insert(at, sequence)
        self._rows = None
        return row

    def free(self, sequence: Sequence) -> int:
        """Take a sequence out; returns the row it had."""
        row = sequence.row
        at = bisect_left(self._order_keys, (sequence.request.priority_class, sequence.admission))
        del self._order_keys[at]
        del self._order[at]
        self._rows = None
        self.num_own_stops -= bool(sequence.sampling.stop_token_ids)
        self.sequences[row] = None
        sequence.row = -1
        heapq.heappush(self._free_rows, row)
        return row
