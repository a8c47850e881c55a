"""Chooses one token per row of logits.

`Sampler` keeps what sampling must know about every row of the batch, in columns, so that a step costs the same few
vector operations however many rows it has; only rows with special wishes have an object of their own. As the rows of
one step are mostly those of the last, what they have in common is kept. Knows logits and sampling parameters; knows no
caches or text. Every row is treated on its own: neither its neighbours nor their options change its choice.
`chatserve.worker.model_runner` is the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from chatserve_kernels.interface import Backend, Draws, StepLogits, draw_options

from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import SampleLogprobs
from chatserve.worker.special_row import Changed, SpecialRow, undo

# Below this temperature the softmax is one-hot but for exact ties, so the row is greedy.
_GREEDY_TEMPERATURE = 1e-5

Int32s = npt.NDArray[np.int32]


class Samples(NamedTuple):
    """Result of one `Sampler.sample` call.

    Attributes:
        tokens: int32 [s], the chosen ids; may be overwritten by the next step.
        logprobs: one entry per row, or ``None`` where no row asked.
    """

    tokens: Int32s
    logprobs: tuple[SampleLogprobs | None, ...] | None


class _Group:
    """Rows that are sampled together, and what of that stays the same while none of them changes.

    Attributes:
        row_bytes: int32 [s], the rows.
        drawn, drawn_rows: those that are not greedy, as indices into the rows and as rows; their ``logits_rows``,
            ``options``, ``seeds`` and ``positions`` are what `Draws` has of them, and ``steps`` counts since.
        all_drawn: none is greedy.
        special: (index into the rows, row, wishes) of those that have some.
    """

    __slots__ = (
        "all_drawn",
        "drawn",
        "drawn_rows",
        "logits_rows",
        "options",
        "positions",
        "row_bytes",
        "seeds",
        "special",
        "steps",
    )

    def __init__(self, sampler: Sampler, row_bytes: bytes) -> None:
        rows = np.frombuffer(row_bytes, "<i4")
        present = sampler.present[rows]
        if not present.all():
            raise RuntimeError(f"The plan samples for row {rows[present.argmin()]}, which holds no sequence.")
        self.row_bytes = row_bytes
        self.drawn = np.flatnonzero(~sampler.greedy[rows])
        self.drawn_rows = rows[self.drawn]
        self.all_drawn = len(self.drawn) == len(rows)
        self.logits_rows = self.drawn.tobytes()
        self.options = sampler.options[self.drawn_rows].tobytes()
        self.seeds = sampler.seeds[self.drawn_rows].tobytes()
        self.positions = sampler.positions[self.drawn_rows].tobytes()
        self.steps = 0
        special = sampler.special
        self.special = [(i, row, special[row]) for i, row in enumerate(rows.tolist()) if row in special]


class Sampler:
    """Sampling state by row of the persistent batch.

    Attributes:
        present, greedy (bool): the row holds a sequence; its tokens are the best ones.
        options (float64 [rows, 4]), seeds (uint64), positions (uint64): what tokens are drawn with, as `Draws` has it;
            positions only of rows that are not greedy, and as they were before the steps of the group that is kept.
        special: rows with further wishes.

    Args:
        eos_token_ids: the model's own end tokens, for ``min_tokens``.
    """

    def __init__(self, max_num_seqs: int, eos_token_ids: tuple[int, ...], backend: Backend) -> None:
        self.present = np.zeros(max_num_seqs, np.bool_)
        self.greedy = np.zeros(max_num_seqs, np.bool_)
        self.options = np.zeros((max_num_seqs, 4), np.float64)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.positions = np.zeros(max_num_seqs, np.uint64)
        self.special: dict[int, SpecialRow] = {}
        self._eos_token_ids = eos_token_ids
        self._backend = backend
        self._group: _Group | None = None  # of the last step, if no row has changed since

    def place(self, row: int, params: SamplingParams, token_ids: Int32s, num_prompt_tokens: int) -> None:
        """A sequence appears in ``row``.

        Args:
            params: of this one choice; ``seed`` is set.
            token_ids: all known tokens, prompt first.
        """
        self.free(row)
        self.present[row] = True
        self.greedy[row] = params.temperature < _GREEDY_TEMPERATURE
        options = draw_options(params.temperature, params.min_p, params.top_k, params.top_p)
        self.options[row] = np.frombuffer(options, np.float64)
        self.seeds[row] = params.seed or 0
        self.positions[row] = len(token_ids) - num_prompt_tokens
        special = SpecialRow(params, token_ids, num_prompt_tokens, self._eos_token_ids)
        if not special.is_over:
            self.special[row] = special

    def free(self, row: int) -> None:
        """The sequence of ``row``, if it holds one, is gone."""
        self._leave_group()
        self.present[row] = False
        self.special.pop(row, None)

    def sample(self, step: StepLogits, rows: bytes) -> Samples:
        """Choose one more token for each of ``rows``, int32 [s], and note that they have it.

        Raises:
            RuntimeError: a row holds no sequence.
        """
        group = self._group
        if group is None or rows != group.row_bytes:
            self._leave_group()
            self._group = group = _Group(self, rows)
        logits, tokens = step.room, step.best
        changes = _adjust(step, group) if group.special else []
        if changes and not group.all_drawn:
            tokens = tokens.copy()
            for i, row, _ in changes:
                if self.greedy[row]:
                    tokens[i] = int(self._backend.argmax(logits[i : i + 1])[0])
        if len(group.drawn):
            draws = Draws(group.logits_rows, group.options, group.seeds, group.positions, group.steps)
            drawn = self._backend.draw(logits, draws)
            group.steps += 1
            if group.all_drawn:
                tokens = drawn
            else:
                tokens = tokens.copy()
                tokens[group.drawn] = drawn
        if not group.special:
            return Samples(tokens, None)
        for _, _, changed in changes:
            undo(changed)
        logprobs = self._logprobs(step, tokens, group)
        for i, row, state in group.special:
            state.append(int(tokens[i]))
            if state.is_over:
                del self.special[row]
                self._leave_group()
        return Samples(tokens, logprobs)

    def _leave_group(self) -> None:
        """The group's rows are not what they were; their positions are where its steps have brought them."""
        group, self._group = self._group, None
        if group is not None and group.steps:
            self.positions[group.drawn_rows] += np.uint64(group.steps)

    def _logprobs(self, step: StepLogits, tokens: Int32s, group: _Group) -> tuple[SampleLogprobs | None, ...] | None:
        """Log-probabilities under the unmodified distribution, for the rows that ask."""
        asking = {i: state.logprobs for i, _, state in group.special if state.logprobs is not None}
        if not asking:
            return None
        rows = np.array(list(asking), np.int64)
        found = self._backend.logprobs(step.room, rows, tokens[rows], max(asking.values()))
        entries: list[SampleLogprobs | None] = [None] * len(tokens)
        for (i, count), chosen, ids, values in zip(asking.items(), *found, strict=True):
            entries[i] = SampleLogprobs(float(chosen), ids[:count].tobytes(), values[:count].tobytes())
        return tuple(entries)


def _adjust(step: StepLogits, group: _Group) -> list[tuple[int, int, Changed]]:
    """Apply penalties, biases and stop-token masks to the step's own logits: few of a row's change, and copying whole
    rows costs more.

    Returns:
        Index and row of those that have some, and what is to be undone.
    """
    changing = [(i, row, state) for i, row, state in group.special if state.adjusts]
    if not changing:
        return []
    logits = step.room.numpy()
    return [(i, row, state.adjust(logits[i])) for i, row, state in changing]
