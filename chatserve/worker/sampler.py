"""Chooses one token per row of logits.

Knows logits and `SamplingRow`s; knows no sequences, caches or text. Every row is treated on its own: neither its
neighbours nor their options change its choice. Greedy rows take the best token that
the step already found.
`chatserve.worker.model_runner` is the caller.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from chatserve_kernels.interface import Backend, Draws, StepLogits
from torch import Tensor

from chatserve.scheduler.output import SampleLogprobs
from chatserve.worker.sampling_row import SamplingRow


class Samples(NamedTuple):
    """Result of one `sample` call.

    Attributes:
        tokens: the s chosen ids.
        logprobs: one entry per row, or ``None`` where no row asked.
    """

    tokens: list[int]
    logprobs: tuple[SampleLogprobs | None, ...] | None


def sample(step: StepLogits, rows: Sequence[SamplingRow], backend: Backend) -> Samples:
    """Draw one token per row. Does not change its arguments.

    Args:
        rows: the s sequences that the tokens are for.
    """
    if all(row.takes_best for row in rows):
        return Samples(step.best.tolist(), None)
    logits = _adjusted(step, rows)
    best = step.best if logits is step.room else backend.argmax(logits)
    tokens = best.tolist()
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        for i, token in zip(drawn, backend.draw(logits, _draws(rows, drawn)), strict=True):
            tokens[i] = token
    return Samples(tokens, _logprobs(step, tokens, rows))


def _adjusted(step: StepLogits, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after penalties, biases and stop-token masks, float32 [s or more, vocabulary]; ``step.room`` itself where
    no row has any."""
    changing = [i for i, row in enumerate(rows) if row.adjusts]
    if not changing:
        return step.room
    logits = step.logits.clone()
    for i in changing:
        rows[i].adjust(logits[i])
    return logits


def _draws(rows: Sequence[SamplingRow], drawn: Sequence[int]) -> Draws:
    """The tokens to draw, for the rows ``drawn``."""
    states = [rows[i] for i in drawn]
    return Draws(
        rows=array("q", drawn).tobytes(),
        options=b"".join([state.options for state in states]),
        seeds=array("Q", [state.seed for state in states]).tobytes(),
        positions=array("Q", [state.num_output for state in states]).tobytes(),
    )


def _logprobs(
    step: StepLogits, tokens: Sequence[int], rows: Sequence[SamplingRow]
) -> tuple[SampleLogprobs | None, ...] | None:
    """Log-probabilities under the unmodified distribution, for the rows that ask."""
    asking = [i for i, row in enumerate(rows) if row.logprobs is not None]
    if not asking:
        return None
    entries: list[SampleLogprobs | None] = [None] * len(rows)
    for i, logprobs in zip(asking, step.room[torch.tensor(asking)].log_softmax(-1), strict=True):
        top = top_ids(logprobs, rows[i].logprobs or 0)
        entries[i] = SampleLogprobs(
            chosen=float(logprobs[tokens[i]]),
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
