"""Tenants at the edge: limits, revocation, books, administration; a real socket over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import openai
import pytest
import pytest_asyncio
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chatserve.server.app import create_app
from chatserve.server.middleware import OPEN_PATHS
from chatserve.tenancy.declared import Declared, declared_keys
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant, TenantLimits
from chatserve.tenancy.usage import Usage
from tests.fakes import FakeEngineClient, Script, ids, say
from tests.server.live import HI, LiveServer, Reply, live_server
from tests.server.ws_client import ws_client

pytestmark = pytest.mark.asyncio

ADMIN = "admin-key"


class House:
    """A server with the tenants acme and beta, a key of each, and an admin key."""

    def __init__(self, live: LiveServer, registry: TenantRegistry, keys: dict[str, str]) -> None:
        self.live = live
        self.registry = registry
        self.keys = keys

    async def limit(self, tenant: str, **limits: object) -> None:
        await self.registry.update_tenant(tenant, {"limits": TenantLimits(**limits)})  # type: ignore[arg-type]

    async def chat(self, tenant: str, /, **fields: object) -> Reply:
        body = {"model": "tiny", "messages": HI, "max_tokens": 8, **fields}
        return await self.live.post("/v1/chat/completions", body, Authorization=f"Bearer {self.keys[tenant]}")

    async def admin(self, method: str, path: str, body: object = None) -> Reply:
        content = b"" if body is None else json.dumps(body).encode()
        return await self.live.request(method, path, content, {"Authorization": f"Bearer {ADMIN}"})

    def usage(self, tenant: str) -> Usage:
        return self.registry.ledger.totals().get(tenant, Usage())


@pytest_asyncio.fixture
async def house(tiny_folder: Path) -> AsyncIterator[House]:
    """Everything in memory."""
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=Declared())
    keys = {}
    for name in ("acme", "beta"):
        await registry.create_tenant(Tenant(name=name))
        keys[name] = (await registry.new_key(name)).text
    async with live_server(tiny_folder, FakeEngineClient(), tenants=registry, admin_key=ADMIN) as live:
        yield House(live, registry, keys)


async def eventually(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    """Wait for something that has to happen by itself."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition belongs to the server
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------------------------------------- who gets in


async def test_no_route_opens_to_the_wrong_key(house: House) -> None:
    """Walk the table: without a key, with a forged, expired, revoked or disabled one, or the other kind, each path
    answers 401, WebSocket included; only the short list is open.
    """
    registry, live = house.registry, house.live
    await registry.create_tenant(Tenant(name="off", disabled=True))
    off = (await registry.new_key("off")).text
    expired = (await registry.new_key("acme", expires=1.0)).text
    revoked = await registry.new_key("acme")
    await registry.revoke_key(revoked.record.id)
    forged = house.keys["acme"][:-9] + "_00000000"
    bad = [None, "", "x", forged, off, expired, revoked.text]
    app = create_app(live.context)
    files = {route.path for route in app.routes if getattr(route, "name", "") == "file"}
    walked = 0
    for route in app.routes:
        path = route.path.replace("{name}", "acme").replace("{key_id}", "x")  # type: ignore[attr-defined]
        if path in OPEN_PATHS | files:
            continue
        # The other kind: a tenant's key opens nothing of the operator's, nor the admin key what is a tenant's.
        other = house.keys["acme"] if path.startswith("/admin/") else None if path == "/metrics" else ADMIN
        for method in sorted(getattr(route, "methods", None) or {"GET"}):
            live.address = f"127.1.{walked // 250}.{walked % 250 + 1}"  # more wrong keys than one address may send
            for key in [*bad, other]:
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                reply = await live.request(method, path, headers=headers)
                assert reply.status == 401, (method, path, key)
                walked += 1
    assert walked > 100
    for key in bad:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        with pytest.raises(InvalidStatus) as refused:
            async with ws_client(live, hello=False, additional_headers=headers):
                pass
        assert refused.value.response.status_code == 401
    assert house.live.engine.submissions == []


