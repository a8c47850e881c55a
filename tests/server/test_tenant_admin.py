"""Administration over HTTP; a real socket over a scripted engine."""

from __future__ import annotations

import msgspec
import pytest

from chatserve.tenancy.tenant import TenantLimits
from tests.server.house import ADMIN, House

pytestmark = pytest.mark.asyncio


async def test_a_prefix_with_a_token_the_model_does_not_have(house: House) -> None:
    """It is refused by name before the engine hears of it."""
    engine = house.live.engine
    engine.info = msgspec.structs.replace(engine.info, vocab_size=ord("z"))
    reply = await house.admin("POST", "/admin/prefixes", {"text": "lazy"})
    assert (reply.status, reply.error["param"]) == (400, "text")


async def test_a_prefix_that_the_template_refuses(house: House) -> None:
    """What is wrong with the messages is wrong with the text: the request has no other field."""
    private_use = "".join(map(chr, range(0xE000, 0xF900)))
    reply = await house.admin("POST", "/admin/prefixes", {"text": private_use})
    assert (reply.status, reply.error["param"]) == (400, "text")


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
