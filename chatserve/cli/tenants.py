"""``chatserve tenants``: tenants, their limits and keys, and what they used.

Works on the database file directly, whether a server runs on it or not; a running one sees changes within a second.
Knows options and tables of text; the rules are `chatserve.tenancy`'s.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from chatserve.errors import ChatserveError
from chatserve.tenancy.keys import ApiKey, load_pepper, new_key
from chatserve.tenancy.registry import default_database
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import COUNT_LIMITS, Tenant, TenantLimits
from chatserve.tenancy.usage import FIELDS, Usage, UsageRow, day_of

F = TypeVar("F", bound=Callable[..., None])

_SPAN = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _count(text: str) -> int | None:
    """A whole number with an optional suffix k or m (thousands, millions), or ``none``."""
    match = re.fullmatch(r"([0-9]{1,12})([km]?)", text.lower())
    if match is not None:
        return int(match[1]) * {"": 1, "k": 1000, "m": 1_000_000}[match[2]]
    if text.lower() != "none":
        raise click.BadParameter(
            f"{text!r} is neither `none` nor a whole number (with k or m for thousands, millions)."
        )
    return None


def _settings(command: F) -> F:
    """The options that `create` and `limit` share; those not given are absent from the keywords' values (unset)."""
    options = [
        click.option("--display-name", help="For people."),
        click.option("--weight", type=float, help="Share relative to other tenants of its class (1)."),
        click.option("--priority-class", type=int, help="0 runs first, 7 last (1)."),
        click.option("--group", "groups", multiple=True, help="A group it belongs to. Repeatable; '' for none."),
        click.option("--max-concurrent", type=_count, metavar="N|none", help="Open requests at once."),
        click.option("--requests-per-minute", type=_count, metavar="N|none", help="Requests per minute."),
        click.option(
            "--tokens-per-minute", type=_count, metavar="N|none", help="Tokens per minute, prompt and output."
        ),
        click.option("--tokens-per-day", type=_count, metavar="N|none", help="Tokens per UTC day, prompt and output."),
        click.option("--max-queued", type=_count, metavar="N|none", help="Waiting requests at once."),
        click.option("--max-connections", type=_count, metavar="N|none", help="WebSockets open at once."),
        click.option("--kv-floor", type=float, help="Share of the KV pool that others cannot take (0)."),
        click.option("--kv-cap", type=float, help="Share of the KV pool that it may hold (1)."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _given(ctx: click.Context, base: Tenant) -> dict[str, object]:
    """Fields of `Tenant` that the command line changes."""
    given = {
        name: value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if "groups" in given:
        given["groups"] = tuple(group for group in ctx.params["groups"] if group)
    limits = {name: value for name, value in given.items() if name in TenantLimits.__struct_fields__}
    changes = {name: value for name, value in given.items() if name in Tenant.__struct_fields__ and name != "name"}
    if limits:
        changes["limits"] = msgspec.structs.replace(base.limits, **limits)
    return changes


@click.group()
@click.option(
    "--tenants-db",
    envvar="CHATSERVE_TENANTS_DB",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The database; default: tenants.sqlite in chatserve's data folder.",
)
@click.pass_context
def tenants(ctx: click.Context, tenants_db: Path | None) -> None:
    """Manage tenants, their keys and limits; show usage. A running server sees changes within a second."""
    ctx.obj = tenants_db or default_database(os.environ)


@tenants.command()
@click.argument("name")
@_settings
@click.pass_context
def create(ctx: click.Context, /, name: str, **_: object) -> None:
    """Add the tenant NAME. Give it a key with `chatserve tenants key new NAME`."""
    tenant = Tenant(name=name, created=time.time())
    tenant = msgspec.structs.replace(tenant, **_given(ctx, tenant))
    with _store(ctx.obj) as store:
        store.create_tenant(tenant)
    click.echo(f"Tenant {name} is in {ctx.obj}.", err=True)


@tenants.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def list_command(path: Path, as_json: bool) -> None:
    """List tenants with their limits."""
    with _store(path) as store:
        found = [tenant for tenant in store.snapshot().tenants if tenant.deleted is None]
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    rows = [
        (
            tenant.name,
            "disabled" if tenant.disabled else "active",
            f"{tenant.weight:g}",
            str(tenant.priority_class),
            *(_cell(getattr(tenant.limits, field)) for field in COUNT_LIMITS),
            f"{tenant.limits.kv_floor:g}-{tenant.limits.kv_cap:g}",
            ",".join(tenant.groups) or "-",
        )
        for tenant in found
    ]
    heads = (
        "NAME",
        "STATE",
        "WEIGHT",
        "CLASS",
        "CONCURRENT",
        "REQ/MIN",
        "TOK/MIN",
        "TOK/DAY",
        "QUEUED",
        "SOCKETS",
        "KV",
        "GROUPS",
    )
    _table(heads, rows)


@tenants.command()
@click.argument("name")
@click.option("--disable/--enable", "disabled", default=None, help="Refuse its keys, or accept them again.")
@_settings
@click.pass_context
def limit(ctx: click.Context, /, name: str, **_: object) -> None:
    """Change limits and other settings of the tenant NAME; what is not named stays. `none` lifts a limit."""
    with _store(ctx.obj) as store:
        base = next((tenant for tenant in store.snapshot().tenants if tenant.name == name), Tenant(name=name))
        changes = _given(ctx, base)
        if not changes:
            raise click.UsageError("Name at least one setting to change; --help shows them.")
        store.update_tenant(name, **changes)


@tenants.command()
@click.argument("name")
@click.confirmation_option(prompt="Its keys stop working at once, and the name is never used again. Delete it?")
@click.pass_obj
def delete(path: Path, name: str) -> None:
    """Delete the tenant NAME. Its usage stays on record."""
    with _store(path) as store:
        store.delete_tenant(name, time.time())


@tenants.command()
@click.argument("name", required=False)
@click.option("--days", type=click.IntRange(min=1), default=30, show_default=True, help="How far back, today included.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def usage(path: Path, name: str | None, days: int, as_json: bool) -> None:
    """Show what tenants used per UTC day; of the tenant NAME, or of all. Columns without a number are left out."""
    first = day_of(time.time() - (days - 1) * _SECONDS["d"])
    with _store(path) as store:
        found = store.usage(tenant=name, first_day=first)
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    total = Usage()
    for row in found:
        total.add(row.usage)
    rows = [*found, UsageRow("total", "", total)]
    columns = [field for field in FIELDS if getattr(total, field)]
    heads = ("TENANT", "DAY", *(field.replace("_", " ").upper() for field in columns))
    _table(heads, [(row.tenant, row.day, *(f"{getattr(row.usage, f):.10g}" for f in columns)) for row in rows])


@tenants.group()
def key() -> None:
    """Make, list and revoke keys."""


@key.command(name="new")
@click.argument("tenant")
@click.option("--label", default="", help="For people: whose key it is.")
@click.option("--expires-in", metavar="SPAN", help="Seconds, minutes, hours or days: 90s, 15m, 12h, 30d.")
@click.pass_obj
def key_new(path: Path, tenant: str, label: str, expires_in: str | None) -> None:
    """Make a key for TENANT and print it, once: it is not kept."""
    now = time.time()
    expires = None if expires_in is None else now + _span(expires_in)
    with _store(path) as store:
        made = new_key(load_pepper(path, os.environ), tenant, label=label, created=now, expires=expires)
        store.add_key(made.record)
    click.echo(made.text)
    click.echo("This key is shown once and not kept: store it now.", err=True)


@key.command(name="list")
@click.argument("tenant", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def key_list(path: Path, tenant: str | None, as_json: bool) -> None:
    """List keys by their public ids; of TENANT, or of all."""
    with _store(path) as store:
        found = [record for record in store.snapshot().keys if tenant in (None, record.tenant)]
    now = time.time()
    if as_json:
        shown = [{name: getattr(record, name) for name in _SHOWN} | {"state": _state(record, now)} for record in found]
        click.echo(msgspec.json.encode(shown))
        return
    rows = [
        (record.id, record.tenant, _state(record, now), _moment(record.created), _moment(record.expires), record.label)
        for record in found
    ]
    _table(("ID", "TENANT", "STATE", "CREATED", "EXPIRES", "LABEL"), rows)


@key.command(name="revoke")
@click.argument("key_id")
@click.pass_obj
def key_revoke(path: Path, key_id: str) -> None:
    """Revoke the key with the public id KEY_ID (the part after cs_); answers it is getting end within a second."""
    with _store(path) as store:
        store.revoke_key(key_id, time.time())


_SHOWN = ("id", "tenant", "label", "created", "expires", "revoked")


@contextmanager
def _store(path: Path) -> Iterator[TenantStore]:
    store = TenantStore(path)
    try:
        yield store
    except ChatserveError as error:
        raise click.ClickException(error.message) from error
    finally:
        store.close()


def _span(text: str) -> int:
    match = _SPAN.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r}: write 90s, 15m, 12h or 30d.", param_hint="--expires-in")
    return int(match[1]) * _SECONDS[match[2]]


def _state(key: ApiKey, now: float) -> str:
    return "revoked" if key.revoked is not None else "active" if key.usable(now) else "expired"


def _moment(unix_time: float | None) -> str:
    if unix_time is None:
        return "never"
    return datetime.datetime.fromtimestamp(unix_time, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def _cell(value: int | None) -> str:
    return "-" if value is None else str(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns wide enough for their longest cell."""
    lines = [tuple(heads), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
