"""A tenant's limits at the edge; a real socket over a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from websockets.exceptions import InvalidStatus

from chatserve.tenancy.declared import Declared
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant
from tests.fakes import FakeEngineClient, Script, ids, say
from tests.server.house import House
from tests.server.live import Reply, live_server
from tests.server.ws_client import ws_client
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio


async def test_headers_tell_what_is_left(house: House) -> None:
    """Streamed or not, admitted or refused; tenants without limits get none of them."""
    house.live.engine.script = say("Hello!")
    await house.limit("acme", requests_per_minute=2, tokens_per_minute=10_000)
    first, second = await house.chat("acme"), await house.chat("acme", stream=True)
    third = await house.chat("acme")
    assert [r.status for r in (first, second, third)] == [200, 200, 429]
    for reply, left in ((first, "1"), (second, "0"), (third, "0")):
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert reply.headers["x-ratelimit-remaining-requests"] == left
        assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
        assert reply.headers["x-ratelimit-limit-tokens"] == "10000"
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) < 10_000
    assert third.error["code"] == "rate_limit_exceeded"
    assert third.error["type"] == "rate_limit_error"
    assert 0 < int(third.headers["retry-after-ms"]) <= 30_000
    assert int(third.headers["retry-after"]) * 1000 >= int(third.headers["retry-after-ms"])
    assert not any(name.startswith("x-ratelimit") for name in (await house.chat("beta")).headers)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", b'{"prompt": "hi"}'),
        ("POST", "/detokenize", b'{"tokens": [5]}'),
        ("POST", "/v1/cache/explain", b'{"prompt": "hi"}'),
        ("DELETE", "/v1/cache", b""),
    ],
)
async def test_work_without_an_answer_counts_as_a_request(house: House, method: str, path: str, body: bytes) -> None:
    """Nobody keeps the server busy beside the limit; what is refused does nothing, and others are served."""
    await house.limit("acme", requests_per_minute=2)
    assert (await house.chat("acme")).status == 200

    async def send(tenant: str) -> Reply:
        return await house.live.request(method, path, body, {"Authorization": f"Bearer {house.keys[tenant]}"})

    allowed, refused = await send("acme"), await send("acme")
    assert (allowed.status, allowed.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert "retry-after" in refused.headers
    assert house.usage("acme").requests_rejected == 1
    assert house.live.engine.purged == ["acme"] * (path == "/v1/cache")
    assert (await send("beta")).status == 200
    assert (await house.chat("acme")).error["code"] == "rate_limit_exceeded"


async def test_each_limit_has_its_word(house: House) -> None:
    """Codes of all four kinds; those that waiting cannot help are not to be retried."""
    for limits, fields, code, retry in (
        ({"tokens_per_minute": 50}, {"max_tokens": 60}, "rate_limit_exceeded", False),
        ({"tokens_per_day": 50}, {"max_tokens": 60}, "insufficient_quota", False),
    ):
        await house.limit("acme", **limits)
        reply = await house.chat("acme", **fields)
        assert (reply.status, reply.error["code"]) == (429, code)
        assert ("retry-after" in reply.headers) == retry
        assert reply.headers.get("x-should-retry") == (None if retry else "false")
    house.live.engine.script = held = say("Hello!", delay=0.005, hang=True)
    await house.limit("acme", max_concurrent=2)
    busy = [asyncio.create_task(house.chat("acme")) for _ in range(2)]
    await eventually(lambda: house.registry.account("acme").num_open == 2)
    refused = await house.chat("acme")
    assert (refused.status, refused.error["code"]) == (429, "concurrency_limit")
    assert "x-should-retry" not in refused.headers
    held.hang = False
    assert (await house.chat("beta")).status == 200
    assert [reply.status for reply in await asyncio.gather(*busy)] == [200, 200]
    assert (await house.chat("acme")).status == 200


async def test_queue_length_counts_waiting_requests_only(house: House) -> None:
    """A tenant with a full queue of its own is refused while others are queued; started requests do not count."""
    house.live.engine.script = lambda submission, _: say("Hello!", start_delay=3600.0 * (submission.tenant == "acme"))
    await house.limit("acme", max_queued=2)
    waiting = [asyncio.create_task(house.chat("acme")) for _ in range(2)]
    await eventually(lambda: house.registry.account("acme").num_waiting == 2)
    refused = await house.chat("acme")
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert (await house.chat("beta")).status == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await eventually(lambda: house.registry.account("acme").num_open == 0)
    house.live.engine.script = Script(ids("a"), hang=True)
    running = []
    for number in range(1, 5):
        running.append(asyncio.create_task(house.chat("acme")))
        await eventually(lambda number=number: house.registry.account("acme").num_open == number)  # type: ignore[misc]
        await eventually(lambda: house.registry.account("acme").num_waiting == 0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await eventually(lambda: house.registry.account("acme").num_open == 0)
    house.live.engine.script = held = say("Hello!", delay=0.005, hang=True)
    bearer = f"Bearer {house.keys['acme']}"
    batch = asyncio.create_task(house.live.post("/v1/completions", {"prompt": ["a", "b"]}, Authorization=bearer))
    # The second prompt's stream is read after the first one's end; it has left the queue all the same.
    await eventually(lambda: house.registry.account("acme").num_open == 2)
    await eventually(lambda: house.registry.account("acme").num_waiting == 0)
    held.hang = False
    assert (await batch).status == 200


async def test_a_full_queue_is_full_for_whoever_filled_it(tiny_folder: Path) -> None:
    """One tenant without a limit of its own fills the server's queue: it is refused, others get their equal part, and
    all of them together never more than twice the queue.
    """
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=Declared())
    names = ("acme", "beta", "gamma", *(f"t{number}" for number in range(12)))
    keys = {}
    for name in names:
        await registry.create_tenant(Tenant(name=name))
        keys[name] = (await registry.new_key(name)).text
    engine = FakeEngineClient(say("Hello!"), max_running=0)
    async with live_server(tiny_folder, engine, tenants=registry, max_queued=8) as live:
        house = House(live, registry, keys)
        waiting: list[asyncio.Task[Reply]] = []

        async def send(tenant: str, count: int) -> int:
            """How many of so many requests are let in."""
            before = registry.account(tenant).num_waiting
            tasks = [asyncio.create_task(house.chat(tenant)) for _ in range(count)]
            waiting.extend(tasks)
            await eventually(
                lambda: sum(t.done() for t in tasks) + registry.account(tenant).num_waiting - before == count
            )
            refused = [task.result() for task in tasks if task.done()]
            assert {(r.status, r.error["code"]) for r in refused} <= {(429, "queue_full")}
            return count - len(refused)

        assert await send("acme", 20) == 8
        assert await send("beta", 20) == 4
        assert await send("acme", 1) == 0
        assert await send("gamma", 20) == 2
        assert sum([await send(name, 5) for name in names[3:]]) == 2
        assert engine.num_waiting == 16
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await eventually(lambda: all(registry.account(name).num_waiting == 0 for name in names))


async def test_keys_of_a_tenant_share_its_limits(house: House) -> None:
    """Many keys make nobody many."""
    await house.limit("acme", requests_per_minute=5, max_concurrent=3)
    for number in range(4):
        house.keys[f"acme {number}"] = (await house.registry.new_key("acme")).text
    house.live.engine.script = held = say("Hello!", delay=0.005, hang=True)
    tasks = [asyncio.create_task(house.chat(name)) for name in house.keys if name.startswith("acme")]
    await eventually(lambda: sum(task.done() for task in tasks) == 2)
    held.hang = False
    assert sorted(reply.status for reply in await asyncio.gather(*tasks)) == [200, 200, 200, 429, 429]
    assert [(await house.chat(f"acme {number}")).status for number in range(4)] == [200, 200, 429, 429]


async def test_tokens_are_settled_to_what_was_used(house: House) -> None:
    """A reservation of a whole minute is given back at the end but for the tokens used, failed requests included."""
    await house.limit("acme", tokens_per_minute=500)
    house.live.engine.script = say("Hi")
    first = await house.chat("acme", max_tokens=400)
    assert first.status == 200
    used = first.json["usage"]["total_tokens"]
    account, limits = house.registry.account("acme"), house.registry.tenant("acme").limits
    assert account.reserved == 0
    meter = account.status(limits, 1000.0).tokens  # the house's time
    assert meter is not None
    assert meter.remaining == 500 - used
    house.live.engine.script = Script(ids("abc"), reason="error", error_code="internal_error")
    assert (await house.chat("acme", max_tokens=300)).status == 500
    assert (account.num_open, account.num_waiting, account.reserved) == (0, 0, 0)
    assert (await house.chat("acme", max_tokens=400)).status in (429, 500)


async def test_a_batch_of_prompts_is_admitted_whole_or_not_at_all(house: House) -> None:
    """Three prompts over a limit of two start none; nothing stays reserved."""
    await house.limit("acme", max_concurrent=2)
    bearer = f"Bearer {house.keys['acme']}"
    reply = await house.live.post("/v1/completions", {"prompt": ["a", "b", "c"]}, Authorization=bearer)
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (429, "concurrency_limit", "false")
    assert house.live.engine.submissions == []
    assert (await house.live.post("/v1/completions", {"prompt": ["a", "b"]}, Authorization=bearer)).status == 200
    account = house.registry.account("acme")
    assert (account.num_open, account.num_waiting, account.reserved) == (0, 0, 0)


async def test_a_flood_of_refusals_costs_others_nothing(house: House) -> None:
    """Refused requests reach no engine and use nothing of another's; the refused tenant alone is charged for them."""
    await house.limit("acme", requests_per_minute=1)
    replies = await asyncio.gather(*(house.chat("acme") for _ in range(100)), house.chat("beta"))
    assert sorted(reply.status for reply in replies[:-1]) == [200] + [429] * 99
    assert replies[-1].status == 200
    assert len(house.live.engine.submissions) == 2
    assert house.usage("acme").requests_rejected == 99
    assert house.usage("beta").requests_rejected == 0


