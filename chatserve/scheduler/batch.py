"""The persistent batch: one row per running sequence, its counters in columns.

Columns instead of attributes, because the usual step (every row decodes one token) must cost a few vector
operations, not a loop over sequences; and what such a step says again and again is kept from the last one (`Decode`).
After a step caches are full of weights, and what costs is not the work but every new line of code and data that it
touches. Written by `Scheduler` alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter

import numpy as np
import numpy.typing as npt

from chatserve.scheduler.request import Sequence
from chatserve.scheduler.shared_prefixes import SharedPrefixes

NEVER = np.iinfo(np.int32).max

Int32s = npt.NDArray[np.int32]

_NO_TOKENS: Int32s = np.empty(0, np.int32)

Index = slice | Int32s
"""Rows as numpy wants them: a slice where they are the first ones, all of them; a view costs a tenth of a gather."""


class Decode:
    """A step in which all rows decode: what of it stays the same while no row comes or goes.

    Attributes:
        rows: int32 [n], ascending; ``row_bytes`` are they.
        index: the same for indexing columns.
        num_new, sources: as `SchedulerOutput` has them.
        request_ids, choices: as `StepNews` has them.
        token_ids: as `SchedulerOutput` has them; what this step brings is what the next one computes.
        tenants: who is charged, and for how many of the rows.
    """

    __slots__ = (
        "choices",
        "index",
        "num_new",
        "request_ids",
        "row_bytes",
        "rows",
        "sources",
        "tenants",
        "token_ids",
    )

    def __init__(self, batch: Batch) -> None:
        self.rows = batch.rows()
        self.index = index = batch.index()
        count = len(self.rows)
        self.row_bytes = self.rows.tobytes()
        self.num_new = np.ones(count, np.int32).tobytes()
        self.sources = np.arange(count, dtype=np.int32).tobytes()
        self.request_ids = batch.request_ids[index].tobytes()
        self.choices = batch.choices[index].tobytes()
        self.token_ids = batch.last_tokens(self.rows)
        self.tenants = Counter(batch.tenants[index].tolist())


class Batch:
    """Rows, and the order in which they are served.

    ``tokens`` (int32 [rows, max_tokens]) has the known tokens of each row's sequence, prompt first: a matrix, because
    the usual step appends one to all. ``prefilling`` are the rows whose next tokens are not simply the last one:
    prompts, and what is computed again.
    Columns (int32 unless said otherwise), meaningful where ``sequences[row]`` is set:
        known: how many tokens there are.
        computed: tokens whose KV is in the cache. A row that decodes knows one more.
        capacity: tokens that may be computed before the block table must change.
        publish_at: computed tokens at which the next whole blocks are due for publication; NEVER if none are.
        end_at: computed tokens at which the output ends for length.
        stops_from: computed tokens from which on stop tokens count.
        uses_eos (bool): the model's end tokens end this output.
        own_stops (bool): it has stop token ids of its own.
        tenants: index of who is charged.
        request_ids (int64), choices: whose stream the row's tokens belong to.
    ``prefixes`` knows which rows begin with the same blocks.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int) -> None:
        """
        Args:
            max_tokens: prompt and output of one sequence.
        """
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        # The system provides memory for what is written and no more.
        self.tokens: Int32s = np.zeros((max_num_seqs, max_tokens), np.int32)
        self.known: Int32s = np.zeros(max_num_seqs, np.int32)
        self.prefilling: set[int] = set()
        self.num_own_stops = 0
        self.computed: Int32s = np.zeros(max_num_seqs, np.int32)
        self.capacity: Int32s = np.zeros(max_num_seqs, np.int32)
        self.publish_at: Int32s = np.full(max_num_seqs, NEVER, np.int32)
        self.end_at: Int32s = np.zeros(max_num_seqs, np.int32)
        self.stops_from: Int32s = np.zeros(max_num_seqs, np.int32)
        self.uses_eos = np.zeros(max_num_seqs, np.bool_)
        self.own_stops = np.zeros(max_num_seqs, np.bool_)
        self.request_ids = np.zeros(max_num_seqs, np.int64)
        self.choices: Int32s = np.zeros(max_num_seqs, np.int32)
        self.tenants: Int32s = np.zeros(max_num_seqs, np.int32)
        self.prefixes = SharedPrefixes(max_num_seqs)
        self._free_rows = list(range(max_num_seqs))
        self._order: list[Sequence] = []
        self._order_keys: list[tuple[int, int]] = []
        self._rows: Int32s | None = None
        self._index: Index = slice(0, 0)
        self._decode: Decode | None = None

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
            self._rows = rows = np.sort(np.fromiter((s.row for s in self._order), np.int32, len(self._order)))
            # Free rows are given out lowest first, so a batch that is full, or filling up, is the first rows, all of
            # them.
            dense = len(rows) and rows[-1] + 1 == len(rows)
            self._index = slice(0, len(rows)) if dense else rows
        return self._rows

    def index(self) -> Index:
        """`rows` for indexing columns."""
        self.rows()
        return self._index

    def decode(self) -> Decode:
        """A step of all rows."""
        if self._decode is None:
            self._decode = Decode(self)
        return self._decode

    def next_is_decode(self, row: int) -> bool:
        """Whether only the row's last token is to be computed, and that is not of its prompt."""
        sequence, known = self.sequences[row], self.known[row]
        return sequence is not None and bool(known - self.computed[row] == 1 and known > sequence.request.num_prompt)

    def known_tokens(self, row: int) -> Int32s:
        """Tokens of a row, in place."""
        return self.tokens[row, : self.known[row]]

    def last_tokens(self, rows: Int32s) -> bytes:
        """int32, the newest token of each of these rows."""
        return self.tokens[rows, self.known[rows] - 1].tobytes()

    def append(self, rows: Int32s, tokens: Int32s) -> None:
        """Each of these rows gets one more token."""
        self.tokens[rows, self.known[rows]] = tokens
        self.known[rows] += 1

    def place(self, sequence: Sequence, num_computed: int) -> int:
        """Give a sequence a row, move its tokens there and fill its columns; its table is set already."""
        row = heapq.heappop(self._free_rows)
        request, sampling = sequence.request, sequence.sampling
        sequence.row = row
        self.sequences[row] = sequence
        known = self.known[row] = len(sequence.tokens)
        self.tokens[row, :known] = sequence.tokens
        sequence.tokens = _NO_TOKENS
        self.computed[row] = num_computed
        # A sequence knows one token more than it has computed when a new one comes.
        self.end_at[row] = request.max_total - 1
        self.stops_from[row] = request.num_prompt + sampling.min_tokens
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
        self.prefilling.add(row)
        self._rows = self._decode = None
        return row

    def free(self, sequence: Sequence) -> int:
        """Take a sequence out, with its tokens; returns the row it had."""
        row = sequence.row
        sequence.tokens = self.known_tokens(row).copy()
        at = bisect_left(self._order_keys, (sequence.request.priority_class, sequence.admission))
        del self._order_keys[at]
        del self._order[at]
        self._rows = self._decode = None
        self.prefilling.discard(row)
        self.num_own_stops -= bool(sequence.sampling.stop_token_ids)
        self.sequences[row] = None
        sequence.row = -1
        heapq.heappush(self._free_rows, row)
        return row
