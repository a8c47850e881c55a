"""Tenants, published prefixes, explanations, purges and the doctor against a whole server around the oracle."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from chatserve.config import CacheConfig, ServerConfig
from chatserve.engine.client import EngineClient
from chatserve.scope import Scope
from chatserve.server.auth import Principal
from chatserve.server.context import ServerContext
from chatserve.sessions.memory_store import MemoryStore
from chatserve.tenancy.declared import Declared
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant
from tests.e2e.byte_oracle import FACTORY
from tests.fakes import make_config, write_tokenizer_folder
from tests.server.live import LiveServer, Reply, live_server
from tests.waiting import UNHURRIED

pytestmark = pytest.mark.asyncio

ADMIN = "admin-key"
SYSTEM = "You are the guide of a harbour museum, and you answer in one sentence."


@dataclass
class Town:
    """A server with three tenants, of which ``acme`` and ``beta`` share a group."""

    live: LiveServer
    engine: EngineClient
    keys: dict[str, str]

    async def chat(self, tenant: str, question: str, system: str = SYSTEM, **fields: object) -> int:
        """Cached tokens of one turn."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 4, **fields}
        reply = await self.live.post("/v1/chat/completions", body, Authorization=f"Bearer {self.keys[tenant]}")
        assert reply.status == 200, reply.body
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def explain(self, tenant: str, question: str) -> Reply:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return await self.live.post(
            "/v1/cache/explain", {"messages": messages}, Authorization=f"Bearer {self.keys[tenant]}"
        )

    async def admin(self, method: str, path: str, body: object = None) -> Reply:
        content = b"" if body is None else msgspec.json.encode(body)
        return await self.live.request(method, path, content, {"Authorization": f"Bearer {ADMIN}"})


@pytest_asyncio.fixture
async def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Town]:
    monkeypatch.setenv("CHATSERVE_TEST", "1")
    folder = write_tokenizer_folder(tmp_path / "tiny")
    config = make_config(folder, server=ServerConfig(port=0, drain_timeout=2.0))
    engine = EngineClient(
        msgspec.structs.replace(config.engine, executor=FACTORY, cache=CacheConfig(num_blocks=512)), limits=UNHURRIED
    )
    await engine.start()
    async with asyncio.timeout(100):
        await engine.wait_ready()
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=Declared())
    keys = {}
    for name in ("acme", "beta", "gamma"):
        await registry.create_tenant(Tenant(name=name, groups=() if name == "gamma" else ("museum",)))
        keys[name] = (await registry.new_key(name)).text
    async with live_server(folder, engine, tenants=registry, admin_key=ADMIN) as live:  # type: ignore[arg-type]
        yield Town(live, engine, keys)


async def test_tenants_hit_their_own_cache_and_nobody_elses(town: Town) -> None:
    """Asserted in pairs, also with everything a client may send to borrow the other's (vllm#53347)."""
    assert await town.chat("acme", "When do you open?") == 0
    own = await town.chat("acme", "When do you open?")
    assert own > 80
    borrowed = {"user": "acme", "prompt_cache_key": "acme", "metadata": {"tenant": "acme"}}
    assert await town.chat("beta", "When do you open?", **borrowed) == 0
    assert await town.chat("acme", "When do you open?", cache_salt="s") == 0
    assert await town.chat("beta", "When do you open?", cache_salt="s") == 0
    assert await town.chat("acme", "When do you open?", cache_salt="s") == own


async def test_a_published_prefix_is_everyones_and_survives_the_engine(town: Town) -> None:
    """Published once: the first request of every tenant finds it, also in the engine that replaces a killed one."""
    published = await town.admin("POST", "/admin/prefixes", {"text": SYSTEM})
    assert published.status == 201
    tokens = published.json["num_tokens"]
    assert tokens > len(SYSTEM)
    for tenant in ("acme", "beta", "gamma"):
        assert await town.chat(tenant, f"I am {tenant}") >= tokens
    pid = town.engine.info.pid
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(100):
        while not (town.engine.ready and town.engine.info.pid != pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        while (await town.explain("gamma", "new")).json["cached_tokens"]["device"] < tokens:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.02)
    assert await town.chat("gamma", "I am new") >= tokens
    assert (await town.admin("DELETE", f"/admin/prefixes/{published.json['id']}")).status == 204
    assert (await town.admin("GET", "/admin/prefixes")).json["data"] == []
    assert (await town.admin("DELETE", f"/admin/prefixes/{published.json['id']}")).status == 404


async def test_a_group_prefix_is_for_its_members(town: Town) -> None:
    """Others neither hit it nor hear of it."""
    await town.admin("POST", "/admin/prefixes", {"text": SYSTEM, "group": "museum"})
    assert await town.chat("beta", "hello") > len(SYSTEM)
    assert (await town.explain("gamma", "hello")).json["miss"] == "never_seen"
    assert await town.chat("gamma", "hello") == 0


