"""``chatserve prefixes``: system prompts that the operator of a running server publishes to its tenants."""

from __future__ import annotations

from pathlib import Path

import click

from chatserve.cli.admin_client import AdminClient

_URL = click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The running server.")
_KEY = click.option("--admin-api-key", envvar="CHATSERVE_ADMIN_API_KEY", help="The server's admin key.")


@click.group()
def prefixes() -> None:
    """Publish system prompts to all tenants, or to a group: computed once, shared by everyone."""


@prefixes.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--text", help="The system prompt itself, instead of a FILE.")
@click.option("--group", default="", help="Only for tenants of this group.")
@_URL
@_KEY
def publish(file: Path | None, text: str | None, group: str, url: str, admin_api_key: str | None) -> None:
    """Compute a system prompt and keep it in the cache until it is withdrawn."""
    if (file is None) == (text is None):
        raise click.UsageError("Give either FILE or --text.")
    content = text if text is not None else file.read_text(encoding="utf-8") if file is not None else ""
    answer = AdminClient(url, admin_api_key).call("POST", "/admin/prefixes", {"text": content, "group": group})
    click.echo(f"{answer['id']}  {answer['num_tokens']} tokens in {answer['num_blocks']} blocks")


@prefixes.command("list")
@_URL
@_KEY
def list_prefixes(url: str, admin_api_key: str | None) -> None:
    """What is published."""
    for each in AdminClient(url, admin_api_key).call("GET", "/admin/prefixes")["data"]:
        state = each["error"] or f"{each['num_tokens']} tokens in {each['num_blocks']} blocks"
        start = " ".join(each["text"].split())[:60]
        click.echo(f"{each['id']}  {each['group'] or 'everybody'}  {state}  {start}")


@prefixes.command()
@click.argument("prefix_id")
@_URL
@_KEY
def withdraw(prefix_id: str, url: str, admin_api_key: str | None) -> None:
    """End a publication."""
    AdminClient(url, admin_api_key).call("DELETE", f"/admin/prefixes/{prefix_id}")
    click.echo(f"{prefix_id} withdrawn")
