"""Chooses one token per row of logits.

Knows logits and `SamplingRow`s; knows no sequences, caches or text. Every row is treated on its own: neither its
neighbours nor their options change its choice. A batch in which all rows are greedy costs one argmax.
`chatserve.worker.model_runner` is the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from chatserve_kernels.interface import Backend, Draws, StepLogits
from torch import Tensor

from chatserve.scheduler.output import SampleLogprobs
from chatserve.worker.random import uniforms
from chatserve.worker.sampling_row import SamplingRow


@dataclass(frozen=True, slots=True)
class Samples:
    """Result of one `sample` call.

    Attributes:
        tokens: [s] chosen ids.
        logprobs: one entry per row, or ``None`` where no row asked.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: tuple[SampleLogprobs | None, ...] | None


def sample(step: StepLogits, rows: Sequence[SamplingRow], backend: Backend) -> Samples:
    """Draw one token per row. Does not change its arguments.

    Args:
        rows: the s sequences that the tokens are for.
    """
    if all(row.takes_best for row in rows):
        return Samples(step.best.astype(np.int32), None)
    logits = step.logits
    adjusted = _adjusted(logits, rows)
    best = step.best if adjusted is logits else backend.argmax(adjusted).numpy()
    tokens = best.astype(np.int32)
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        draws = _draws(rows, drawn)
        tokens[drawn] = backend.draw(adjusted, draws).numpy()
    return Samples(tokens, _logprobs(logits, tokens, rows))


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after penalties, biases and stop-token masks; the same tensor where no row has any."""
    changing = [i for i, row in enumerate(rows) if row.adjusts]
    if changing:
        logits = logits.clone()
        for i in changing:
            rows[i].adjust(logits[i])
    return logits


def _draws(rows: Sequence[SamplingRow], drawn: Sequence[int]) -> Draws:
    """The tokens to draw, for the rows ``drawn``."""
    states = [rows[i] for i in drawn]

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(state.params, name) for state in states], dtype=torch.float64)

    return Draws(
        rows=torch.tensor(drawn),
        temperature=column("temperature"),
        min_p=column("min_p"),
        top_k=torch.tensor([state.params.top_k for state in states]),
        top_p=column("top_p"),
        uniform=torch.from_numpy(uniforms([state.seed for state in states], [state.num_output for state in states])),
    )


def _logprobs(
    logits: Tensor, tokens: npt.NDArray[np.int32], rows: Sequence[SamplingRow]
) -> tuple[SampleLogprobs | None, ...] | None:
    """Log-probabilities under the unmodified distribution, for the rows that ask."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asking:
        return None
    entries: list[SampleLogprobs | None] = [None] * len(rows)
    for i, logprobs in zip(asking, logits[torch.tensor(asking)].log_softmax(-1), strict=True):
        top = top_ids(logprobs, rows[i].params.logprobs or 0)
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
