"""Chooses one token per row of logits.

Knows logits and `SamplingRow`s; knows no sequences, caches or text. Every row is treated on its own: neither its
neighbours nor their options change its choice. A batch in which all rows are greedy costs one argmax.
`chatserve.worker.model_runner` is the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve.scheduler.output import SampleLogprobs
from chatserve.worker.random import uniforms
from chatserve.worker.sampling_row import SamplingRow

# Candidates looked at first for top-p; a row whose nucleus is larger looks at four times as many, and so on.
_FIRST_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Samples:
    """Result of one `sample` call.

    Attributes:
        tokens: [s] chosen ids; meaningless where not ``finite``.
        finite: [s] bool; false where the logits held NaN or an infinity.
        logprobs: one entry per row, or ``None`` where no row asked.
    """

    tokens: npt.NDArray[np.int32]
    finite: npt.NDArray[np.bool_]
    logprobs: tuple[SampleLogprobs | None, ...] | None


def sample(logits: Tensor, rows: Sequence[SamplingRow], argmax: Callable[[Tensor], Tensor]) -> Samples:
    """Draw one token per row. Does not change ``logits`` or ``rows``.

    Args:
        logits: float32 [s, vocab_size].
        rows: the s sequences that the tokens are for.
        argmax: as `chatserve_kernels.interface.Backend.argmax`.
    """
    # NaN counts as the best, so one pass also tells which rows are finite.
    tokens = argmax(logits)
    finite = np.isfinite(logits.numpy()[np.arange(len(rows)), tokens.numpy()])
    if not finite.all():
        logits = logits.masked_fill(~torch.from_numpy(finite)[:, None], 0.0)
    adjusted = _adjusted(logits, rows)
    if adjusted is not logits:
        tokens = argmax(adjusted)
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        index = torch.tensor(drawn)
        tokens[index] = _draw(adjusted[index], [rows[i] for i in drawn])
    return Samples(
        tokens=tokens.numpy().astype(np.int32),
        finite=finite,
        logprobs=_logprobs(logits, tokens, rows),
    )


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after penalties, biases and stop-token masks; the same tensor where no row has any."""
    changing = [i for i, row in enumerate(rows) if row.adjusts]
    if changing:
        logits = logits.clone()
        for i in changing:
            rows[i].adjust(logits[i])
    return logits


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Temperature, min-p, top-k, top-p, then inversion of the distribution function in order of token ids."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32)
    # The maximum is subtracted before the division, so no temperature overflows.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    floor = torch.tensor([row.params.min_p for row in rows], dtype=torch.float32).log()
    if bool((floor > -torch.inf).any()):
        scaled.masked_fill_(scaled < floor[:, None], -torch.inf)
    vocab_size = logits.shape[1]
    restricted = [i for i, row in enumerate(rows) if row.params.top_p < 1.0 or 0 < row.params.top_k < vocab_size]
    if restricted:
        index = torch.tensor(restricted)
        top_k = torch.tensor([rows[i].params.top_k or vocab_size for i in restricted]).clamp_(max=vocab_size)
        top_p = torch.tensor([rows[i].params.top_p for i in restricted], dtype=torch.float64)
        scaled[index] = restrict(scaled[index], top_k, top_p)
    cumulative = scaled.exp_().cumsum(-1, dtype=torch.float64)
    uniform = torch.from_numpy(uniforms([row.seed for row in rows], [row.num_output for row in rows]))
    target = uniform * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def restrict(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask what lies outside the ``top_k`` best tokens and the nucleus of mass ``top_p`` among them.

    Tokens are ordered by logit, equal ones by id, so exactly the right number is kept. The nucleus is the shortest
    prefix whose mass reaches ``top_p`` of the mass of the top k (Holtzman et al. 2020, eq. 2).

    Args:
        logits: float32 [r, vocab_size], maximum 0 per row.
        top_k: int64 [r], ``vocab_size`` for off.
        top_p: float64 [r], 1 for off.
    """
    vocab_size = logits.shape[1]
    limited = top_k < vocab_size
    num_candidates = min(vocab_size, max(_FIRST_CANDIDATES, int(torch.where(limited, top_k, 0).max())))
    total = logits.exp().sum(-1, dtype=torch.float64)
    while True:
        values = logits.topk(num_candidates).values
        cumulative = values.exp().cumsum(-1, dtype=torch.float64)
        last = (top_k - 1).clamp_(max=num_candidates - 1)
        mass = torch.where(limited, cumulative.gather(1, last[:, None])[:, 0], total)
        wanted = top_p * mass
        enough = limited | (top_p >= 1.0) | (cumulative[:, -1] >= wanted)
        if num_candidates == vocab_size or bool(enough.all()):
            break
        num_candidates = min(vocab_size, num_candidates * 4)
    nucleus = (cumulative < wanted[:, None]).sum(-1) + 1
    kept = torch.where(top_p < 1.0, torch.minimum(nucleus, top_k), top_k)
    # A row with both options off keeps everything: no threshold applies to it.
    threshold = values.gather(1, (kept - 1).clamp_(max=num_candidates - 1)[:, None])
    threshold = torch.where((kept < vocab_size)[:, None], threshold, -torch.inf)
    ties = logits == threshold
    ties_kept = kept - (values > threshold).sum(-1)
    in_order = ties.cumsum(-1, dtype=torch.int32) <= ties_kept[:, None]
    return logits.masked_fill(~((logits > threshold) | (ties & in_order)), -torch.inf)


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> tuple[SampleLogprobs | None, ...] | None:
    """Log-probabilities under the unmodified distribution, for the rows that ask."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asking:
        return None
    entries: list[SampleLogprobs | None] = [None] * len(rows)
    for i, logprobs in zip(asking, logits[torch.tensor(asking)].log_softmax(-1), strict=True):
        top = top_ids(logprobs, rows[i].params.logprobs or 0)
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
