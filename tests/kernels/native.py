"""The compiled kernels for tests: one library per instruction set that this CPU has, built once per machine."""

from __future__ import annotations

import functools
import os

import pytest
from chatserve_kernels.cpu import build
from chatserve_kernels.cpu.library import Library

from chatserve.model.kernels import kernel_folder


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
