"""``chatserve models``: fetch a model by name, and list those that have one.

Also holds `ConsoleProgress`, the way every command shows how far `chatserve.model.store` has got: a bar on a
terminal, plain lines elsewhere.
"""

from __future__ import annotations

import sys
import time

import click

from chatserve.errors import ChatserveError
from chatserve.model.cache_folder import Progress
from chatserve.model.store import list_models
from chatserve.model.store import pull as pull_model

_SECONDS_BETWEEN_UPDATES = 0.1
_MEBIBYTE = 1024 * 1024


class ConsoleProgress:
    """Progress callback that writes to stderr."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._step = ""
        self._drawn_at = 0.0
        self._line_open = False

    def __call__(self, progress: Progress) -> None:
        """Show ``progress``: redrawn in place on a terminal; elsewhere one line at a step's start."""
        if not self._is_terminal:
            if progress.step != self._step:
                click.echo(progress.step + _size(progress), err=True)
            self._step = progress.step
            return
        finished = progress.done == progress.total
        now = time.monotonic()
        if progress.step == self._step and not finished and now - self._drawn_at < _SECONDS_BETWEEN_UPDATES:
            return
        if progress.step != self._step:
            self.close()
        self._step = progress.step
        self._drawn_at = now
        self._line_open = True
        click.echo(f"\r\x1b[K{progress.step}{_bar(progress)}", err=True, nl=False)

    def close(self) -> None:
        """End the line that is being redrawn, if there is one."""
        if self._line_open:
            click.echo(err=True)
        self._line_open = False


def _size(progress: Progress) -> str:
    if progress.total is None or progress.total < _MEBIBYTE:
        return ""
    return f" ({progress.total / _MEBIBYTE:.0f} MiB)"


def _bar(progress: Progress) -> str:
    if progress.total is None or progress.total < _MEBIBYTE:
        return ""
    filled = 24 * progress.done // progress.total
    sizes = f"{progress.done / _MEBIBYTE:.0f}/{progress.total / _MEBIBYTE:.0f} MiB"
    return f"  [{'#' * filled}{'.' * (24 - filled)}] {sizes}"


@click.group()
def models() -> None:
    """Fetch and list models."""


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch model NAME, verify it and convert it for serving; does nothing if that was done."""
    progress = ConsoleProgress()
    try:
        prepared = pull_model(name, progress)
    except ChatserveError as error:
        progress.close()
        raise click.ClickException(error.message) from error
    progress.close()
    click.echo(f"{prepared.name} is ready in {prepared.path}")


@models.command(name="list")
def list_command() -> None:
    """List the models that can be pulled by name."""
    for entry in list_models():
        state = "pulled" if entry.pulled else "not pulled"
        click.echo(f"{entry.name}  {state}  {entry.num_bytes / _MEBIBYTE:.0f} MiB  {entry.licence}")
        click.echo(f"    {entry.description}")
        if entry.path is not None:
            click.echo(f"    {entry.path}")
