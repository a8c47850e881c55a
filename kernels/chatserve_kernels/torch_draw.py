"""Drawing tokens in few, large torch calls over whole rows.

Knows logits and `Draws`. Every row is treated on its own: neither its neighbours nor their options change its token.
`torch_backend` is the caller.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve_kernels.interface import Draws

# Candidates looked at first for top-p; a row whose nucleus is larger looks at four times as many, and so on.
_FIRST_CANDIDATES = 256


def draw(logits: Tensor, draws: Draws) -> npt.NDArray[np.int32]:
    """As `chatserve_kernels.interface.Backend.draw`."""
    vocab_size = logits.shape[1]
    rows, options, uniform = (torch.from_numpy(array) for array in draws.arrays())
    temperature, min_p, top_k, top_p = options.unbind(1)
    logits = logits[rows]
    # The maximum is subtracted before the division, so no temperature overflows.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.float()[:, None]
    floor = min_p.log().float()
    if bool((floor > -torch.inf).any()):
        scaled.masked_fill_(scaled < floor[:, None], -torch.inf)
    limited = (top_k > 0) & (top_k < vocab_size)
    restricted = (limited | (top_p < 1.0)).nonzero()[:, 0]
    if len(restricted):
        most = torch.where(limited, top_k, vocab_size).long()[restricted]
        scaled[restricted] = _restrict(scaled[restricted], most, top_p[restricted])
    cumulative = scaled.exp_().cumsum(-1, dtype=torch.float64)
    target = uniform * cumulative[:, -1]
    # Without a finite maximum there are no numbers here to search, and the search ends past the row.
    found = torch.searchsorted(cumulative, target[:, None], right=True, out_int32=True)[:, 0]
    return found.clamp_(max=vocab_size - 1).numpy()


def _restrict(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask what lies outside the ``top_k`` best tokens and the nucleus of mass ``top_p`` among them.

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
