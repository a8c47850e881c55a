"""Building one step's `SchedulerOutput` from decisions.

`RowChanges` collects what must be told to the worker about rows between two plans; `Plan` collects the decisions of
one step and keeps what `Scheduler.update` needs to read the worker's answer. Neither decides anything.
"""

from __future__ import annotations

import numpy as np

from chatserve.cache.block_table import TableChange
from chatserve.cache.kv_cache_manager import KVCacheManager
from chatserve.scheduler.batch import Batch, Index, Int32s
from chatserve.scheduler.output import NewSequence, SchedulerOutput
from chatserve.scheduler.request import Sequence


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

    def take(self) -> tuple[bytes, Int32s]:
        """Freed rows, and (row, index, block) triples of shape [t, 3]; forgets both."""
        freed = np.array(self._freed, np.int32).tobytes()
        tables = np.array(self._tables, np.int32).reshape(-1, 3)
        self._freed.clear()
        self._tables.clear()
        return freed, tables


class Plan:
    """The step under construction and, until `Scheduler.update`, in flight.

    Attributes:
        rows, after: int32 [n]; rows that run, and their computed tokens afterwards.
        sample_rows: int32 [s]; rows that get a token.
        index, sample_index: the same rows for indexing columns of the batch.
        forks: (parent row, child row) pairs of this step.
    """

    def __init__(self) -> None:
        empty = np.empty(0, np.int32)
        self.rows: Int32s = empty
        self.after: Int32s = empty
        self.sample_rows: Int32s = empty
        self.index: Index = empty
        self.sample_index: Index = empty
        self.forks: list[tuple[int, int]] = []
        self._new: list[NewSequence] = []
        self._chunk_rows: list[int] = []
        self._chunk_sizes: list[int] = []
        self._chunk_tokens: list[bytes] = []

    def add_sequence(self, sequence: Sequence) -> None:
        """A sequence appears in its row."""
        table = sequence.table
        assert table is not None
        self._new.append(
            NewSequence(
                row=sequence.row,
                token_ids=sequence.tokens.tobytes(),
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
        self,
        step: int,
        batch: Batch,
        decodes: Int32s,
        decode_index: Index,
        changes: RowChanges,
        manager: KVCacheManager,
    ) -> SchedulerOutput | None:
        """The plan: ``decodes`` rows with one token each, then the chunks. ``None`` if there is nothing to do."""
        count = len(decodes)
        if self._chunk_rows:
            self.index = self.rows = np.concatenate((decodes, np.array(self._chunk_rows, np.int32)))
            num_new = np.concatenate((batch.ones[:count], np.array(self._chunk_sizes, np.int32)))
            last_tokens = batch.last_token[decodes]
            computed = batch.computed[self.rows]
            self.after = computed + num_new
            sources = np.flatnonzero(self.after == batch.known[self.rows]).astype(np.int32)
            self.sample_rows = self.rows[sources]
            if self.forks:
                index_of = {row: index for index, row in enumerate(self.rows.tolist())}
                forked = np.array([(index_of[parent], child) for parent, child in self.forks], np.int32)
                sources = np.concatenate((sources, forked[:, 0]))
                self.sample_rows = np.concatenate((self.sample_rows, forked[:, 1]))
            self.sample_index = self.sample_rows
        elif count:
            self.rows = self.sample_rows = decodes
            self.index = self.sample_index = decode_index
            num_new = batch.ones[:count]
            last_tokens = batch.last_token[decode_index]
            sources = batch.indices[:count]
            computed = batch.computed[decode_index]
            self.after = computed + 1
        elif manager.must_clear:
            # Purged memory is zeroed now, not when somebody happens to run.
            num_new = sources = computed = last_tokens = self.rows
        else:
            return None
        freed, tables = changes.take()
        for sequence in self._new:
            batch.prefixes.place(sequence)
        if len(tables):
            batch.prefixes.change(tables.tolist())
        copies = manager.take_copies()
        return SchedulerOutput(
            step=step,
            freed_rows=freed,
            new_sequences=tuple(self._new),
            table_rows=tables[:, 0].tobytes(),
            table_indices=tables[:, 1].tobytes(),
            table_blocks=tables[:, 2].tobytes(),
            clears=copies.clears,
            host_clears=copies.host_clears,
            demotions=copies.demotions,
            promotions=copies.promotions,
            copies=copies.copies,
            rows=self.rows.tobytes(),
            num_computed=computed.tobytes(),
            num_new=num_new.tobytes(),
            token_ids=last_tokens.tobytes() + b"".join(self._chunk_tokens),
            sample_sources=sources.tobytes(),
            sample_rows=self.sample_rows.tobytes(),
            shared_runs=batch.prefixes.runs(self.rows, computed, manager.block_size) if len(self.rows) > 1 else None,
        )
