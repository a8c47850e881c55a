"""Projections with quantised weights, on every instruction set of this CPU: right for any shape, row by row."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.cpu.library import Library
from chatserve_kernels.cpu.weights import Arena, PackedLinear, QuantisedRows, dequantise, quantise
from torch import Tensor

from tests.kernels.native import check_epilogues, check_poison, check_threads, library, project, relative_error

TILES, DOTS = 0, 1 << 30


@pytest.fixture(params=supported_isas())
def lib(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


def random_rows(kind: str, outputs: int, inputs: int, seed: int = 0) -> QuantisedRows:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.1
    if kind == "q4_0":
        blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
        return QuantisedRows(kind, torch.from_numpy(blocks))
    return quantise(weight, kind)


def pack(lib: Library, rows: QuantisedRows, bias: Tensor | None = None) -> PackedLinear:
    return PackedLinear(lib, rows.matrix, bias, Arena(Arena.size_of(lib, rows.kind, rows.outputs, rows.inputs)))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (40, 96), (7, 32), (960, 576)])
def test_products_equal_those_of_the_stored_values(lib: Library, kind: str, outputs: int, inputs: int) -> None:
    """y = W x with the dequantised weights in float32, for few rows and many, in both ways of multiplying; what is
    left is the rounding of activations (8 bits per group of 32, or bfloat16)."""
    rows = random_rows(kind, outputs, inputs)
    packed, weight = pack(lib, rows), dequantise(rows)
    for way in (TILES, DOTS):
        before, lib.tile_threshold = lib.tile_threshold, way
        try:
            for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100):
                x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
                out = project(lib, packed, x, torch.full((count, outputs), torch.nan))
                assert relative_error(out, x @ weight.T) < 0.015, (way, count)
        finally:
            lib.tile_threshold = before


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_stored_values_are_what_the_format_says(kind: str) -> None:
    """Our reading of the blocks is the gguf package's, so kernels and converter mean the same weights."""
    rows = random_rows(kind, 12, 128)
    theirs = gguf.quants.dequantize(rows.blocks.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(dequantise(rows).numpy(), theirs.reshape(12, 128))


@pytest.mark.parametrize(("kind", "largest"), [("q8_0", 0.004), ("q4_1", 0.05)])
def test_quantising_stays_within_half_a_step(kind: str, largest: float) -> None:
    """Plain weights are rounded to the nearest value of their block."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    assert relative_error(dequantise(quantise(weight, kind)), weight) < largest * 2


@pytest.mark.parametrize("count", [1, 3, 40])
def test_norm_bias_residual_and_gating_are_fused_rightly(lib: Library, count: int) -> None:
    """Each epilogue and the norm give what separate operations give."""
    rows = random_rows("q4_1", 96, 64)
    weight, bias = dequantise(rows), torch.randn(96)
    packed, plain = pack(lib, rows, bias), pack(lib, rows)
    x, norm = torch.randn(count, 64) * 3, torch.rand(64) + 0.5
    y = torch.nn.functional.rms_norm(x, (64,), norm, 1e-5) @ weight.T
    check_epilogues(lib, packed, x, norm, y + bias, tolerance=0.015)
    check_epilogues(lib, plain, x, norm, y, tolerance=0.015)


@pytest.mark.parametrize("count", [3, 24])
def test_a_poisoned_row_stays_poisoned_and_alone(lib: Library, count: int) -> None:
    """NaN and infinity survive quantised activations, so a broken row is noticed; other rows are bit-equal."""
    check_poison(lib, pack(lib, random_rows("q4_1", 64, 128)), count)


def test_threads_change_nothing(lib: Library) -> None:
    """One thread, two, and more than there are cores or chunks compute the same bits, again and again: no tile is
    lost, computed twice or torn."""
    rows = random_rows("q4_1", 320, 96)
    alone = library(lib.isa, 1)
    for several in (lib, library(lib.isa, 3), library(lib.isa, 12)):
        check_threads(several, pack(several, rows), alone, pack(alone, rows))
