"""One compute thread: small tensors gain nothing from more, and other tests may run beside these. Each test's random
numbers are its own, whatever ran before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
