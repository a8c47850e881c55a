"""One compute thread: small tensors gain nothing from more, and other tests may run beside these. Each test's random
numbers are its own, whatever ran before it. And the backends.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.interface import Backend
from chatserve_kernels.reference import ReferenceBackend
from chatserve_kernels.torch_backend import TorchBackend

from tests.kernels.native import library


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["reference", "torch", *supported_isas()])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every one, the compiled kernels in every instruction set of this CPU."""
    plain: dict[str, Backend] = {"reference": ReferenceBackend(), "torch": TorchBackend()}
    return plain.get(request.param) or NativeBackend(library(request.param))
