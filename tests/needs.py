"""Tools that not every machine has. Each test that needs one asks here, so that CI cannot pass for want of it.

What no installation could bring, another processor or operating system, is no tool: tests of one say so themselves,
with ``skipif``.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(why: str) -> NoReturn:
    """Skips the test, which cannot run because of ``why``; where CI is set it fails."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
