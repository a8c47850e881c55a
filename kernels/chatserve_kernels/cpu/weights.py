"""Matrices in the layouts of the kernels, and quantisation of plain ones.

Knows the block formats Q4_0, Q4_1 and Q8_0 of GGUF (32 inputs per block, along rows), and bfloat16. Stored blocks are
used as they are; plain weights can be quantised to the same formats. `decoder` builds its projections from this.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve_kernels.cpu.library import Library, LinearStruct

BLOCK = 32
KINDS = {"q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}

_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that is read when it is packed: a model is never in memory twice, only one of its matrices is.

    Attributes:
        kind: one of `KINDS`.
        read: its rows, contiguous: uint8 [outputs, inputs / 32 * bytes per block] as GGUF stores them, or bfloat16
            [outputs, inputs].
    """

    kind: str
    outputs: int
    inputs: int
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """A matrix as GGUF stores it.

    Attributes:
        kind: ``q4_0``, ``q4_1`` or ``q8_0``.
        blocks: uint8 [outputs, inputs / 32 * bytes per block], contiguous.
    """

    kind: str
    blocks: Tensor

    @property
    def outputs(self) -> int:
        return self.blocks.shape[0]

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] // BLOCK_BYTES[self.kind] * BLOCK

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.kind, self.outputs, self.inputs, lambda: self.blocks)


class PackedLinear:
    """A projection in kernel layout.

    Args:
        bias: float32 [outputs] or ``None``.
    """

    def __init__(self, library: Library, matrix: Matrix, bias: Tensor | None, arena: Arena) -> None:
        kind, outputs, inputs = KINDS[matrix.kind], matrix.outputs, matrix.inputs
        rows = matrix.read()
        if matrix.kind == "bf16":
            dtype, row_size = torch.bfloat16, inputs
        else:
            dtype, row_size = torch.uint8, inputs // BLOCK * BLOCK_BYTES[matrix.kind]
        if not rows.is_contiguous() or rows.dtype != dtype or tuple(rows.shape) != (outputs, row_size):
            raise ValueError(f"{matrix.kind} rows must be contiguous {dtype} [{outputs}, {row_size}]")
        units = arena.take(library.packed_bytes(kind, outputs, inputs))
        library.call("cs_pack", kind, rows.data_ptr(), outputs, inputs, units)
        self._keep = (arena, bias)
        self.struct = LinearStruct(kind, outputs, inputs, units, None if bias is None else bias.data_ptr())


class Arena:
    """Memory for many matrices in one piece, on huge pages where the system has them: a step reads all of it.

    Args:
        num_bytes: capacity; `size_of` adds up what a matrix takes.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        begin = int(np.frombuffer(self._memory, dtype=np.uint8).ctypes.data)
        self._next = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
        self._end = self._next + num_bytes

    def take(self, num_bytes: int) -> int:
        """Address of fresh memory, aligned for vectors."""
        address = self._next
        self._next += _aligned(num_bytes)
        if self._next > self._end:
            raise MemoryError("the arena is smaller than what was put into it")
        return address

    @staticmethod
    def size_of(library: Library, kind: str, outputs: int, inputs: int) -> int:
        """Bytes that one `PackedLinear` takes."""
        return _aligned(library.packed_bytes(KINDS[kind], outputs, inputs))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def quantise(weight: Tensor, kind: str) -> QuantisedRows:
    """Round float weights [outputs, inputs] (inputs % 32 == 0) to the nearest values of a block format.

    Scales as llama.cpp chooses them: Q8_0 from the largest magnitude, Q4_1 from minimum and maximum.
    """
    outputs, inputs = weight.shape
    values: npt.NDArray[np.float32] = weight.float().reshape(outputs, inputs // BLOCK, BLOCK).numpy()
    if kind == "q8_0":
        scale = np.abs(values).max(-1) / 127.0
        quantised = np.rint(values * _inverse(scale)[..., None]).astype(np.int8).view(np.uint8)
        parts = [scale.astype(np.float16)[..., None].view(np.uint8), quantised]
    elif kind == "q4_1":
        minimum = values.min(-1)
        scale = (values.max(-1) - minimum) / 15.0
        steps = np.rint((values - minimum[..., None]) * _inverse(scale)[..., None]).clip(0, 15).astype(np.uint8)
        header = [part.astype(np.float16)[..., None].view(np.uint8) for part in (scale, minimum)]
        parts = [*header, steps[..., :16] | steps[..., 16:] << 4]
    else:
        raise ValueError(f"weights can be quantised to q8_0 or q4_1, not {kind!r}")
    blocks = np.ascontiguousarray(np.concatenate(parts, axis=-1).reshape(outputs, -1))
    return QuantisedRows(kind, torch.from_numpy(blocks))


def _inverse(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)


def dequantise(rows: QuantisedRows) -> Tensor:
    """The float32 values [outputs, inputs] that the blocks stand for."""
    raw = rows.blocks.numpy().reshape(rows.outputs, -1, BLOCK_BYTES[rows.kind])
    scale = np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float32)
    if rows.kind == "q8_0":
        values = raw[..., 2:].view(np.int8) * scale
    else:
        header = 4 if rows.kind == "q4_1" else 2
        nibbles = np.concatenate((raw[..., header:] & 15, raw[..., header:] >> 4), axis=-1)
        if rows.kind == "q4_1":
            minimum = np.ascontiguousarray(raw[..., 2:4]).view(np.float16).astype(np.float32)
            values = nibbles * scale + minimum
        else:
            values = (nibbles.astype(np.float32) - 8.0) * scale
    return torch.from_numpy(values.astype(np.float32).reshape(rows.outputs, rows.inputs))
