"""Where compiled CPU kernels are kept, and whether there are any.

Knows the cache folder and what to tell the user when there is no compiler; compiling and binding are
`chatserve_kernels.cpu`'s part. Imports no torch. Called by the worker when it loads and by ``chatserve kernels``;
never by the API process of a server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from chatserve_kernels.cpu import build

from chatserve.errors import ConfigError
from chatserve.model.cache_folder import cache_root

if TYPE_CHECKING:
    from chatserve_kernels.cpu.library import Library


def kernel_folder() -> Path:
    """The folder of compiled libraries."""
    return cache_root() / "kernels"


def build_kernels(notice: Callable[[str], None]) -> build.Plan:
    """Compile the kernels for this machine unless that is done.

    Raises:
        ConfigError: no compiler, or it fails; the message is one line.
    """
    try:
        planned = build.plan(kernel_folder())
        build.build(planned, notice)
    except build.BuildError as error:
        raise ConfigError(f"CPU kernels cannot be compiled: {error}.") from error
    return planned


def load_kernels(threads: int, notice: Callable[[str], None], deterministic: bool = False) -> Library | None:
    """The kernels with their compute threads; compiled first where need be. ``None``, with a notice, without them.

    Args:
        deterministic: what a token gives does not depend on what else is in its step.
    """
    from chatserve_kernels.cpu.library import Library

    try:
        planned = build.plan(kernel_folder())
        return Library(build.build(planned, notice), planned.isa, threads, deterministic)
    except build.BuildError as error:
        notice(f"No compiled CPU kernels, torch is used instead: {error}.")
        return None
