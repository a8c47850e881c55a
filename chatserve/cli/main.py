"""The ``chatserve`` command: finds the subcommand's module and imports nothing else.

Knows the subcommands' names and one-line helps, so that ``--help`` and a wrong word cost no import of a server.
Errors of chatserve become one line on stderr and an exit status, never a traceback.
"""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any, NamedTuple

import click

from chatserve import __version__
from chatserve.errors import ChatserveError, ConfigError

INTERRUPTED = 128 + signal.SIGINT


class _Subcommand(NamedTuple):
    location: str
    help: str


SUBCOMMANDS = {
    "serve": _Subcommand("chatserve.cli.serve:serve", "Serve a model: API, WebSocket and chat page."),
    "chat": _Subcommand("chatserve.cli.chat:chat", "Chat in the terminal with a server."),
    "models": _Subcommand("chatserve.cli.models:models", "Fetch and list models."),
    "kernels": _Subcommand("chatserve.cli.kernels:kernels", "Compile the CPU kernels."),
    "tenants": _Subcommand("chatserve.cli.tenants:tenants", "Manage tenants, their keys and limits; show usage."),
    "prefixes": _Subcommand("chatserve.cli.prefixes:prefixes", "Publish system prompts that all tenants share."),
    "doctor": _Subcommand("chatserve.cli.doctor:doctor", "Check a running server."),
    "config": _Subcommand("chatserve.cli.config:config", "Show the configuration and where it comes from."),
    "version": _Subcommand("chatserve.cli.main:version", "Print the version."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        subcommand = SUBCOMMANDS.get(cmd_name)
        if subcommand is None:
            return None
        module, _, attribute = subcommand.location.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C that no command has taken for itself ends with one line, and the status that shells expect."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            ctx.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, subcommand.help) for name, subcommand in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(__version__, message="%(version)s")
def cli() -> None:
    """An async streaming chat server for large language models."""


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


def main() -> None:
    """Entry of the ``chatserve`` script and of ``python -m chatserve``."""
    try:
        cli(prog_name="chatserve")
    except ChatserveError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
