"""Identity, limits and books of one server, followed through time and through other processes' changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from chatserve.config import Config, TenancyConfig
from chatserve.errors import AuthenticationError, ChatserveError, ConflictError, QueueFullError, RateLimitError
from chatserve.tenancy import ledger as ledger_module
from chatserve.tenancy.declared import Declared, declared_keys
from chatserve.tenancy.keys import ApiKey, new_key, plain_digest
from chatserve.tenancy.registry import (
    REFRESH_SECONDS,
    Admission,
    TenantRegistry,
    default_database,
    open_registry,
    open_tenants,
)
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant, TenantLimits
from chatserve.tenancy.usage import Usage, UsageRow, day_of
from tests.waiting import PATIENCE

NOON = 1_800_000_000.0
PEPPER = bytes(32)


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def registry(clock: Clock) -> AsyncIterator[TenantRegistry]:
    """In memory, with the tenant acme."""
    registry = TenantRegistry(TenantStore(None), pepper=PEPPER, declared=Declared(), clock=clock, monotonic=clock)
    await registry.create_tenant(Tenant(name="acme"))
    yield registry
    await registry.close()


def code_of(registry: TenantRegistry, text: str) -> str | None:
    """Code of the refusal of a key, or ``None`` where it is good."""
    try:
        registry.recognise(text)
    except AuthenticationError as error:
        return error.code
    return None


@pytest.mark.asyncio
async def test_life_of_a_key(registry: TenantRegistry, clock: Clock) -> None:
    """Good from the moment it is made until it expires or is revoked; only its bearer learns which."""
    gone: list[frozenset[str | None]] = []
    registry.on_revoked(gone.append)
    forever = await registry.new_key("acme", label="a")
    short = await registry.new_key("acme", expires=NOON + 60)
    assert registry.recognise(forever.text).tenant == "acme"
    assert registry.key(short.record.id).id == short.record.id
    forged = new_key(b"\1" * 32, "acme", created=0.0).text
    assert code_of(registry, forged) == code_of(registry, "") == code_of(registry, "\ud800") == "invalid_api_key"
    clock.now += 60
    assert code_of(registry, short.text) == "key_expired"
    await registry.revoke_key(forever.record.id)
    assert code_of(registry, forever.text) == "key_revoked"
    with pytest.raises(AuthenticationError):
        registry.key(forever.record.id)
    assert {key for event in gone for key in event} >= {forever.record.id}


@pytest.mark.asyncio
async def test_each_key_is_reported_gone_once(registry: TenantRegistry) -> None:
    """By revocation, by disabling or deleting its tenant; never for a key that still works, never twice."""
    gone: list[frozenset[str | None]] = []
    registry.on_revoked(gone.append)
    one, two = await registry.new_key("acme"), await registry.new_key("acme")
    await registry.create_tenant(Tenant(name="bystander"))
    other = await registry.new_key("bystander")
    await registry.revoke_key(one.record.id)
    await registry.revoke_key(one.record.id)
    assert gone == [{one.record.id}]
    await registry.update_tenant("acme", {"disabled": True})
    assert gone[1:] == [{two.record.id}]
    assert code_of(registry, two.text) == "tenant_disabled"
    await registry.update_tenant("acme", {"disabled": False})
    assert code_of(registry, two.text) is None
    await registry.delete_tenant("acme")
    assert gone[2:] == [{two.record.id}]
    assert code_of(registry, two.text) == "key_revoked"
    assert code_of(registry, other.text) is None


@pytest.mark.asyncio
async def test_another_process_is_noticed_within_a_second(tmp_path: Path) -> None:
    """What the command line changes takes effect in a running server, expiry included, without a restart."""
    path = tmp_path / "t.sqlite"
    assert REFRESH_SECONDS < 1
    registry = open_registry(database=path, environ={})
    pepper = bytes.fromhex((tmp_path / "t.pepper").read_text())
    other = TenantStore(path)
    gone: list[str | None] = []
    registry.on_revoked(gone.extend)
    assert not registry.keys_required
    await registry.start()
    try:
        other.create_tenant(Tenant(name="acme", weight=3.0))
        made = new_key(pepper, "acme", created=0.0)
        other.add_key(made.record)
        async with asyncio.timeout(PATIENCE):
            while code_of(registry, made.text) is not None:  # noqa: ASYNC110 - another process's change
                await asyncio.sleep(0.01)
        assert registry.keys_required
        assert registry.tenant("acme").weight == 3.0
        other.revoke_key(made.record.id, 1.0)
        async with asyncio.timeout(PATIENCE):
            while made.record.id not in gone:  # noqa: ASYNC110 - another process's change
                await asyncio.sleep(0.01)
        assert gone == [None, made.record.id]
    finally:
        await registry.close()
        other.close()


@pytest.mark.asyncio
async def test_expiry_is_told_to_who_is_running(clock: Clock) -> None:
    """A key that expires in the middle of an answer ends it, as a revoked one does."""
    record = ApiKey(id="k", tenant="default", digest=plain_digest("k"), expires=NOON + 5)
    registry = TenantRegistry(TenantStore(None), pepper=PEPPER, declared=Declared((), (record,)), clock=clock)
    gone: list[str | None] = []
    registry.on_revoked(gone.extend)
    await registry.start()
    clock.now += 5
    async with asyncio.timeout(PATIENCE):
        while not gone:  # noqa: ASYNC110 - the registry's own timer
            await asyncio.sleep(0.01)
    assert gone == ["k"]
    await registry.close()


@pytest.mark.asyncio
async def test_open_until_there_is_somebody_to_tell_apart() -> None:
    """Without keys and tenants everybody is the default tenant; the first tenant ends that, also for those who are
    in, and taking the last key away opens nothing.
    """
    registry = open_registry(environ={})
    gone: list[str | None] = []
    registry.on_revoked(gone.extend)
    assert not registry.keys_required
    assert registry.tenant("default").limits == TenantLimits()
    await registry.create_tenant(Tenant(name="default", limits=TenantLimits(max_concurrent=1)))
    assert not registry.keys_required
    assert gone == []
    await registry.create_tenant(Tenant(name="acme"))
    assert registry.keys_required
    assert gone == [None]
    await registry.delete_tenant("acme")
    assert registry.keys_required
    await registry.close()
    flagged = open_registry(api_keys=("a",), environ={})
    assert flagged.keys_required
    assert flagged.recognise("a").tenant == "default"
    assert code_of(flagged, "b") == "invalid_api_key"
    await flagged.close()


@pytest.mark.asyncio
async def test_declared_tenants_cannot_be_changed() -> None:
    """What a file says stays true until the restart; the store's tenants live beside it."""
    declared = Declared((Tenant(name="fixed"),), declared_keys(["k"]).keys)
    registry = TenantRegistry(TenantStore(None), pepper=PEPPER, declared=declared)
    for change in (
        registry.create_tenant(Tenant(name="fixed")),
        registry.update_tenant("fixed", {"weight": 2.0}),
        registry.delete_tenant("fixed"),
        registry.new_key("fixed"),
    ):
        with pytest.raises(ConflictError, match="tenants file"):
            await change
    await registry.create_tenant(Tenant(name="loose"))
    assert [tenant.name for tenant in registry.tenants()] == ["fixed", "loose"]
    await registry.close()