async def test_official_client_understands_the_refusals(house: House) -> None:
    """It waits and retries where that helps, and gives up at once where it does not."""
    await house.limit("acme", tokens_per_day=30)
    async with openai.AsyncOpenAI(base_url=f"{house.live.url}/v1", api_key=house.keys["acme"], max_retries=2) as client:
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=messages, max_tokens=99)  # type: ignore[arg-type]
        assert caught.value.code == "insufficient_quota"
        assert house.usage("acme").requests_rejected == 1  # it was not asked again
        await house.limit("acme", requests_per_minute=120)
        house.registry._accounts.clear()
        rejected = house.usage("acme").requests_rejected
        # A minute passes with each refusal, so that the first try is refused and the second is not.
        house.registry._monotonic = lambda: 1000.0 + 60 * (house.usage("acme").requests_rejected - rejected)
        for _ in range(120):
            house.registry.admit("acme", [0])[0].settle(0)
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "Hello!"
        assert house.usage("acme").requests_rejected == rejected + 1


async def test_limits_hold_on_the_websocket(house: House) -> None:
    """The same words as over HTTP, for the command that asked; the socket lives on."""
    await house.limit("acme", requests_per_minute=1, max_connections=1)
    headers = {"Authorization": f"Bearer {house.keys['acme']}"}
    async with ws_client(house.live, additional_headers=headers) as client:
        await client.ask("hi")
        refused = await client.reply(await client.send("chat.send", content="again"))
        assert refused["error"]["code"] == "rate_limit_exceeded"
        assert 0 < refused["error"]["retry_after_ms"] <= 60_000
        assert (await client.reply(await client.send("ping")))["type"] == "pong"
        with pytest.raises(InvalidStatus) as second:
            async with ws_client(house.live, hello=False, additional_headers=headers):
                pass
        assert second.value.response.status_code == 429
        async with ws_client(house.live, additional_headers={"Authorization": f"Bearer {house.keys['beta']}"}):
            pass
    async with ws_client(house.live, additional_headers=headers):
        pass
