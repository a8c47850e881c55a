"""``chatserve config``: what a server would be started with, and why.

Prints TOML that ``--config`` reads back. Keys are masked. Merging is `chatserve.cli.settings`' part.
"""

from __future__ import annotations

import json
import os

import click

from chatserve.cli import flags, settings

_SECRETS = ("server.api_keys", "tenancy.admin_api_key")


@click.group()
def config() -> None:
    """Show the configuration and where it comes from."""


@config.command()
@click.option("--origins", is_flag=True, help="Say beside each value where it comes from.")
@flags.options
def show(origins: bool, config: str | None, **given: object) -> None:
    """Print every setting as TOML; takes the flags of `serve`. What is commented out is chosen at the start."""
    loaded = settings.load(given, os.environ, config)
    section = ""
    for path, value in settings.flatten(loaded.config).items():
        table, _, name = path.rpartition(".")
        if table != section:
            click.echo(f"\n[{table}]" if section else f"[{table}]")
            section = table
        if path in _SECRETS and value is not None:
            value = ["***" for _ in value] if isinstance(value, list | tuple) else "***"
        line = f"# {name} =" if value is None else f"{name} = {json.dumps(value)}"
        click.echo(f"{line}  # {loaded.origins.get(path, 'default')}" if origins else line)
