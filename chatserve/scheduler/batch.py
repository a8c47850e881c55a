"""The persistent batch: one row per running sequence, its counters in columns.

Columns instead of attributes, because a step must cost a few vector operations, not a loop over sequences. The usual
step, in which every row decodes one token, spares even these: see `DecodeRun`. Written by `Scheduler` alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter

import numpy as np

from chatserve.scheduler.decode_run import DecodeRun, Index, Int32s
from chatserve.scheduler.request import Sequence
from chatserve.scheduler.shared_prefixes import SharedPrefixes

NEVER = np.iinfo(np.int32).max

_NO_TOKENS: Int32s = np.empty(0, np.int32)

_MAX_LOG = 128  # steps


class Batch:
    """Rows, and the order in which they are served.

    ``prefilling`` are the rows whose next tokens are not simply the last one: prompts, and what is computed again.
    Columns (int32 unless said otherwise), meaningful where ``sequences[row]`` is set:
        known, computed: tokens there are, and those whose KV is in the cache; a row that decodes knows one more. While
            a `DecodeRun` goes on, as of its last `settle`: `num_known` and `num_computed` tell what they are now.
        capacity: tokens that may be computed before the block table must change.
        publish_at: computed tokens at which the next whole blocks are due for publication; NEVER if none are.
        end_at: computed tokens at which the output ends for length.
        stops_from: computed tokens from which on stop tokens count.
        uses_eos (bool): the model's end tokens end this output.
        own_stops (bool): it has stop token ids of its own.
        tenants: index of who is charged.
        request_ids (int64), choices: whose stream the row's tokens belong to.
    ``own_stop_ids`` counts all rows' own stop tokens; ``prefixes`` knows which rows begin with the same blocks.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int) -> None:
        """
        Args:
            max_tokens: prompt and output of one sequence.
        """
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        # The system provides memory where something is written.
        self._tokens: Int32s = np.zeros((max_num_seqs, max_tokens), np.int32)
        self.known: Int32s = np.zeros(max_num_seqs, np.int32)
        self.prefilling: set[int] = set()
        self.own_stop_ids = Counter[int]()
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
        self._run: DecodeRun | None = None

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

    @property
    def run(self) -> DecodeRun | None:
        """The run of decode steps that goes on, if one does."""
        return self._run

    def decode_run(self) -> DecodeRun:
        """The run that goes on, or one that begins now: all rows decode in the next step."""
        if self._run is None:
            rows, index = self.rows(), self.index()
            self._run = DecodeRun(
                rows,
                index,
                self.computed[index],
                token_ids=self.last_tokens(rows),
                request_ids=self.request_ids[index].tobytes(),
                choices=self.choices[index].tobytes(),
                tenants=self.tenants[index],
                capacity=self.capacity[index],
                publish_at=self.publish_at[index],
                end_at=self.end_at[index],
            )
        return self._run

    @property
    def _num_logged(self) -> int:
        return 0 if self._run is None else self._run.num_logged

    def num_known(self, row: int) -> int:
        """Tokens there are."""
        return int(self.known[row]) + self._num_logged

    def num_computed(self, row: int) -> int:
        """Tokens whose KV is in the cache."""
        return int(self.computed[row]) + self._num_logged

    def known_tokens(self, row: int) -> Int32s:
        """Tokens of a row, prompt first. To look at now: they may not be a copy."""
        tokens, run = self._tokens[row, : self.known[row]], self._run
        if run is None or not run.num_logged:
            return tokens
        column = row if isinstance(run.index, slice) else int(np.searchsorted(run.rows, row))
        return np.concatenate((tokens, run.logged()[:, column]))

    def last_tokens(self, rows: Int32s) -> bytes:
        """int32, the newest token of each of these rows."""
        self.settle()
        return self._tokens[rows, self.known[rows] - 1].tobytes()

    def append(self, rows: Int32s, tokens: Int32s) -> None:
        """Each of these rows gets one more token."""
        self.end_run()
        self._tokens[rows, self.known[rows]] = tokens
        self.known[rows] += 1

    def set_capacity(self, row: int, capacity: int) -> None:
        """A row's table has grown."""
        self.capacity[row] = capacity
        if self._run is not None:
            self._run.growing.note(row, self._run.num_steps + capacity - self.num_computed(row))

    def set_publication(self, row: int, publish_at: int) -> None:
        """A row has published; ``publish_at`` as in the column."""
        self.publish_at[row] = publish_at
        if self._run is not None:
            self._run.publishing.note(row, self._run.num_steps + publish_at - self.num_computed(row))

    def advance(self, tokens: bytes) -> None:
        """A step of the run has brought one token for each row, int32 [n]."""
        assert self._run is not None
        self._run.advance(tokens)
        if self._run.num_logged == _MAX_LOG:
            self.settle()

    def settle(self) -> None:
        """Bring columns and tokens up to date with the run."""
        run = self._run
        if run is not None and run.num_logged:
            count = run.num_logged
            places = self.known[run.rows] + np.arange(count)[:, None]
            self._tokens[run.rows, places] = run.logged()
            self.known[run.index] += count
            self.computed[run.index] += count
            run.clear_log()

    def end_run(self) -> None:
        """The next step is no step of the run."""
        self.settle()
        self._run = None

    def next_is_decode(self, row: int) -> bool:
        """Whether only the row's last token is to be computed, and that is not of its prompt."""
        sequence, known = self.sequences[row], self.num_known(row)
        return sequence is not None and known - self.num_computed(row) == 1 and known > sequence.request.num_prompt

    def place(self, sequence: Sequence, num_computed: int) -> int:
        """Give a sequence a row, move its tokens there and fill its columns; its table is set already."""
        self.end_run()
        row = heapq.heappop(self._free_rows)
        request, sampling = sequence.request, sequence.sampling
        sequence.row = row
        self.sequences[row] = sequence
        known = self.known[row] = len(sequence.tokens)
        self._tokens[row, :known] = sequence.tokens
        sequence.tokens = _NO_TOKENS
        self.computed[row] = num_computed
        # A sequence knows one token more than it has computed when a new one comes.
        self.end_at[row] = request.max_total - 1
        self.stops_from[row] = request.num_prompt + sampling.min_tokens
        self.uses_eos[row] = not sampling.ignore_eos
        self.own_stops[row] = bool(sampling.stop_token_ids)
        self.own_stop_ids.update(sampling.stop_token_ids)
        self.request_ids[row] = request.request_id
        self.choices[row] = sequence.choice
        self.tenants[row] = request.tenant
        key = (request.priority_class, sequence.admission)
        at = bisect_left(self._order_keys, key)
        self._order_keys.insert(at, key)
        self._order.insert(at, sequence)
        self.prefilling.add(row)
        self._rows = None
        return row

    def free(self, sequence: Sequence) -> int:
        """Take a sequence out, with its tokens; returns the row it had."""
        self.end_run()
        row = sequence.row
        sequence.tokens = self.known_tokens(row).copy()
        at = bisect_left(self._order_keys, (sequence.request.priority_class, sequence.admission))
        del self._order_keys[at]
        del self._order[at]
        self._rows = None
        self.prefilling.discard(row)
        if sequence.sampling.stop_token_ids:
            self.own_stop_ids.subtract(sequence.sampling.stop_token_ids)
            self.own_stop_ids = +self.own_stop_ids
        self.sequences[row] = None
        sequence.row = -1
        heapq.heappush(self._free_rows, row)
        return row
