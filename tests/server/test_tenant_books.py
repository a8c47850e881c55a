"""What a tenant is charged equals what happened, whatever fails; a real socket over a scripted engine."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import pytest

from chatserve.tenancy.usage import Usage
from tests.fakes import Script, ids, say
from tests.server.house import House
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio


async def test_books_equal_what_clients_saw(house: House) -> None:
    """Random traffic of two tenants with aborts, failures and refusals: at rest, every sum equals a ledger kept by
    the clients and what the engine was asked; `/v1/usage`, `/admin/usage` and `/metrics` say the same.
    """
    rng = random.Random(11)
    engine, want = house.live.engine, {"acme": Usage(), "beta": Usage()}

    async def one(tenant: str, kind: str) -> None:
        fields: dict[str, object] = {"max_tokens": rng.randrange(1, 12), "n": rng.randrange(1, 3)}
        mine = want[tenant]
        if kind == "refused":
            reply = await house.chat(tenant, max_tokens=900, n=9)
            assert reply.status == 429
            mine.requests_rejected += 1
            return
        engine.script = Script(
            ids("hello there"), reason="error" if kind == "failed" else "stop", cached_tokens=3, error_code="x"
        )
        if kind == "failed":
            fields["max_tokens"] = 64
        number = len(engine.submissions)
        reply = await house.chat(tenant, **fields)
        submission = engine.submissions[number]
        mine.prompt_tokens += len(submission.prompt)
        mine.cached_tokens += 3
        mine.computed_tokens += len(submission.prompt) - 3
        mine.generated_tokens += submission.num_sent
        if kind == "failed":
            assert reply.status == 500
            mine.requests_failed += 1
            mine.delivered_tokens += submission.num_sent
        else:
            mine.requests_completed += 1
            mine.delivered_tokens += reply.json["usage"]["completion_tokens"]

    for tenant in ("acme", "beta"):
        await house.limit(tenant, tokens_per_minute=5000)
    for _ in range(60):
        await one(rng.choice(["acme", "beta"]), rng.choice(["refused", "failed", "done", "done", "done"]))
        house.registry._accounts.clear()  # the limits are not what is tested here
    for tenant, mine in want.items():
        seen = house.usage(tenant)
        assert seen.queue_seconds >= 0
        assert seen.run_seconds > 0
        assert msgspec.structs.replace(seen, queue_seconds=0.0, run_seconds=0.0) == mine
        own = await house.live.get("/v1/usage", Authorization=f"Bearer {house.keys[tenant]}")
        assert msgspec.convert(own.json["total"], Usage) == seen
        assert own.json["tenant"] == tenant
        assert {row["tenant"] for row in own.json["data"]} == {tenant}
        admin = await house.admin("GET", f"/admin/usage?tenant={tenant}")
        assert msgspec.convert(admin.json["total"], Usage) == seen
        metrics = (await house.admin("GET", "/metrics")).body.decode()
        for kind in ("prompt", "cached", "computed", "generated", "delivered"):
            line = f'chatserve:tenant_tokens_total{{kind="{kind}",tenant="{tenant}"}} {getattr(seen, f"{kind}_tokens")}'
            assert f"{line}.0" in metrics, line


async def test_a_client_that_leaves_is_charged_for_what_it_got(house: House) -> None:
    """Hanging up mid-answer books a cancelled request with the tokens so far; in the queue, time and nothing else."""
    house.live.engine.script = Script(ids("abcdefgh" * 30), delay=0.005)
    task = asyncio.create_task(house.chat("acme", stream=True, max_tokens=200))
    await eventually(lambda: bool(house.live.engine.submissions) and house.live.engine.submissions[0].num_sent > 5)
    task.cancel()
    await eventually(lambda: house.usage("acme").requests_cancelled == 1)
    assert 0 < house.usage("acme").delivered_tokens <= house.usage("acme").generated_tokens
    assert house.usage("acme").generated_tokens == house.live.engine.submissions[0].num_sent
    house.live.engine.script = say("x", start_delay=3600.0)
    task = asyncio.create_task(house.chat("beta"))
    await eventually(lambda: house.registry.account("beta").num_open == 1)
    task.cancel()
    await eventually(lambda: house.usage("beta").requests_cancelled == 1)
    seen = house.usage("beta")
    assert seen.queue_seconds > 0
    assert msgspec.structs.replace(seen, queue_seconds=0.0) == Usage(requests_cancelled=1)


async def test_an_engine_that_dies_takes_no_count_with_it(house: House) -> None:
    """What was counted before its death stays booked, once; the next engine counts from zero on top of it."""
    house.live.engine.script = Script(ids("abcdefgh" * 30), delay=0.005)
    for _ in range(2):
        number = len(house.live.engine.submissions)
        task = asyncio.create_task(house.chat("acme", max_tokens=200))
        await eventually(
            lambda number=number: (
                len(house.live.engine.submissions) > number  # type: ignore[misc]
                and house.live.engine.submissions[number].num_sent > 5
            )
        )
        house.live.engine.die(ready_again=True)
        assert (await task).status == 503
    seen, sent = house.usage("acme"), house.live.engine.submissions
    assert seen.generated_tokens == sum(submission.num_sent for submission in sent)
    assert seen.prompt_tokens == sum(len(submission.prompt) for submission in sent)
    assert seen.requests_failed == 2


async def test_an_engine_that_was_only_slow_is_not_booked_twice(house: House) -> None:
    """It is suspected, not ready for a moment, and goes on with the same counters: every token is in the books once."""
    engine = house.live.engine
    engine.count("acme", prompt=70, cached=20, generated=30, blocks=3)
    for generated in (5, 7):
        engine.set_ready(False)
        await asyncio.sleep(0.02)
        engine.set_ready(True)
        engine.count("acme", generated=generated)
    seen = house.usage("acme")
    assert (seen.prompt_tokens, seen.cached_tokens, seen.computed_tokens, seen.generated_tokens) == (70, 20, 50, 42)
    engine.die(ready_again=True)
    engine.count("acme", generated=1)
    assert house.usage("acme").generated_tokens == 43


async def test_blocks_are_charged_by_the_second(house: House) -> None:
    """Held blocks count while they are held, also when nothing else happens; a dead engine holds none."""
    engine = house.live.engine
    begin = time.monotonic()
    engine.count("acme", blocks=10)
    await asyncio.sleep(0.1)
    await house.registry.ledger.flush()
    held, first = time.monotonic() - begin, house.usage("acme").device_block_seconds
    assert 10 * 0.1 <= first <= 10 * held
    engine.die(ready_again=True)
    at_death = house.usage("acme").device_block_seconds
    await asyncio.sleep(0.1)
    await house.registry.ledger.flush()
    assert first <= at_death == house.usage("acme").device_block_seconds
    assert house.usage("acme").host_block_seconds == 0


async def test_the_engine_learns_weights_and_shares(house: House) -> None:
    """What differs from the usual is told at once and when it changes; a deleted tenant's cache is forgotten."""
    engine = house.live.engine
    assert engine.tenants == {}
    await house.admin("PATCH", "/admin/tenants/acme", {"weight": 2, "limits": {"kv_floor": 0.1, "kv_cap": 0.5}})
    assert engine.tenants == {"acme": (2.0, 0.1, 0.5)}
    engine.tenants.clear()
    await house.admin("PATCH", "/admin/tenants/beta", {"display_name": "B"})
    assert engine.tenants == {}
    assert (await house.chat("acme")).status == 200
    assert engine.submissions[0].tenant == "acme"
    await house.admin("DELETE", "/admin/tenants/acme")
    assert engine.tenants == {"acme": (1.0, 0.0, 1.0)}
    await eventually(lambda: engine.purged == ["acme"])


async def test_usage_queries_are_checked(house: House) -> None:
    """A day that is none is a 400 with its name; nobody reads another's usage by asking for it."""
    await house.chat("beta")
    bearer = f"Bearer {house.keys['acme']}"
    for query in ("from=yesterday", "to=2026-13-01", "from=2026-1-1", "to="):
        reply = await house.live.get(f"/v1/usage?{query}", Authorization=bearer)
        assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])
    reply = await house.live.get("/v1/usage?tenant=beta&from=2000-01-01&to=2999-12-31", Authorization=bearer)
    assert reply.json["data"] == []
    assert reply.json["total"]["prompt_tokens"] == 0