async def test_admin_routes_do_not_exist_without_an_admin_key(tiny_folder: Path) -> None:
    """Nothing to guess: with a good key there is nothing, without one there is 401."""
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=declared_keys(["k"]))
    async with live_server(tiny_folder, FakeEngineClient(), tenants=registry) as live:
        assert not [r for r in create_app(live.context).routes if r.path.startswith("/admin")]  # type: ignore[attr-defined]
        for path in ("/admin/tenants", "/admin/keys", "/admin/usage", "/admin/"):
            assert (await live.get(path)).status == 401
            assert (await live.get(path, Authorization="Bearer k")).status == 401
    async with live_server(tiny_folder, FakeEngineClient(), admin_key=ADMIN) as open_server:
        assert (await open_server.get("/v1/models")).status == 200
        assert (await open_server.get("/admin/tenants")).status == 401
        assert (await open_server.get("/admin/tenants", Authorization=f"Bearer {ADMIN}")).json["data"] == []
        for path in ("//admin/tenants", "/admin//tenants", "/Admin/tenants", "/x/../admin/tenants", "/admin/tenants/"):
            assert (await open_server.get(path)).status in (400, 401, 404)


async def test_metrics_are_the_operators(house: House, tiny_folder: Path) -> None:
    """They tell what every tenant sends, token by token, so no tenant reads them; the admin key does, and a key of the
    default tenant, which is the operator's own.
    """
    await house.chat("beta")
    reply = await house.live.get("/metrics", Authorization=f"Bearer {house.keys['acme']}")
    assert (reply.status, reply.error["code"]) == (403, "operator_only")
    assert "beta" not in reply.body.decode()
    assert 'tenant="beta"' in (await house.admin("GET", "/metrics")).body.decode()
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=declared_keys(["k"]))
    await registry.create_tenant(Tenant(name="acme"))
    key = (await registry.new_key("acme")).text
    async with live_server(tiny_folder, FakeEngineClient(), tenants=registry) as live:
        assert (await live.get("/metrics", Authorization="Bearer k")).status == 200
        assert (await live.get("/metrics", Authorization=f"Bearer {key}")).status == 403
        assert (await live.get("/metrics")).status == 401


async def test_scopes_come_from_the_tenant_alone(house: House) -> None:
    """Public, then its groups', last its own; whatever a client sends only narrows the last one."""
    await house.registry.update_tenant("acme", {"groups": ("staff", "beta-testers")})
    odd = {"cache_salt": "beta", "user": "beta", "prompt_cache_key": "beta", "tenant": "beta"}
    await house.chat("acme")
    await house.chat("acme", **odd)
    await house.chat("beta")
    seen = [[(s.kind, s.owner, s.salt) for s in sub.scopes] for sub in house.live.engine.submissions]
    shared = [("public", "", ""), ("group", "staff", ""), ("group", "beta-testers", "")]
    assert seen[0] == [*shared, ("tenant", "acme", "")]
    assert seen[1] == [*shared, ("tenant", "acme", "beta")]
    assert seen[2] == [("public", "", ""), ("tenant", "beta", "")]


async def test_class_comes_from_the_tenant_and_is_only_lowered(house: House) -> None:
    """`service_tier: flex` goes one class down, never below the last; nothing a client sends goes up."""
    await house.registry.update_tenant("acme", {"priority_class": 2})
    await house.registry.update_tenant("beta", {"priority_class": 7})
    for tenant, fields in (
        ("acme", {}),
        ("acme", {"service_tier": "priority", "priority": -5}),
        ("acme", {"service_tier": "flex"}),
        ("beta", {"service_tier": "flex"}),
    ):
        assert (await house.chat(tenant, **fields)).status == 200
    assert [s.priority_class for s in house.live.engine.submissions] == [2, 2, 3, 7]
    assert house.live.engine.submissions[1].priority == -5


# ------------------------------------------------------------------------------------------------------- limits


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
    house.live.engine.script = say("Hello!", delay=0.05)
    await house.limit("acme", max_concurrent=2)
    busy = [asyncio.create_task(house.chat("acme")) for _ in range(2)]
    await eventually(lambda: house.registry.account("acme").num_open == 2)
    refused = await house.chat("acme")
    assert (refused.status, refused.error["code"]) == (429, "concurrency_limit")
    assert "x-should-retry" not in refused.headers
    assert (await house.chat("beta")).status == 200
    assert [reply.status for reply in await asyncio.gather(*busy)] == [200, 200]
    assert (await house.chat("acme")).status == 200


