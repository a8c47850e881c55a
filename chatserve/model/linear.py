"""One dense projection, with its weight laid out once for the matrix units of the CPU.

Knows oneDNN's packed layouts; everything else sees ``y = x Wᵀ + b (+ residual)``. Models build their projections
from it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# The row count that oneDNN is told when it picks a layout. Any row count works with any layout; the layout for
# decode batches was the best or close to it from 1 to 512 rows.
_PACK_FOR_ROWS = 16


class Linear:
    """``y = x Wᵀ + b``, optionally plus a residual in the same kernel.

    Args:
        weight: [out, in]. Not kept where it is repacked.
        bias: [out] or ``None``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out]."""
        if self._packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return packed
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """x [rows, in], residual [rows, out] → ``residual + x Wᵀ + b``; the sum is rounded once where packed."""
        if self._packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
            return packed
        return functional.linear(x, self._weight, self._bias).add_(residual)


def _can_pack(weight: Tensor) -> bool:
    """oneDNN packs bfloat16 weights on CPUs that multiply them natively."""
    return bool(
        weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
