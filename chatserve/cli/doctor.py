"""``chatserve doctor``: checks that run against a running server, as its clients would."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import click

from chatserve.cli.admin_client import AdminClient
from chatserve.cli.doctor_probes import PROBES, Probe, may_continue
from chatserve.errors import ChatserveError

WORDS_PER_PROMPT = 60

COINCIDENCE_TOKENS = 8
"""Random prompts of one tenant may begin alike for so long, and then find so much of each other."""


@click.group()
def doctor() -> None:
    """Check a running server."""


@doctor.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The running server.")
@click.option("--admin-api-key", envvar="CHATSERVE_ADMIN_API_KEY", help="The server's admin key: makes two tenants.")
@click.option("--api-key", "keys", multiple=True, help="A key of one tenant; give two, of two tenants, instead.")
@click.option("--trials", default=5, show_default=True, type=click.IntRange(1, 1000), help="Pairs per kind of request.")
def isolation(url: str, admin_api_key: str | None, keys: tuple[str, ...], trials: int) -> None:
    """Check in pairs that two tenants hit their own cache and never each other's.

    A pair is one prompt of a tenant, sent again by itself (must hit) and by the other (must not, beyond what a prompt
    hits that nobody has sent before), over every entry point and with every field that a client could try to borrow
    the other's cache with. Needs the admin key, and makes and removes two tenants; or two tenants' keys.
    """
    if keys and len(keys) != 2:
        raise click.UsageError("Give two keys with --api-key, of two tenants, or the admin key.")
    if keys:
        _report(_tenants_of(AdminClient(url, None), keys), trials)
        return
    admin = AdminClient(url, admin_api_key)
    created: list[str] = []
    mark = secrets.token_hex(4)
    try:
        tenants = []
        for name in (f"doctor-{mark}-{letter}" for letter in "ab"):
            admin.call("POST", "/admin/tenants", {"name": name})
            created.append(name)
            key = admin.call("POST", "/admin/keys", {"tenant": name})["key"]
            tenants.append(_Tenant(name, admin.with_key(key)))
        _report(tenants, trials)
    finally:
        for name in created:
            admin.call("DELETE", f"/admin/tenants/{name}")


@dataclass(frozen=True)
class _Tenant:
    name: str
    client: AdminClient


@dataclass
class _Finding:
    """What one kind of request found."""

    pairs: int = 0
    own: int = 0
    foreign: int = 0


def _tenants_of(server: AdminClient, keys: tuple[str, ...]) -> list[_Tenant]:
    tenants = []
    for key in keys:
        client = server.with_key(key)
        tenants.append(_Tenant(client.call("GET", "/v1/usage")["tenant"], client))
    if tenants[0].name == tenants[1].name:
        raise ChatserveError(f"Both keys are the tenant {tenants[0].name}'s: it shares its cache with itself.")
    return tenants


def _report(tenants: list[_Tenant], trials: int) -> None:
    findings = {}
    for kind, probe in PROBES.items():
        finding = findings[kind] = _Finding()
        for trial in range(trials):
            owner, other = tenants if trial % 2 == 0 else reversed(tenants)
            _run_pair(finding, kind, probe, owner, other, trial)
        click.echo(
            f"{kind:<22}own hits {finding.own} of {finding.pairs}, cross-tenant hits {finding.foreign} of {trials}"
        )
    intruded = may_continue(tenants[0].client, tenants[1].client, _prompt())
    click.echo(f"{'conversations':<22}{'OPEN to' if intruded else 'closed to'} another tenant that knows their ids")
    pairs, own, foreign = (sum(getattr(f, name) for f in findings.values()) for name in ("pairs", "own", "foreign"))
    click.echo(f"{pairs} pairs: own hits {own} of {pairs}, cross-tenant hits {foreign} of {pairs}")
    if foreign or intruded:
        raise ChatserveError("Isolation is broken: see above.", code="isolation_broken")
    if own < pairs:
        raise ChatserveError(
            "A tenant missed its own cache, so nothing is shown about the others'. Is the server very busy, or its "
            "cache very small?",
            code="cache_missed",
        )
    click.echo(f"isolation holds (with 95 % confidence fewer than {3 / pairs:.1%} of such requests would cross)")


def _run_pair(finding: _Finding, kind: str, probe: Probe, owner: _Tenant, other: _Tenant, trial: int) -> None:
    text = _prompt()
    _, first = probe(owner.client, text, other.name)
    total, again = probe(owner.client, text, other.name)
    # What every prompt of the other begins with (the template's words, something published) it may well have cached:
    # with the first of two fresh prompts if not before, so that the second tells how much that is.
    probe(other.client, _prompt(), owner.name)
    _, unseen = probe(other.client, _prompt(), owner.name)
    _, foreign = probe(other.client, text, owner.name)
    finding.pairs += 1
    hit, crossed = again > first and again > total // 2, foreign > unseen + COINCIDENCE_TOKENS
    finding.own += hit
    finding.foreign += crossed
    if crossed or not hit:
        click.echo(
            f"  {kind}, trial {trial + 1}: {total} tokens of {owner.name}, at first {first} cached, again {again}; of "
            f"the same {other.name} found {foreign}, and {unseen} of a prompt that nobody had sent"
        )


def _prompt() -> str:
    return " ".join(secrets.token_hex(2) for _ in range(WORDS_PER_PROMPT))
