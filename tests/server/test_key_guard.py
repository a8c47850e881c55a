"""Guessing keys: slowed down by address, and never at the cost of who has a right one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs
from websockets.exceptions import InvalidStatus

from chatserve.config import ServerConfig
from chatserve.errors import AuthenticationError, RateLimitError
from chatserve.server import auth as auth_module
from chatserve.server.auth import MAX_SESSIONS_PER_KEY, SESSION_SECONDS, Authenticator
from chatserve.server.auth_guard import (
    MAX_ADDRESSES,
    MAX_KNOWN,
    REMEMBERED_SECONDS,
    UNGUESSABLE_CHARS,
    WRONG_KEYS_PER_MINUTE,
    KeyGuard,
    network_of,
)
from chatserve.tenancy.declared import declared_keys
from chatserve.tenancy.registry import TenantRegistry, open_registry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant
from tests.fakes import FakeEngineClient
from tests.server.live import HI, LiveServer, live_server
from tests.server.ws_client import ws_client

ADMIN = "the-admin-key"
PLAIN = "a-plain-key"
LONG_ADMIN = "0123456789abcdef" * 2
LONG_PLAIN = "fedcba9876543210" * 2


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an address may not send at once it may send a few seconds later, which a busy machine takes."""
    monkeypatch.setattr(auth_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))


def try_wrong(guard: KeyGuard, address: str, times: int, now: float = 0.0) -> int:
    """How many of so many wrong keys were looked at."""
    waits: list[float] = []
    for _ in range(times):
        try:
            guard.wrong(address, now)
        except RateLimitError as error:
            waits.append(error.retry_after or 0.0)
    assert all(0 < wait <= 60 / WRONG_KEYS_PER_MINUTE for wait in waits)
    return times - len(waits)


def test_guesses_are_bounded_by_address_however_fast_they_come() -> None:
    """An hour of a hundred tries a second is answered for a minute's worth at first, and so many a minute."""
    guard = KeyGuard()
    seen = sum(try_wrong(guard, "203.0.113.5", 100, now=float(second)) for second in range(3600))
    assert seen <= WRONG_KEYS_PER_MINUTE * 61
    assert try_wrong(guard, "203.0.113.6", 1) == 1
    assert try_wrong(guard, "203.0.113.5", 100, now=3600 + 60.0) == WRONG_KEYS_PER_MINUTE


def test_a_right_guess_is_not_told_from_a_wrong_one() -> None:
    """While an address is over the limit a key it has not used lately is refused, or guessing would go on."""
    guard = KeyGuard()
    guard.right("203.0.113.5", "old", 0.0)
    try_wrong(guard, "203.0.113.5", 100)
    with pytest.raises(RateLimitError) as refused:
        guard.right("203.0.113.5", "new", 0.0)
    assert refused.value.retry_after is not None
    guard.right("203.0.113.5", "new", refused.value.retry_after)
    guard.right("203.0.113.5", "old", 1.0)
    guard.right("203.0.113.6", "new", 0.0)
    try_wrong(guard, "203.0.113.5", 100, REMEMBERED_SECONDS + 2)
    with pytest.raises(RateLimitError):
        guard.right("203.0.113.5", "old", REMEMBERED_SECONDS + 2)


def test_memory_is_bounded_and_the_worst_are_remembered() -> None:
    """A botnet's addresses and a crowd's keys push out the oldest entries only."""
    guard = KeyGuard()
    rng = random.Random(1)
    guard.right("198.51.100.1", "mine", 0.0)
    for _ in range(3 * MAX_ADDRESSES):
        guard.wrong(f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}", 0.0)
    assert try_wrong(guard, "203.0.113.5", 100) == WRONG_KEYS_PER_MINUTE
    assert len(guard._wrong) <= MAX_ADDRESSES
    try_wrong(guard, "198.51.100.1", 100)
    guard.right("198.51.100.1", "mine", 1.0)  # no flood of wrong keys makes a right one forgotten
    for number in range(2 * MAX_KNOWN):
        guard.right("192.0.2.1", str(number), 0.0)
    assert len(guard._known) <= MAX_KNOWN


def test_whose_an_address_is() -> None:
    """A /64 is one customer's; an IPv4 address is the same in IPv6's clothes; any text of a proxy is bounded."""
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::") != network_of("2001:db8:1:3::")
    assert network_of("::ffff:203.0.113.5") == network_of("203.0.113.5") == "203.0.113.5"
    assert len(network_of("x" * 10_000)) == 64