async def test_queue_length_counts_waiting_requests_only(house: House) -> None:
    """A tenant with a full queue of its own is refused while others are queued; started requests do not count."""
    house.live.engine.script = say("Hello!", start_delay=0.3)
    await house.limit("acme", max_queued=2)
    waiting = [asyncio.create_task(house.chat("acme")) for _ in range(2)]
    await eventually(lambda: house.registry.account("acme").num_waiting == 2)
    refused = await house.chat("acme")
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert (await house.chat("beta")).status == 200
    await asyncio.gather(*waiting)
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
    house.live.engine.script = say("Hello!", delay=0.05)
    bearer = f"Bearer {house.keys['acme']}"
    batch = asyncio.create_task(house.live.post("/v1/completions", {"prompt": ["a", "b"]}, Authorization=bearer))
    # The second prompt's stream is read after the first one's end; it has left the queue all the same.
    await eventually(lambda: house.registry.account("acme").num_open == 2)
    await eventually(lambda: house.registry.account("acme").num_waiting == 0, 0.2)
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
    house.live.engine.script = say("Hello!", delay=0.05)
    replies = await asyncio.gather(*(house.chat(name) for name in house.keys if name.startswith("acme")))
    assert sorted(reply.status for reply in replies) == [200, 200, 200, 429, 429]
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
    meter = account.status(limits, asyncio.get_running_loop().time()).tokens
    assert meter is not None
    assert 500 - used <= meter.remaining <= 500 - used + 20
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
        for _ in range(120):
            house.registry.admit("acme", [0])[0].settle(0)
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "Hello!"
        assert house.usage("acme").requests_rejected >= 2


# --------------------------------------------------------------------------------------------------- revocation


async def test_revoking_a_key_ends_its_running_streams_only(house: House) -> None:
    """Within the same moment: an error event with the code, the engine is freed, other keys' streams go on."""
    house.live.engine.script = Script(ids("abcdefgh" * 30), delay=0.01)
    second = await house.registry.new_key("acme")
    mine = asyncio.create_task(house.chat("acme", stream=True, max_tokens=200))
    other = asyncio.create_task(
        house.live.post(
            "/v1/chat/completions",
            {"messages": HI, "max_tokens": 40, "stream": True},
            Authorization=f"Bearer {second.text}",
        )
    )
    await eventually(lambda: sum(s.num_sent > 3 for s in house.live.engine.submissions) == 2)
    key_id = house.keys["acme"][3:15]
    assert (await house.admin("DELETE", f"/admin/keys/{key_id}")).status == 204
    cut = await mine
    assert json.loads(cut.events[-1])["error"]["code"] == "key_revoked"
    assert "[DONE]" not in cut.events
    assert sum(s.aborted for s in house.live.engine.submissions) == 1
    assert (await other).events[-1] == "[DONE]"
    assert (await house.chat("acme")).error["code"] == "key_revoked"
    assert house.usage("acme").requests_failed == 1


async def test_revocation_before_the_first_byte_is_401(house: House) -> None:
    """A request that waits in the queue when its key goes is refused as such, and frees its place."""
    house.live.engine.script = say("Hello!", start_delay=5.0)
    waiting = asyncio.create_task(house.chat("acme"))
    await eventually(lambda: house.registry.account("acme").num_open == 1)
    await house.registry.update_tenant("acme", {"disabled": True})
    reply = await waiting
    assert (reply.status, reply.error["code"]) == (401, "key_revoked")
    account = house.registry.account("acme")
    assert (account.num_open, account.num_waiting, account.reserved) == (0, 0, 0)


async def test_revocation_closes_sockets(house: House) -> None:
    """The running answer fails, the socket says why and closes with 4401; sockets of other keys stay."""
    house.live.engine.script = Script(ids("abcdefgh" * 30), delay=0.01)
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in house.keys.items()}
    async with (
        ws_client(house.live, additional_headers=headers["acme"]) as mine,
        ws_client(house.live, additional_headers=headers["beta"]) as other,
    ):
        ack = await mine.reply(await mine.send("chat.send", content="hi"))
        gen = ack["gens"][0]["gen"]
        while gen not in mine.texts:
            await mine.receive()
        await house.registry.revoke_key(house.keys["acme"][3:15])
        with pytest.raises(ConnectionClosed) as closed:
            await mine.until("never")
        codes = [message["error"]["code"] for message in mine.messages if message["type"] == "error"]
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4401, "key_revoked")
        assert codes == ["key_revoked"]
        assert mine.ends[gen]["error"]["code"] == "key_revoked"
        assert (await other.reply(await other.send("ping")))["type"] == "pong"
    assert house.live.engine.submissions[0].aborted


