"""One compute thread, random numbers that no other test changes, and the backends."""

from __future__ import annotations

import pytest
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.interface import Backend
from chatserve_kernels.reference import ReferenceBackend
from chatserve_kernels.torch_backend import TorchBackend

from tests.kernels.native import library
from tests.torch_settings import one_thread as one_thread
from tests.torch_settings import same_numbers as same_numbers


@pytest.fixture(params=["reference", "torch", *supported_isas()])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every one, the compiled kernels in every instruction set of this CPU."""
    plain: dict[str, Backend] = {"reference": ReferenceBackend(), "torch": TorchBackend()}
    return plain.get(request.param) or NativeBackend(library(request.param))