async def guarded(live: LiveServer, key: str | None, address: str, path: str = "/v1/models") -> int:
    """Status of one request with a key, from a loopback address."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    live.address = address
    reply = await live.request("GET", path, headers=headers)
    if reply.status == 429:
        assert reply.error["code"] == "too_many_wrong_keys"
        assert 1 <= int(reply.headers["retry-after"]) <= 60 / WRONG_KEYS_PER_MINUTE
        assert int(reply.headers["retry-after-ms"]) >= 1
    return reply.status


@pytest.mark.asyncio
async def test_over_the_wire(tiny_folder: Path) -> None:
    """Everywhere a key is asked for, one count: HTTP, admin, login, WebSocket. Tenants behind the same address that
    came before, or have a key nobody can guess, go on; a guess that is right is not let in while it may be one.
    """
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=declared_keys([PLAIN, "another"]))
    await registry.create_tenant(Tenant(name="acme"))
    strong = (await registry.new_key("acme")).text
    revoked = await registry.new_key("acme")
    await registry.revoke_key(revoked.record.id)
    async with live_server(
        tiny_folder, FakeEngineClient(), server=ServerConfig(port=0), tenants=registry, admin_key=ADMIN
    ) as live:
        nat, elsewhere = "127.0.0.77", "127.0.0.78"
        assert await guarded(live, PLAIN, nat) == 200
        for _ in range(2 * WRONG_KEYS_PER_MINUTE):  # neither of these is a guess
            assert await guarded(live, None, nat) == 401
            assert await guarded(live, revoked.text, nat) == 401
        statuses = []
        for number in range(WRONG_KEYS_PER_MINUTE // 4):
            statuses.append(await guarded(live, f"guess-{number}", nat))
            statuses.append(await guarded(live, f"{strong[:-9]}_{number:08x}", nat, "/v1/usage"))
            statuses.append(await guarded(live, f"guess-{number}", nat, "/admin/tenants"))
            live.address = nat
            login = await live.post("/ui/login", {"key": f"guess-{number}"})
            statuses.append(login.status)
        assert statuses == [401] * WRONG_KEYS_PER_MINUTE
        assert {await guarded(live, f"more-{number}", nat) for number in range(5)} == {429}
        assert await guarded(live, ADMIN, nat, "/admin/tenants") == 429
        assert await guarded(live, "another", nat) == 429
        live.address = nat
        assert (await live.post("/ui/login", {"key": "another"})).status == 429
        with pytest.raises(InvalidStatus) as refused:
            async with ws_client(
                live, hello=False, additional_headers={"Authorization": "Bearer guess"}, local_addr=(nat, 0)
            ):
                pass
        assert refused.value.response.status_code == 429
        # Those who are no guesses notice nothing.
        assert await guarded(live, PLAIN, nat) == 200
        assert await guarded(live, strong, nat) == 200
        assert (await live.post("/ui/login", {"key": PLAIN})).status == 204
        bearer = {"Authorization": f"Bearer {strong}"}
        assert (await live.post("/v1/chat/completions", {"messages": HI}, **bearer)).status == 200
        async with ws_client(live, additional_headers=bearer, local_addr=(nat, 0)) as client:
            await client.ask("hi")
        assert await guarded(live, ADMIN, elsewhere, "/admin/tenants") == 200
        assert await guarded(live, "another", elsewhere) == 200
        assert await guarded(live, "guess", elsewhere) == 401


@pytest.mark.asyncio
async def test_long_keys_pass_whatever_their_neighbours_send(tiny_folder: Path) -> None:
    """Once a single wrong key every three seconds kept the admin key, and every plain key not used lately, out of a
    shared address. From 32 characters on the right ones pass there the first time; wrong ones of that length are
    counted and refused as any other.
    """
    assert len(LONG_ADMIN) == len(LONG_PLAIN) == UNGUESSABLE_CHARS
    tenants = open_registry(api_keys=(LONG_PLAIN, LONG_PLAIN[1:]))
    async with live_server(
        tiny_folder, FakeEngineClient(), server=ServerConfig(port=0), tenants=tenants, admin_key=LONG_ADMIN
    ) as live:
        shared = "127.0.0.88"
        for number in range(WRONG_KEYS_PER_MINUTE):
            path = ("/v1/models", "/admin/tenants")[number % 2]
            assert await guarded(live, f"{LONG_PLAIN[:-3]}x{number:02}", shared, path) == 401
        for path in ("/v1/models", "/admin/tenants", "/metrics"):
            assert await guarded(live, LONG_PLAIN[:-1] + "x", shared, path) == 429
        assert await guarded(live, LONG_PLAIN[1:], shared) == 429  # right, one character too short
        assert await guarded(live, LONG_PLAIN, shared) == 200
        assert await guarded(live, LONG_ADMIN, shared, "/admin/tenants") == 200
        assert await guarded(live, LONG_ADMIN, shared, "/metrics") == 200
        assert (await live.post("/ui/login", {"key": LONG_PLAIN})).status == 204


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("keys", "admin", "count"), [((PLAIN, LONG_PLAIN), ADMIN, 2), ((LONG_PLAIN,), LONG_ADMIN, 0), ((), None, 0)]
)
async def test_short_keys_are_warned_of_at_the_start(
    tiny_folder: Path, keys: tuple[str, ...], admin: str | None, count: int
) -> None:
    """Once, with their number; no key is named."""
    config = ServerConfig(port=0, api_keys=keys)
    with capture_logs() as logs:
        async with live_server(tiny_folder, FakeEngineClient(), server=config, admin_key=admin):
            pass
    warnings = [entry for entry in logs if entry["event"] == "short_keys"]
    assert [(entry["log_level"], entry["count"]) for entry in warnings] == ([("warning", count)] if count else [])
    assert not any(key in str(logs) for key in (*keys, admin) if key is not None)


@pytest.mark.asyncio
async def test_a_flood_of_guesses_delays_nobody(tiny_folder: Path) -> None:
    """A thousand wrong keys reach no engine, no tenant's books and no other address."""
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=declared_keys([PLAIN]))
    engine = FakeEngineClient()
    async with live_server(tiny_folder, engine, server=ServerConfig(port=0), tenants=registry) as live:
        statuses: list[int] = []

        async def attack(number: int) -> None:
            for guess in range(50):
                statuses.append(await guarded(live, f"{number}-{guess}", "127.0.0.66"))

        await asyncio.gather(*(attack(number) for number in range(20)))
        assert statuses.count(401) == WRONG_KEYS_PER_MINUTE
        assert statuses.count(401) + statuses.count(429) == 1000
        live.address = "127.0.0.1"
        assert (
            await live.post("/v1/chat/completions", {"messages": HI}, Authorization=f"Bearer {PLAIN}")
        ).status == 200
        assert len(engine.submissions) == 1
        assert registry.ledger.totals()["default"].requests_rejected == 0