async def test_a_key_that_expires_ends_streams_and_sockets(house: House) -> None:
    """Within a second of its time: the event stream gets the code, the socket's answer fails and it closes with 4401;
    another key of the same tenant goes on.
    """
    house.live.engine.script = Script(ids("abcdefgh" * 60), delay=0.01)
    house.keys["soon"] = (await house.registry.new_key("acme", expires=time.time() + 1.0)).text
    stream = asyncio.create_task(house.chat("soon", stream=True, max_tokens=400))
    other = asyncio.create_task(house.chat("acme", stream=True, max_tokens=200))
    async with ws_client(house.live, additional_headers={"Authorization": f"Bearer {house.keys['soon']}"}) as client:
        ack = await client.reply(await client.send("chat.send", content="hi"))
        with pytest.raises(ConnectionClosed) as closed:
            await client.until("never")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
        assert client.ends[ack["gens"][0]["gen"]]["error"]["code"] == "key_revoked"
    cut = await stream
    assert json.loads(cut.events[-1])["error"]["code"] == "key_revoked"
    assert len(cut.events) > 10
    assert (await other).events[-1] == "[DONE]"
    refused = await house.chat("soon")
    assert (refused.status, refused.error["code"]) == (401, "key_expired")


async def test_page_sessions_end_with_their_key(house: House) -> None:
    """A cookie is worth no more than the key it was exchanged for."""
    reply = await house.live.post("/ui/login", {"key": house.keys["acme"]})
    cookie = reply.headers["set-cookie"].split(";")[0]
    assert (await house.live.get("/v1/usage", Cookie=cookie)).json["tenant"] == "acme"
    await house.registry.revoke_key(house.keys["acme"][3:15])
    assert (await house.live.get("/v1/usage", Cookie=cookie)).error["code"] == "key_revoked"


# ------------------------------------------------------------------------------------------------------ sockets


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


async def test_conversations_are_their_tenants(house: House) -> None:
    """Another tenant's conversation and running answer are not found, whatever id is guessed."""
    house.live.engine.script = Script(ids("abc" * 50), delay=0.01)
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in house.keys.items()}
    async with (
        ws_client(house.live, additional_headers=headers["acme"]) as mine,
        ws_client(house.live, additional_headers=headers["beta"]) as other,
    ):
        ack = await mine.reply(await mine.send("chat.send", content="secret"))
        foreign = await other.reply(await other.send("chat.send", content="go on", conv=ack["conv"]))
        assert foreign["error"]["code"] == "not_found"
        stop = await other.reply(await other.send("gen.cancel", gen=ack["gens"][0]["gen"]))
        assert stop["error"]["code"] == "not_found"
        same_id = "the-same-id"
        await mine.send("chat.send", id=same_id, content="a")
        theirs = await other.reply(await other.send("chat.send", id=same_id, content="b"))
        assert theirs["type"] == "ack"
        assert theirs["conv"] != ack["conv"]


# ------------------------------------------------------------------------------------------------ books, metrics


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
        assert all(row["tenant"] == tenant for row in own.json["data"])
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
    house.live.engine.script = say("x", start_delay=5.0)
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


# ----------------------------------------------------------------------------------------------- administration


