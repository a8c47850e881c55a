"""``chatserve kernels``: compile the CPU kernels ahead of the first start.

The engine process compiles them itself when they are missing; this is for images and machines that lose their
compiler later. Compiling is `chatserve.model.kernels`' part.
"""

from __future__ import annotations

import click


@click.group()
def kernels() -> None:
    """Compile the CPU kernels."""


@kernels.command()
def build() -> None:
    """Compile the kernels for this machine; does nothing if that was done."""
    from chatserve.model.kernels import build_kernels

    planned = build_kernels(lambda line: click.echo(line, err=True))
    click.echo(f"CPU kernels ({planned.isa}) are ready in {planned.path}")