@pytest.mark.asyncio
async def test_refusals_have_their_codes_and_are_booked(registry: TenantRegistry) -> None:
    """Each limit has its own word, all or nothing is admitted, and only the tenant itself pays for a refusal."""
    await registry.create_tenant(Tenant(name="quiet"))
    for limits, costs, code, kind in (
        (TenantLimits(max_concurrent=1), [1, 1], "concurrency_limit", RateLimitError),
        (TenantLimits(max_queued=1), [1, 1], "queue_full", QueueFullError),
        (TenantLimits(requests_per_minute=1), [1, 1], "rate_limit_exceeded", RateLimitError),
        (TenantLimits(tokens_per_minute=5), [3, 3], "rate_limit_exceeded", RateLimitError),
        (TenantLimits(tokens_per_day=5), [3, 3], "insufficient_quota", RateLimitError),
    ):
        await registry.update_tenant("acme", {"limits": limits})
        with pytest.raises(ChatserveError) as caught:
            registry.admit("acme", costs)
        assert (caught.value.code, type(caught.value)) == (code, kind)
        assert registry.account("acme").num_open == 0
        (admission,) = registry.admit("acme", costs[:1])
        admission.settle(0)
        registry.admit("quiet", [1])[0].settle(0)
    assert registry.ledger.totals()["acme"] == Usage(requests_rejected=5)
    assert "quiet" not in registry.ledger.totals()


@pytest.mark.asyncio
async def test_days_quota_survives_a_restart(tmp_path: Path, clock: Clock) -> None:
    """What was used today is known after a restart; tomorrow is a new day."""
    path, today = tmp_path / "t.sqlite", day_of(NOON)
    store = TenantStore(path)
    store.create_tenant(Tenant(name="acme", limits=TenantLimits(tokens_per_day=100)))
    store.add_usage([UsageRow("acme", today, Usage(prompt_tokens=60, generated_tokens=30))])
    registry = TenantRegistry(store, pepper=PEPPER, declared=Declared(), clock=clock)
    registry.admit("acme", [10])[0].settle(0)
    with pytest.raises(RateLimitError) as caught:
        registry.admit("acme", [11])
    assert (caught.value.code, caught.value.retry_after) == ("insufficient_quota", None)
    clock.now += 86400
    registry.admit("acme", [100])[0].settle(100)
    await registry.close()


