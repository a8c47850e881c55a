"""What drawing means, one token at a time in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_by_definition(logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities after min-p, top-k and top-p, float64 [V]."""
    p = torch.softmax(logits.double() / temperature, -1)
    order = sorted(range(len(p)), key=lambda i: (-float(logits[i]), i))
    order = [i for i in order if p[i] >= min_p * p.max() * (1 - 1e-9)]
    order = order[: top_k or None]
    mass = sum(float(p[i]) for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += float(p[i]) / mass
        if reached >= top_p:
            break
    out = torch.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def random_logits(seed: int, rows: int = 1, vocab: int = 320, scale: float = 3.0) -> Tensor:
    """Rounded to bfloat16, as real ones are: ties are common."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale).bfloat16().float()
