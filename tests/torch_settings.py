"""How tests use torch. A folder's tests do once its ``conftest.py`` imports these fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """One compute thread: small tensors gain nothing from more, and other tests may run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test's random numbers are its own, whatever ran before it."""
    torch.manual_seed(0)