@pytest.mark.asyncio
async def test_admissions_return_what_they_took(registry: TenantRegistry) -> None:
    """Whatever order of starting and settling, twice or not at all before the end, nothing stays reserved."""
    rng, admissions = random.Random(5), list[Admission]()
    await registry.update_tenant("acme", {"limits": TenantLimits(max_concurrent=40, max_queued=20)})
    refused = 0
    for _ in range(3000):
        action = rng.choice(["admit", "start", "settle"])
        if action == "admit":
            try:
                admissions += registry.admit("acme", [rng.randrange(1, 50)] * rng.randrange(1, 4))
            except ChatserveError:
                refused += 1
        elif admissions:
            one = rng.choice(admissions)
            if action == "start":
                one.start()
            else:
                one.settle(rng.randrange(60))
    assert refused > 100
    for admission in admissions:
        admission.settle(0)
        admission.settle(7)
        admission.start()
    account = registry.account("acme")
    assert (account.num_open, account.num_waiting, account.reserved) == (0, 0, 0)


@pytest.mark.asyncio
async def test_books_are_exact_and_survive(tmp_path: Path, clock: Clock) -> None:
    """Bookings over two days, flushed at random moments and by closing, add up in the file; none is lost while the
    database cannot be written.
    """
    path, rng, model = tmp_path / "t.sqlite", random.Random(1), dict[tuple[str, str], int]()
    registry = TenantRegistry(TenantStore(path), pepper=PEPPER, declared=Declared(), clock=clock)
    for step in range(400):
        tenant, n = rng.choice("abc"), rng.randrange(1000)
        clock.now = NOON + (step // 200) * 86400
        registry.ledger.book(tenant, Usage(computed_tokens=n, run_seconds=0.5))
        model[tenant, day_of(clock.now)] = model.get((tenant, day_of(clock.now)), 0) + n
        if rng.random() < 0.05:
            await registry.ledger.flush()
        if step == 150:
            broken = registry.ledger._store.add_usage
            registry.ledger._store.add_usage = lambda rows: (_ for _ in ()).throw(OSError("disk full"))  # type: ignore[method-assign,assignment]
            with pytest.raises(OSError, match="disk full"):
                await registry.ledger.flush()
            registry.ledger._store.add_usage = broken  # type: ignore[method-assign]
    seen = await registry.ledger.usage(tenant="a")
    assert {row.day: row.usage.computed_tokens for row in seen} == {d: n for (t, d), n in model.items() if t == "a"}
    registry.ledger.book("a", Usage(computed_tokens=1))
    model["a", day_of(clock.now)] += 1
    await registry.close()
    store = TenantStore(path)
    assert {(row.tenant, row.day): row.usage.computed_tokens for row in store.usage()} == model
    store.close()


@pytest.mark.asyncio
async def test_metric_labels_are_bounded_and_never_fall(registry: TenantRegistry) -> None:
    """A thousand tenants make no thousand series, whoever comes first keeps its label, and the sum is right."""
    last: dict[str, int] = {}
    rng, total = random.Random(2), 0
    for _ in range(5000):
        n = rng.randrange(10)
        total += n
        registry.ledger.book(f"t{rng.randrange(1000)}", Usage(prompt_tokens=n))
        now = {label: usage.prompt_tokens for label, usage in registry.ledger.totals().items()}
        assert all(now[label] >= value for label, value in last.items())
        last = now
    assert len(last) == ledger_module.MAX_LABELS + 1
    assert sum(last.values()) == total


def test_default_place_of_the_database() -> None:
    """CHATSERVE_HOME, then the user's data folder."""
    assert default_database({"CHATSERVE_HOME": "/x"}) == Path("/x/tenants.sqlite")
    assert default_database({"XDG_DATA_HOME": "/d"}) == Path("/d/chatserve/tenants.sqlite")
    assert default_database({}).parts[-4:] == (".local", "share", "chatserve", "tenants.sqlite")


@pytest.mark.asyncio
async def test_a_servers_database_is_the_one_it_is_told_or_the_one_that_is_there(tmp_path: Path) -> None:
    """Without any, no state is made behind the operator's back; a server finds what the command line made."""
    environ = {"CHATSERVE_HOME": str(tmp_path / "home")}
    registry = open_tenants(Config(), environ)
    assert not registry.keys_required
    await registry.close()
    assert not (tmp_path / "home").exists()
    store = TenantStore(default_database(environ))
    store.create_tenant(Tenant(name="acme"))
    store.close()
    registry = open_tenants(Config(), environ)
    assert [tenant.name for tenant in registry.tenants()] == ["acme"]
    await registry.close()
    other = Config(tenancy=TenancyConfig(database=str(tmp_path / "other.sqlite")))
    registry = open_tenants(other, environ)
    assert registry.tenants() == []
    await registry.close()
    assert (tmp_path / "other.sqlite").exists()