async def test_administration_from_nothing_to_an_answer(house: House) -> None:
    """Create, give a key, use it, change, revoke, delete: every step by HTTP, effective with its reply."""
    made = await house.admin("POST", "/admin/tenants", {"name": "new", "limits": {"max_concurrent": 3}, "weight": 2})
    assert made.status == 201
    assert made.json["limits"]["max_concurrent"] == 3
    assert (await house.admin("POST", "/admin/tenants", {"name": "new"})).status == 409
    key = await house.admin("POST", "/admin/keys", {"tenant": "new", "label": "l", "expires_in": 60})
    assert key.status == 201
    assert key.headers["cache-control"] == "no-store"
    house.keys["new"] = key.json["key"]
    assert (await house.chat("new")).status == 200
    listed = await house.admin("GET", "/admin/keys?tenant=new")
    assert [k["id"] for k in listed.json["data"]] == [key.json["id"]]
    assert key.json["key"] not in listed.body.decode()
    changed = await house.admin("PATCH", "/admin/tenants/new", {"limits": {"requests_per_minute": 1}})
    assert (changed.json["limits"]["max_concurrent"], changed.json["limits"]["requests_per_minute"]) == (3, 1)
    assert [(await house.chat("new")).status for _ in range(2)] == [200, 429]
    lifted = await house.admin("PATCH", "/admin/tenants/new", {"limits": {"requests_per_minute": None}})
    assert lifted.json["limits"]["requests_per_minute"] is None
    assert (await house.chat("new")).status == 200
    assert (await house.admin("GET", "/admin/tenants/new")).json["weight"] == 2
    assert (await house.admin("DELETE", "/admin/tenants/new")).status == 204
    assert (await house.chat("new")).status == 401
    assert (await house.admin("GET", "/admin/tenants/new")).status == 404
    names = [tenant["name"] for tenant in (await house.admin("GET", "/admin/tenants")).json["data"]]
    assert names == ["acme", "beta"]
    assert (await house.admin("GET", "/admin/usage?tenant=new")).json["total"]["requests_completed"] == 3


async def test_administration_refuses_by_name(house: House) -> None:
    """A misspelt or wrong field is a 4xx that changes nothing, never a silent no-limit and never a 500."""
    for method, path, body, status in (
        ("POST", "/admin/tenants", {"name": "x", "limits": {"rpm": 1}}, 400),
        ("POST", "/admin/tenants", {"name": "X"}, 400),
        ("POST", "/admin/tenants", {"name": "x", "weight": 0}, 400),
        ("POST", "/admin/tenants", {"name": "x", "limits": {"kv_floor": 0.9, "kv_cap": 0.1}}, 400),
        ("POST", "/admin/tenants", {"name": "x", "priority_class": 10**30}, 400),
        ("POST", "/admin/tenants", {"name": "x", "groups": ["a"] * 40}, 400),
        ("POST", "/admin/tenants", [], 400),
        ("PATCH", "/admin/tenants/acme", {"name": "beta"}, 400),
        ("PATCH", "/admin/tenants/acme", {"limits": {"max_queued": 0}}, 400),
        ("PATCH", "/admin/tenants/acme", {"limits": {"tokens_per_day": 10**30}}, 400),
        ("PATCH", "/admin/tenants/nobody", {"weight": 2}, 404),
        ("DELETE", "/admin/tenants/nobody", None, 404),
        ("DELETE", "/admin/keys/nosuchkey000", None, 404),
        ("POST", "/admin/keys", {"tenant": "nobody"}, 404),
        ("POST", "/admin/keys", {"tenant": "acme", "expires_in": -1}, 400),
        ("POST", "/admin/keys", {"tenant": "acme", "expires_in": 1e300}, 400),
        ("POST", "/admin/keys", {"tenant": "acme", "label": "x" * 300}, 400),
        ("GET", "/admin/usage?from=x", None, 400),
    ):
        reply = await house.admin(method, path, body)
        assert reply.status == status, (method, path, body, reply.body)
        assert reply.error["message"]
    assert [tenant.name for tenant in house.registry.tenants()] == ["acme", "beta"]
    assert all(tenant.limits == TenantLimits() for tenant in house.registry.tenants())


async def test_no_secret_is_shown_or_logged(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys, the admin key and prompts are in no log line, metric, list or error."""
    canary = "canary-in-the-prompt"
    await house.chat("acme", messages=[{"role": "user", "content": canary}])
    await house.admin("GET", "/admin/keys")
    await house.live.get("/v1/models", Authorization=f"Bearer {house.keys['acme']}x")
    bodies = [
        (await house.admin("GET", path)).body.decode() for path in ("/admin/tenants", "/admin/keys", "/admin/usage")
    ]
    bodies.append((await house.admin("GET", "/metrics")).body.decode())
    captured = capsys.readouterr()
    for text in (*bodies, captured.out, captured.err):
        assert canary not in text
        assert ADMIN not in text
        assert house.keys["acme"] not in text
        assert house.keys["acme"][16:59] not in text
    assert "tenant='acme'" in captured.out
