"""Projections with bfloat16 weights, on every instruction set of this CPU: right for any shape, row by row."""

from __future__ import annotations

import pytest
import torch
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.cpu.library import Library
from chatserve_kernels.cpu.weights import Arena, Matrix, PackedLinear
from torch import Tensor

from tests.kernels.native import check_epilogues, check_poison, check_threads, library, project, relative_error

# Without instructions for bfloat16 products activations stay float32, and nothing but the order of additions differs.
ROUNDS = {"amx", "avx512bf16"}


@pytest.fixture(params=[(isa, fixed) for isa in supported_isas() for fixed in (False, True)], ids=str)
def lib(request: pytest.FixtureRequest) -> Library:
    isa, fixed = request.param
    return library(isa, 2, fixed)


def random_weight(outputs: int, inputs: int) -> Tensor:
    return (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 0.1).bfloat16()


def pack(lib: Library, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    outputs, inputs = weight.shape
    matrix = Matrix("bf16", outputs, inputs, lambda: weight)
    return PackedLinear(lib, matrix, bias, Arena(Arena.size_of(lib, "bf16", outputs, inputs)))


def rounded(lib: Library, x: Tensor) -> Tensor:
    """Activations as they are multiplied."""
    return x.bfloat16().float() if lib.isa in ROUNDS else x


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(32, 32), (64, 64), (40, 96), (7, 33), (131, 48), (50, 12), (960, 576), (576, 1536)]
)
def test_products_equal_those_in_float32(lib: Library, outputs: int, inputs: int) -> None:
    """y = W x for one row up to many, for sizes that fill no tile too: exact products of what is rounded before."""
    weight = random_weight(outputs, inputs)
    packed = pack(lib, weight)
    for count in (*range(1, 19), 31, 32, 33, 47, 48, 49, 64, 70, 600):
        x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
        out = project(lib, packed, x, torch.full((count, outputs), torch.nan))
        assert relative_error(out, rounded(lib, x) @ weight.float().T) < 2e-6, count


@pytest.mark.parametrize("count", [1, 3, 17, 40])
@pytest.mark.parametrize("inputs", [64, 44])
def test_norm_bias_residual_and_gating_are_fused_rightly(lib: Library, count: int, inputs: int) -> None:
    """Each epilogue and the norm give what separate operations give."""
    weight, bias = random_weight(96, inputs), torch.randn(96)
    packed, plain = pack(lib, weight, bias), pack(lib, weight)
    x, norm = torch.randn(count, inputs) * 3, torch.rand(inputs) + 0.5
    y = torch.nn.functional.rms_norm(x, (inputs,), norm, 1e-5) @ weight.float().T
    check_epilogues(lib, packed, x, norm, y + bias, tolerance=0.005)
    check_epilogues(lib, plain, x, norm, y, tolerance=0.005)


@pytest.mark.parametrize("count", [3, 24, 70])
def test_a_poisoned_row_stays_poisoned_and_alone(lib: Library, count: int) -> None:
    """NaN and infinity reach every output of their row, so a broken row is noticed; other rows are bit-equal."""
    check_poison(lib, pack(lib, random_weight(64, 128)), count)


def test_a_rows_bits_depend_on_no_other_row(lib: Library) -> None:
    """Alone, or anywhere among many: one way of multiplying serves all numbers of rows."""
    packed = pack(lib, random_weight(320, 1000))
    x = torch.randn(600, 1000)
    together = project(lib, packed, x, torch.zeros(600, 320))
    for begin, count in ((0, 1), (5, 1), (17, 3), (100, 16), (33, 31), (599, 1), (40, 70), (500, 100)):
        part = project(lib, packed, x[begin : begin + count], torch.zeros(count, 320))
        assert torch.equal(part, together[begin : begin + count]), (begin, count)


def test_threads_change_nothing(lib: Library) -> None:
    """One thread and two compute the same bits, again and again: no tile is lost, computed twice or torn."""
    weight = random_weight(320, 96)
    alone = library(lib.isa, 1)
    check_threads(lib, pack(lib, weight), alone, pack(alone, weight))


def test_rows_that_are_not_what_they_should_be_are_refused() -> None:
    """A matrix of another dtype or shape would be read beyond its end."""
    lib = library("portable")
    for weight in (torch.zeros(8, 32), torch.zeros(8, 31, dtype=torch.bfloat16), torch.zeros(32, 8).T.bfloat16()):
        with pytest.raises(ValueError, match="bf16 rows must be contiguous"):
            PackedLinear(lib, Matrix("bf16", 8, 32, lambda weight=weight: weight), None, Arena(1 << 16))