HERE = {"type": "http", "method": "GET", "headers": [], "client": ("127.0.0.1", 1)}


def visit(auth: Authenticator, token: str) -> None:
    """A request with a session's cookie."""
    auth.authenticate({**HERE, "headers": [(b"cookie", f"chatserve_session={token}".encode())]})


def test_logins_of_one_key_end_no_session_of_another() -> None:
    """Sessions are bounded by key: the oldest of the same key goes."""
    auth = Authenticator(open_registry(api_keys=("one", "two")))
    mine = auth.log_in("one", HERE)
    first, *_, last = [auth.log_in("two", HERE) for _ in range(MAX_SESSIONS_PER_KEY + 1)]
    visit(auth, mine)
    visit(auth, last)
    with pytest.raises(AuthenticationError):
        visit(auth, first)


@pytest.mark.asyncio
async def test_sessions_go_with_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once sessions of revoked and expired keys stayed in memory for good, and so did those met after their time."""
    now = 1_000_000.0
    registry = TenantRegistry(
        TenantStore(None), pepper=bytes(32), declared=declared_keys([PLAIN]), clock=lambda: now, monotonic=lambda: now
    )
    auth = Authenticator(registry)
    await registry.create_tenant(Tenant(name="acme"))
    revoked = await registry.new_key("acme")
    expiring = await registry.new_key("acme", expires=now + 60)
    tokens = [auth.log_in(key, HERE) for key in (revoked.text, revoked.text, expiring.text, PLAIN)]
    for token in tokens:
        visit(auth, token)
    await registry.revoke_key(revoked.record.id)
    assert (len(auth._sessions), len(auth._of_key)) == (2, 2)
    now += 61
    await registry.create_tenant(Tenant(name="other"))  # whatever makes the registry look at its keys
    assert (len(auth._sessions), len(auth._of_key)) == (1, 1)
    for token in tokens[:3]:
        with pytest.raises(AuthenticationError):
            visit(auth, token)
    visit(auth, tokens[3])
    monkeypatch.setattr(auth_module, "time", SimpleNamespace(monotonic=lambda: 1000.0 + SESSION_SECONDS + 1))
    with pytest.raises(AuthenticationError):
        visit(auth, tokens[3])
    assert not auth._sessions