async def test_explain_and_purge_are_about_oneself(town: Town) -> None:
    """Where a prompt leaves the cache, with the text around it; after a purge it was never seen."""
    await town.chat("acme", "When do you open on Mondays?")
    answer = (await town.explain("acme", "When do you close?")).json
    assert answer["miss"] == "differs"
    assert answer["differs_at"] == answer["cached_tokens"]["device"]
    assert "you" in answer["around"]
    assert (await town.explain("beta", "When do you open on Mondays?")).json["miss"] == "never_seen"
    assert len(town.live.context.service._answers) > 0
    gone = await town.live.request("DELETE", "/v1/cache", headers={"Authorization": f"Bearer {town.keys['acme']}"})
    assert gone.json["device_blocks"] > 0
    assert not len(town.live.context.service._answers)
    assert (await town.explain("acme", "When do you open on Mondays?")).json["miss"] == "never_seen"
    assert await town.chat("acme", "When do you open on Mondays?") == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": 5}, "prompt"),
    ],
)
async def test_explain_refuses_what_it_cannot_explain(town: Town, body: dict[str, object], param: str) -> None:
    """A clear 400 that names the field."""
    reply = await town.live.post("/v1/cache/explain", body, Authorization=f"Bearer {town.keys['acme']}")
    assert reply.status == 400
    assert reply.error["param"] == param


async def test_prefixes_beyond_the_budget_are_refused_with_numbers(town: Town) -> None:
    """A quarter of the pool may be pinned; an empty text and a misspelt field are refused too."""
    reply = await town.admin("POST", "/admin/prefixes", {"text": "long " * 600})
    assert reply.status == 400
    assert "blocks" in reply.error["message"]
    assert (await town.admin("POST", "/admin/prefixes", {"text": " "})).error["param"] == "text"
    assert (await town.admin("POST", "/admin/prefixes", {"texts": "a"})).status == 400


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a ``chatserve`` command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chatserve", *arguments, stdout=PIPE, stderr=PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_the_commands(town: Town, tmp_path: Path) -> None:
    """`prefixes publish|list|withdraw` against the running server; a refusal says why and is no success."""
    common = ["--url", town.live.url, "--admin-api-key", ADMIN]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(SYSTEM)
    status, told, errors = await run("prefixes", "publish", str(prompt), *common)
    assert status == 0, errors
    prefix_id = told.split()[0]
    assert prefix_id in (await run("prefixes", "list", *common))[1]
    assert (await run("prefixes", "withdraw", prefix_id, *common))[0] == 0
    assert prefix_id not in (await run("prefixes", "list", *common))[1]
    prompt.write_text("long " * 600)
    status, told, errors = await run("prefixes", "publish", str(prompt), *common)
    assert (status, told) == (1, "")
    assert "blocks" in errors
    assert "Withdraw another prefix" in errors


async def test_the_doctor_finds_nothing_on_a_sound_server(town: Town) -> None:
    """With the admin key it brings its own two tenants and takes them away; with two keys it needs none."""
    status, told, errors = await run(
        "doctor", "isolation", "--url", town.live.url, "--admin-api-key", ADMIN, "--trials", "2"
    )
    assert status == 0, errors
    assert "own hits 16 of 16, cross-tenant hits 0 of 16" in told
    assert "conversations         closed" in told
    remaining = {tenant["name"] for tenant in (await town.admin("GET", "/admin/tenants")).json["data"]}
    assert not any(name.startswith("doctor-") for name in remaining)
    pair = ["--api-key", town.keys["acme"], "--api-key", town.keys["gamma"]]
    status, told, errors = await run("doctor", "isolation", "--url", town.live.url, *pair, "--trials", "1")
    assert status == 0, errors
    assert "own hits 8 of 8, cross-tenant hits 0 of 8" in told
    same = ["--api-key", town.keys["acme"], "--api-key", town.keys["acme"]]
    status, _, errors = await run("doctor", "isolation", "--url", town.live.url, *same)
    assert status == 1
    assert "acme" in errors
    assert town.keys["acme"] not in errors


@pytest.mark.parametrize("leak", ["cache", "explanations", "conversations"])
async def test_the_doctor_finds_a_leak(town: Town, monkeypatch: pytest.MonkeyPatch, leak: str) -> None:
    """A server whose scopes forget the tenant, for all requests or for explanations alone, or whose conversations do:
    the doctor says where and fails.
    """
    if leak == "conversations":

        def owned(store: MemoryStore, _: str, conversation: str) -> object:
            return store._conversations[conversation]

        monkeypatch.setattr(MemoryStore, "_owned", owned)
    else:
        sound = ServerContext.scopes_for

        def scopes_for(context: ServerContext, principal: Principal, salt: str = "") -> tuple[Scope, ...]:
            caller = inspect.stack()[1].function
            if leak == "cache" or caller == "explain":
                principal = Principal("acme", principal.key_id)
            return sound(context, principal, salt)

        monkeypatch.setattr(ServerContext, "scopes_for", scopes_for)
    pair = ["--api-key", town.keys["acme"], "--api-key", town.keys["gamma"]]
    status, told, errors = await run("doctor", "isolation", "--url", town.live.url, *pair, "--trials", "1")
    assert status == 1
    assert "Isolation is broken" in errors
    if leak == "conversations":
        assert "OPEN to another tenant" in told
        assert "cross-tenant hits 0 of 8" in told
    elif leak == "cache":
        assert "cross-tenant hits 8 of 8" in told
    else:
        assert "explanation           own hits 1 of 1, cross-tenant hits 0 of 1" not in told
        assert "chat                  own hits 1 of 1, cross-tenant hits 0 of 1" in told
