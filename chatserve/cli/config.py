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
    """Print every setting as TOML, with its flag beside it; takes the flags of `serve`.

    What is commented out is chosen at the start.
    """
    loaded = settings.load(given, os.environ, config)
    for warning in loaded.warnings:
        click.echo(f"Warning: {warning}", err=True)
    flag_of = {setting.path: setting.flag for setting in flags.SETTINGS}
    section = ""
    for path, value in settings.flatten(loaded.config).items():
        table, _, name = path.rpartition(".")
        if table != section:
            click.echo(f"\n[{table}]" if section else f"[{table}]")
            section = table
        if path in _SECRETS and value is not None:
            value = ["***" for _ in value] if isinstance(value, list | tuple) else "***"
        line = f"# {name} =" if value is None else f"{name} = {json.dumps(value)}"
        notes = [flag_of[path]] if path in flag_of else []
        if origins:
            notes.append(loaded.origins.get(path, "default"))
        click.echo("  # ".join((line, "; ".join(notes))) if notes else line)
