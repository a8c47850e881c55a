"""The compiled kernels for tests: one library per instruction set that this CPU has, built once per machine; and its
projections called one by one."""

from __future__ import annotations

import ctypes
import functools
import os

import pytest
from chatserve_kernels.cpu import build
from chatserve_kernels.cpu.library import Library
from chatserve_kernels.cpu.weights import PackedLinear
from torch import Tensor

from chatserve.model.kernels import kernel_folder

# As `Epilogue` of src/linear.h counts.
STORE, ADD, SILU_MUL = 0, 1, 2


def compiler() -> str:
    """Skips the test where there is no compiler (fails in CI): the product then runs on torch, as other tests show."""
    try:
        return build.find_compiler()
    except build.BuildError as error:
        if os.environ.get("CI"):
            pytest.fail(f"compiled kernels cannot be tested: {error}")
        pytest.skip(f"compiled kernels cannot be tested: {error}")


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
