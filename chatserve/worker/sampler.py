"""Chooses one token per row of logits.

`Sampler` keeps what sampling must know about every row of the batch, in columns, so that a step costs the same few
vector operations however many rows it has; only rows with special wishes have an object of their own. Knows logits and
sampling parameters; knows no caches or text. Every row is treated on its own: neither its neighbours nor their options
change its choice. `chatserve.worker.model_runner` is the caller.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from chatserve_kernels.interface import Backend, Draws, StepLogits, draw_options
from torch import Tensor

from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import SampleLogprobs
from chatserve.worker.special_row import SpecialRow

# Below this temperature the softmax is one-hot but for exact ties, so the row is greedy.
_GREEDY_TEMPERATURE = 1e-5

Int32s = npt.NDArray[np.int32]


class Samples(NamedTuple):
    """Result of one `Sampler.sample` call.

    Attributes:
        tokens: int32 [s], the chosen ids.
        logprobs: one entry per row, or ``None`` where no row asked.
    """

    tokens: Int32s
    logprobs: tuple[SampleLogprobs | None, ...] | None


class _Kind(IntEnum):
    """What a row wants, by how much there is to do for it."""

    ABSENT = 0
    BEST = 1  # the largest of its logits
    DRAWN = 2
    SPECIAL = 3  # greedy or drawn, with a `SpecialRow`


class Sampler:
    """Sampling state by row of the persistent batch.

    Args:
        eos_token_ids: the model's own end tokens, for ``min_tokens``.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...], backend: Backend) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._backend = backend
        self._kinds = np.zeros(max_num_seqs, np.uint8)
        self._greedy = np.zeros(max_num_seqs, np.bool_)
        self._options = np.zeros((max_num_seqs, 4), np.float64)  # `draw_options`
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._positions = np.zeros(max_num_seqs, np.uint64)  # output tokens so far, of rows that are not BEST
        self._special: dict[int, SpecialRow] = {}

    def place(self, row: int, params: SamplingParams, token_ids: Int32s, num_prompt_tokens: int) -> None:
        """A sequence appears in ``row``.

        Args:
            params: of this one choice; ``seed`` is set.
            token_ids: all known tokens, prompt first.
        """
        self._greedy[row] = params.temperature < _GREEDY_TEMPERATURE
        self._options[row] = np.frombuffer(
            draw_options(params.temperature, params.min_p, params.top_k, params.top_p), np.float64
        )
        self._seeds[row] = params.seed or 0
        self._positions[row] = len(token_ids) - num_prompt_tokens
        special = SpecialRow(params, token_ids, num_prompt_tokens, self._vocab_size, self._eos_token_ids)
        if special.is_over:
            self._become_ordinary(row)
        else:
            self._special[row] = special
            self._kinds[row] = _Kind.SPECIAL

    def free(self, row: int) -> None:
        """The sequence of ``row`` is gone."""
        self._special.pop(row, None)
        self._kinds[row] = _Kind.ABSENT

    def _become_ordinary(self, row: int) -> None:
        self._special.pop(row, None)
        self._kinds[row] = _Kind.BEST if self._greedy[row] else _Kind.DRAWN

    def sample(self, step: StepLogits, rows: Int32s) -> Samples:
        """Choose one more token for each of ``rows`` [s], and note that they have it.

        Raises:
            RuntimeError: a row holds no sequence.
        """
        kinds = self._kinds[rows]
        if kinds.min() == _Kind.ABSENT:
            raise RuntimeError(f"The plan samples for row {rows[kinds.argmin()]}, which holds no sequence.")
        most = kinds.max()
        if most == _Kind.BEST:
            return Samples(step.best.astype(np.int32), None)
        special: list[tuple[int, int, SpecialRow]] = []
        if most == _Kind.SPECIAL:
            special = [(i, row, self._special[row]) for i, row in enumerate(rows.tolist()) if row in self._special]
        logits = _adjusted(step, special)
        best = step.best if logits is step.room else self._backend.argmax(logits).numpy()
        tokens = best.astype(np.int32)
        drawn = np.flatnonzero(~self._greedy[rows])
        if len(drawn):
            tokens[drawn] = self._backend.draw(logits, self._draws(rows[drawn], drawn))
        self._positions[rows] += np.uint64(1)
        logprobs = None
        if special:
            logprobs = _logprobs(step, tokens, special)
            for i, row, state in special:
                state.append(int(tokens[i]))
                if state.is_over:
                    self._become_ordinary(row)
        return Samples(tokens, logprobs)

    def _draws(self, rows: Int32s, of_logits: npt.NDArray[np.int64]) -> Draws:
        return Draws(
            rows=of_logits.tobytes(),
            options=self._options[rows].tobytes(),
            seeds=self._seeds[rows].tobytes(),
            positions=self._positions[rows].tobytes(),
        )


def _adjusted(step: StepLogits, special: list[tuple[int, int, SpecialRow]]) -> Tensor:
    """Logits after penalties, biases and stop-token masks, float32 [s or more, vocabulary]; ``step.room`` itself where
    no row has any."""
    changing = [(i, state) for i, _, state in special if state.adjusts]
    if not changing:
        return step.room
    logits = step.logits.clone()
    for i, state in changing:
        state.adjust(logits[i])
    return logits


def _logprobs(
    step: StepLogits, tokens: Int32s, special: list[tuple[int, int, SpecialRow]]
) -> tuple[SampleLogprobs | None, ...] | None:
    """Log-probabilities under the unmodified distribution, for the rows that ask."""
    asking = {i: state.logprobs for i, _, state in special if state.logprobs is not None}
    if not asking:
        return None
    entries: list[SampleLogprobs | None] = [None] * len(tokens)
    for (i, count), logprobs in zip(asking.items(), step.room[torch.tensor(list(asking))].log_softmax(-1), strict=True):
        top = top_ids(logprobs, count)
        entries[i] = SampleLogprobs(
            chosen=float(logprobs[int(tokens[i])]),
            top_ids=top.numpy().astype(np.int32).tobytes(),
            top_logprobs=logprobs[top].numpy().tobytes(),
        )
    return tuple(entries)


def top_ids(scores: Tensor, k: int) -> Tensor:
    """Ids of the k best of ``scores`` [vocab_size], best first, equal ones by id → int64 [min(k, vocab_size)]."""
    k = min(k, len(scores))
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    candidates = torch.nonzero(scores >= scores.topk(k).values[-1])[:, 0]
    order = scores[candidates].argsort(descending=True, stable=True)
    return candidates[order][:k]
