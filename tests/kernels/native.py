"""The compiled kernels for tests: one library per instruction set that this CPU has, built once per machine; and its
projections called one by one."""

from __future__ import annotations

import ctypes
import functools

import torch
from chatserve_kernels.cpu import build
from chatserve_kernels.cpu.library import Library
from chatserve_kernels.cpu.weights import PackedLinear
from torch import Tensor

from chatserve.model.kernels import kernel_folder
from tests.needs import missing

# As `Epilogue` of src/linear.h counts.
STORE, ADD, SILU_MUL = 0, 1, 2


def compiler() -> str:
    """Skips the test where there is no compiler (fails in CI): the product then runs on torch, as other tests show."""
    try:
        return build.find_compiler()
    except build.BuildError as error:
        missing(f"compiled kernels cannot be tested: {error}")


@functools.cache
def library(isa: str, threads: int = 2, deterministic: bool = False) -> Library:
    """The kernels for one instruction set; skips the test where `compiler` does."""
    compiler()
    planned = build.plan(kernel_folder(), isa)
    return Library(build.build(planned, print), isa, threads, deterministic)


def project(
    lib: Library, packed: PackedLinear, x: Tensor, out: Tensor, *, epilogue: int = STORE, norm: Tensor | None = None
) -> Tensor:
    """Call the kernel; ``out`` is overwritten or added to, and returned."""
    lib.call(
        *("cs_project", ctypes.byref(packed.struct), x.data_ptr(), len(x)),
        *(None if norm is None else norm.data_ptr(), 1e-5, epilogue, out.data_ptr(), out.shape[1]),
    )
    return out


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def check_epilogues(
    lib: Library, packed: PackedLinear, x: Tensor, norm: Tensor, value: Tensor, *, tolerance: float
) -> None:
    """Each epilogue and the norm give what separate operations give.

    Args:
        value: float32 [rows, 96], the projection of the normalised rows, bias included.
        tolerance: relative error of the plain projection.
    """
    count = len(x)
    residual = torch.randn(count, 96)
    stored = project(lib, packed, x, torch.zeros(count, 96), norm=norm)
    assert relative_error(stored, value) < tolerance
    added = project(lib, packed, x, residual.clone(), epilogue=ADD, norm=norm)
    assert relative_error(added, residual + value) < tolerance
    gate, up = value.view(count, 3, 2, 16).unbind(2)
    expected = (torch.nn.functional.silu(gate) * up).reshape(count, 48)
    gated = project(lib, packed, x, torch.zeros(count, 48), epilogue=SILU_MUL, norm=norm)
    assert relative_error(gated, expected) < 2 * tolerance


def check_poison(lib: Library, packed: PackedLinear, count: int) -> None:
    """NaN and infinity reach every output of their row [128 → 64], and leave the other rows' bits alone."""
    x = torch.randn(count, 128)
    healthy = project(lib, packed, x, torch.zeros(count, 64))
    others = [row for row in range(count) if row != 1]
    for poison in (torch.nan, torch.inf):
        x[1, 77] = poison
        out = project(lib, packed, x, torch.zeros(count, 64))
        assert not torch.isfinite(out[1]).any()
        assert torch.equal(out[others], healthy[others])


def check_threads(lib: Library, two: PackedLinear, alone: Library, one: PackedLinear) -> None:
    """A matrix [320, 96] gives the same bits on two threads as on one, again and again."""
    for count in (1, 5, 40):
        x = torch.randn(count, 96)
        expected = project(alone, one, x, torch.zeros(count, 320), epilogue=ADD)
        for _ in range(100):
            assert torch.equal(project(lib, two, x, torch.zeros(count, 320), epilogue=ADD), expected)
