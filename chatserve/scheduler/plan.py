"""Building one step's `SchedulerOutput` from decisions.

`RowChanges` collects what must be told to the worker about rows between two plans; `Plan` collects the decisions of
one step and keeps what `Scheduler.update` needs to read the worker's answer. Neither decides anything.
"""

from __future__ import annotations

from array import array

import numpy as np

from chatserve.cache.block_table import TableChange
from chatserve.cache.kv_cache_manager import KVCacheManager
from chatserve.scheduler.batch import Batch
from chatserve.scheduler.decode_run import DecodeRun, Int32s
from chatserve.scheduler.output import NewSequence, SchedulerOutput
from chatserve.scheduler.request import Sequence

_NO_ROWS: Int32s = np.empty(0, np.int32)


class RowChanges:
    """Changed block tables and freed rows that no plan has carried yet."""

    def __init__(self) -> None:
        self._tables: list[tuple[int, int, int]] = []
        self._freed: list[int] = []

    def note(self, row: int, changes: list[TableChange]) -> None:
        """Blocks of a row's table have changed."""
        for index, block in changes:
            self._tables.append((row, index, block))

    def free(self, row: int) -> None:
        """The row's sequence left; whatever was noted for it must not reach the row's next owner."""
        self._freed.append(row)
        if self._tables:
            self._tables = [change for change in self._tables if change[0] != row]

    def take(self) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Freed rows, int32, and (row, index, block) of each change of a table; forgets both."""
        freed = np.array(self._freed, np.int32).tobytes() if self._freed else b""
        tables, self._tables = self._tables, []
        self._freed.clear()
        return freed, tables


class Plan:
    """The step under construction and, until `Scheduler.update`, in flight.

    Attributes:
        rows: int32 [n]; rows that run.
        sample_rows: int32 [s]; rows that get a token.
        run: set where all rows of the batch run and decode; else
        after: int32 [n], computed tokens of ``rows`` afterwards.
        forks: (parent row, child row) pairs of this step.
    """

    def __init__(self) -> None:
        self.rows: Int32s = _NO_ROWS
        self.after: Int32s = _NO_ROWS
        self.sample_rows: Int32s = _NO_ROWS
        self.run: DecodeRun | None = None
        self.forks: list[tuple[int, int]] = []
        self._new: list[NewSequence] = []
        self._chunk_rows: list[int] = []
        self._chunk_sizes: list[int] = []
        self._chunk_tokens: list[bytes] = []

    def add_sequence(self, sequence: Sequence, tokens: Int32s) -> None:
        """A sequence appears in its row, with the tokens it has so far."""
        table = sequence.table
        assert table is not None
        self._new.append(
            NewSequence(
                row=sequence.row,
                token_ids=tokens.tobytes(),
                num_prompt_tokens=sequence.request.num_prompt,
                block_table=np.array(table.blocks, np.int32).tobytes(),
                sampling=sequence.sampling,
                scopes=sequence.request.scopes,
            )
        )

    def add_chunk(self, row: int, tokens: bytes) -> None:
        """A row runs these int32 tokens."""
        self._chunk_rows.append(row)
        self._chunk_sizes.append(len(tokens) // 4)
        self._chunk_tokens.append(tokens)

    def build(
        self, step: int, batch: Batch, decodes: Int32s, changes: RowChanges, manager: KVCacheManager
    ) -> SchedulerOutput | None:
        """The plan: rows ``decodes`` with one token each, then the chunks. ``None`` if there is nothing to do."""
        if not self._chunk_rows and decodes is batch.rows() and len(decodes):
            self.run = run = batch.decode_run()
            self.rows = self.sample_rows = run.rows
            rows = sample_rows = run.row_bytes
            num_computed, num_new, sources, token_ids = run.num_computed(), run.num_new, run.sources, run.token_ids
        elif self._chunk_rows or len(decodes):
            batch.end_run()
            self.rows = np.concatenate((decodes, np.array(self._chunk_rows, np.int32)))
            sizes = np.concatenate((np.ones(len(decodes), np.int32), np.array(self._chunk_sizes, np.int32)))
            computed = batch.computed[self.rows]
            self.after = computed + sizes
            sampled = np.flatnonzero(self.after == batch.known[self.rows]).astype(np.int32)
            self.sample_rows = self.rows[sampled]
            if self.forks:
                index_of = {row: index for index, row in enumerate(self.rows.tolist())}
                forked = np.array([(index_of[parent], child) for parent, child in self.forks], np.int32)
                sampled = np.concatenate((sampled, forked[:, 0]))
                self.sample_rows = np.concatenate((self.sample_rows, forked[:, 1]))
            rows, sample_rows = self.rows.tobytes(), self.sample_rows.tobytes()
            num_new, sources = sizes.tobytes(), sampled.tobytes()
            num_computed = computed.tobytes()
            token_ids = batch.last_tokens(decodes) + b"".join(self._chunk_tokens)
        elif manager.must_clear:
            # Purged memory is zeroed now, not when somebody happens to run.
            rows = sample_rows = num_computed = num_new = sources = token_ids = b""
        else:
            return None
        freed, tables = changes.take()
        for sequence in self._new:
            batch.prefixes.place(sequence)
        table_rows = table_indices = table_blocks = b""
        if tables:
            batch.prefixes.change(tables)
            table_rows, table_indices, table_blocks = (
                array("i", column).tobytes() for column in zip(*tables, strict=True)
            )
        copies = manager.take_copies()
        several = len(self.rows) > 1
        shared = batch.prefixes.runs(self.rows, num_computed, manager.block_size) if several else None
        return SchedulerOutput(
            step=step,
            freed_rows=freed,
            new_sequences=tuple(self._new),
            table_rows=table_rows,
            table_indices=table_indices,
            table_blocks=table_blocks,
            clears=copies.clears,
            host_clears=copies.host_clears,
            demotions=copies.demotions,
            promotions=copies.promotions,
            copies=copies.copies,
            rows=rows,
            num_computed=num_computed,
            num_new=num_new,
            token_ids=token_ids,
            sample_sources=sources,
            sample_rows=sample_rows,
            shared_runs=shared,
        )
