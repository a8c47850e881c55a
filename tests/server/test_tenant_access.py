"""Who gets in, as whom, and until when; a real socket over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chatserve.server.app import create_app
from chatserve.server.middleware import OPEN_PATHS
from chatserve.tenancy.declared import declared_keys
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant
from tests.fakes import FakeEngineClient, Script, ids, say
from tests.server.house import ADMIN, House
from tests.server.live import HI, live_server
from tests.server.ws_client import ws_client
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio


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
    house.live.engine.script = say("Hello!", start_delay=3600.0)
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
    """Long before their answers' end: the event stream gets the code, the socket's answer fails and it closes with
    4401; another key of the same tenant goes on.
    """
    house.live.engine.script = held = Script(ids("abcdefgh" * 5), delay=0.01, hang=True)
    expires = time.time() + 3600
    house.keys["soon"] = (await house.registry.new_key("acme", expires=expires)).text
    stream = asyncio.create_task(house.chat("soon", stream=True, max_tokens=400))
    other = asyncio.create_task(house.chat("acme", stream=True, max_tokens=200))
    async with ws_client(house.live, additional_headers={"Authorization": f"Bearer {house.keys['soon']}"}) as client:
        ack = await client.reply(await client.send("chat.send", content="hi"))
        await eventually(lambda: sum(s.num_sent > 20 for s in house.live.engine.submissions) == 3)
        house.registry._clock = lambda: expires
        with pytest.raises(ConnectionClosed) as closed:
            await client.until("never")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
        assert client.ends[ack["gens"][0]["gen"]]["error"]["code"] == "key_revoked"
    cut = await stream
    assert json.loads(cut.events[-1])["error"]["code"] == "key_revoked"
    assert len(cut.events) > 10
    assert [s.aborted for s in house.live.engine.submissions].count(False) == 1
    held.hang = False
    assert (await other).events[-1] == "[DONE]"
    refused = await house.chat("soon")
    assert (refused.status, refused.error["code"]) == (401, "key_expired")


async def test_page_sessions_end_with_their_key(house: House) -> None:
    """A cookie is worth no more than the key it was exchanged for."""
    reply = await house.live.post("/ui/login", {"key": house.keys["acme"]})
    cookie = reply.headers["set-cookie"].split(";")[0]
    assert (await house.live.get("/v1/usage", Cookie=cookie)).json["tenant"] == "acme"
    await house.registry.revoke_key(house.keys["acme"][3:15])
    after = await house.live.get("/v1/usage", Cookie=cookie)
    assert (after.status, after.error["code"]) == (401, "invalid_api_key")


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
