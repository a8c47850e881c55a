"""Rotary position embedding tables: frequencies, their scaling, and cos/sin per position.

Knows the two scalings we run (linear; Llama 3's ramp). The rotation itself is a kernel; the transformer looks its
rows up here once per step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chatserve.model.architecture import Architecture, RopeScaling


def rope_tables(architecture: Architecture, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, signed sin), each [num_positions, 1, head_dim], as `chatserve_kernels.interface.Backend.rotate` takes."""
    dim = architecture.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = scale_frequencies(architecture.rope_theta**-exponents, architecture.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1).to(dtype)[:, None],
        torch.cat((-sin, sin), dim=-1).to(dtype)[:, None],
    )


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Radians per position, [head_dim / 2], stretched."""
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Turns that a frequency makes within the original context: few turns are stretched, many are kept.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
