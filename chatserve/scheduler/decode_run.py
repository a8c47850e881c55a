"""Steps in which all rows of the batch decode: what they have in common, and when which row needs something.

After a step caches are full of weights, and what costs is not the work but every new line of code and data that it
touches. One numpy operation on 64 numbers then takes as long as hundreds of lines of Python, so a usual step has none.
What stays the same is kept, what comes due is in calendars, tokens are logged and written to their rows later, and the
rows' counts are one number. `chatserve.scheduler.batch` makes one of its columns and brings them up to date from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

Index = slice | Int32s
"""Rows as numpy wants them: a slice where they are the first ones, all of them; a view costs a tenth of a gather."""


class Calendar:
    """Rows by the step at which something is due for them."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Iterable[int], steps: Iterable[int]) -> None:
        self._rows: dict[int, list[int]] = {}
        for row, step in zip(rows, steps, strict=True):
            self.note(row, max(0, step))

    def note(self, row: int, step: int) -> None:
        """Something is due for ``row`` at ``step``, which is not over."""
        self._rows.setdefault(step, []).append(row)

    def take(self, step: int) -> Sequence[int]:
        """Rows that are due now; asked for each step once."""
        return self._rows.pop(step, ())


class DecodeRun:
    """From the first step in which all rows decode until a row comes or goes.

    Attributes:
        rows: int32 [n], ascending; ``row_bytes`` are they.
        index: the same for indexing columns.
        num_new, sources: as `SchedulerOutput` has them.
        request_ids, choices: as `StepNews` has them.
        token_ids: as `SchedulerOutput` has them; what a step brings is what the next one computes.
        tenants: who is charged, and for how many of the rows.
        num_steps: steps so far.
        growing, publishing, ending: rows by ``num_steps`` at which they need a block before they run, publish after
            they ran, or have reached their length.
    """

    __slots__ = (
        "_computed",
        "_log",
        "choices",
        "ending",
        "growing",
        "index",
        "num_new",
        "num_steps",
        "publishing",
        "request_ids",
        "row_bytes",
        "rows",
        "sources",
        "tenants",
        "token_ids",
    )

    def __init__(
        self,
        rows: Int32s,
        index: Index,
        computed: Int32s,
        *,
        token_ids: bytes,
        request_ids: bytes,
        choices: bytes,
        tenants: Int32s,
        capacity: Int32s,
        publish_at: Int32s,
        end_at: Int32s,
    ) -> None:
        """Columns of `Batch` for these rows, [n] each."""
        numbers = rows.tolist()
        self.rows, self.index = rows, index
        self.row_bytes = rows.tobytes()
        self.num_new = np.ones(len(numbers), np.int32).tobytes()
        self.sources = np.arange(len(numbers), dtype=np.int32).tobytes()
        self.request_ids, self.choices, self.token_ids = request_ids, choices, token_ids
        self.tenants = Counter(tenants.tolist())
        self.num_steps = 0
        self.growing = Calendar(numbers, (capacity - computed).tolist())
        self.publishing = Calendar(numbers, (publish_at - computed).tolist())
        self.ending = Calendar(numbers, (end_at - computed).tolist())
        self._computed = int.from_bytes(computed.tobytes(), "little")
        self._log: list[bytes] = []

    def num_computed(self) -> bytes:
        """int32 [n], tokens of each row in the cache."""
        # All counts as digits of one number: adding one to each is one addition.
        each = int.from_bytes(self.num_new, "little")
        return (self._computed + self.num_steps * each).to_bytes(len(self.num_new), "little")

    @property
    def num_logged(self) -> int:
        """Steps in the log."""
        return len(self._log)

    def advance(self, tokens: bytes) -> None:
        """A step has brought one token for each row, int32 [n]."""
        self.token_ids = tokens
        self.num_steps += 1
        self._log.append(tokens)

    def logged(self) -> Int32s:
        """Tokens of the steps in the log, int32 [steps, n]."""
        return np.frombuffer(b"".join(self._log), np.int32).reshape(-1, len(self.rows))

    def clear_log(self) -> None:
        """Everything in it is in the rows now."""
        self._log.clear()
