"""``chatserve doctor``: checks that run against a running server, as its clients would."""

from __future__ import annotations

import secrets

import click

from chatserve.cli.admin_client import AdminClient
from chatserve.errors import ChatserveError


@click.group()
def doctor() -> None:
    """Check a running server."""


@doctor.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The running server.")
@click.option("--admin-api-key", envvar="CHATSERVE_ADMIN_API_KEY", help="The server's admin key.")
@click.option("--trials", default=5, show_default=True, type=click.IntRange(1, 1000), help="Pairs per kind of request.")
def isolation(url: str, admin_api_key: str | None, trials: int) -> None:
    """Make two tenants, and check in pairs that each hits its own cache and never the other's.

    A pair is one prompt of the first tenant, sent again by itself (must hit) and by the second (must not), with every
    field that a client could try to borrow the other's cache with.
    """
    admin = AdminClient(url, admin_api_key)
    mark = secrets.token_hex(4)
    names = [f"doctor-{mark}-{letter}" for letter in "ab"]
    created: list[str] = []
    try:
        clients = []
        for name in names:
            admin.call("POST", "/admin/tenants", {"name": name})
            created.append(name)
            clients.append(admin.with_key(admin.call("POST", "/admin/keys", {"tenant": name})["key"]))
        own, foreign, pairs, wrong = _run_pairs(clients[0], clients[1], mark, trials)
    finally:
        for name in created:
            admin.call("DELETE", f"/admin/tenants/{name}")
    click.echo(f"{pairs} pairs: own hits {own} of {pairs}, cross-tenant hits {foreign} of {pairs}")
    for line in wrong:
        click.echo(f"  {line}")
    if foreign or own < pairs:
        raise ChatserveError(
            "Isolation is broken: see the pairs above." if foreign else "A tenant missed its own cache."
        )
    click.echo(f"isolation holds (with 95 % confidence fewer than {3 / pairs:.1%} of such requests would cross)")


def _run_pairs(a: AdminClient, b: AdminClient, mark: str, trials: int) -> tuple[int, int, int, list[str]]:
    own = foreign = pairs = 0
    wrong: list[str] = []
    for trial in range(trials):
        for kind in ("chat", "chat with salt", "completion"):
            borrowed = {"user": "doctor", "prompt_cache_key": f"doctor-{mark}"}
            if kind == "chat with salt":
                borrowed["cache_salt"] = f"doctor-{mark}"
            text = f"{mark} {trial} {kind}. " + " ".join(f"word{trial * 100 + i}" for i in range(60))
            if kind == "completion":
                path, body = "/v1/completions", {"prompt": text, "max_tokens": 1, **borrowed}
            else:
                messages = [{"role": "user", "content": text}]
                path, body = "/v1/chat/completions", {"messages": messages, "max_tokens": 1, **borrowed}
            first, again, other = (_cached(client, path, body) for client in (a, a, b))
            pairs += 1
            own += again > first
            foreign += other > first
            if again <= first or other > first:
                wrong.append(
                    f"{kind}, trial {trial}: first {first}, own again {again}, other tenant {other} cached tokens"
                )
    return own, foreign, pairs, wrong


def _cached(client: AdminClient, path: str, body: object) -> int:
    return int(client.call("POST", path, body)["usage"]["prompt_tokens_details"]["cached_tokens"])
