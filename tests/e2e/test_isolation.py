"""Nobody finds another's conversation in the cache: random pairs over every entry point, on both tiers.

Always in pairs: the same tenant hits, every other does not, whatever it sends to borrow the first one's cache. The
model is the oracle, which moreover fails as a whole if a block is ever read by somebody who may not see it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from chatserve.config import CacheConfig, ServerConfig
from chatserve.engine.client import EngineClient
from chatserve.tenancy.declared import Declared
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant
from tests.e2e.byte_oracle import FACTORY, swap_space
from tests.e2e.entry_points import CHATS, COMPLETIONS, EXPLAINING, Caller, Entry
from tests.fakes import make_config, write_tokenizer_folder
from tests.server.live import live_server
from tests.waiting import UNHURRIED

pytestmark = pytest.mark.asyncio

ADMIN = "admin-key"
TENANTS = ("acme", "beta", "gamma", "delta")
SYSTEM = "You are the guide of a harbour museum."
TRIALS = int(os.environ.get("CHATSERVE_ISOLATION_TRIALS", "80"))
BLOCK = 4
NUM_BLOCKS = 200


class Town:
    """A server with four tenants, of which the first two share a group, and a fifth that takes up room."""

    def __init__(self, callers: dict[str, Caller], engine: EngineClient) -> None:
        self.callers = callers
        self.engine = engine
        self.crowds = 0

    async def crowd_out(self) -> None:
        """Fill the device with somebody else's prompts, so that everything idle moves to the host."""
        for _ in range(2):  # what is pinned leaves no room for one so large
            self.crowds += 1
            await self.callers["crowd"].completion(f"{self.crowds:06d}" + "x" * (NUM_BLOCKS * BLOCK // 2))


@asynccontextmanager
async def town_of(folder: Path) -> AsyncIterator[Town]:
    config = make_config(folder, server=ServerConfig(port=0, drain_timeout=2.0))
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK, swap_space_gib=swap_space(4000, BLOCK))
    engine = EngineClient(msgspec.structs.replace(config.engine, executor=FACTORY, cache=cache), limits=UNHURRIED)
    await engine.start()
    async with asyncio.timeout(100):
        await engine.wait_ready()
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=Declared())
    async with live_server(folder, engine, tenants=registry, admin_key=ADMIN) as live:  # type: ignore[arg-type]
        callers = {}
        for name in (*TENANTS, "crowd"):
            groups = ("museum",) if name in TENANTS[:2] else ()
            await registry.create_tenant(Tenant(name=name, groups=groups))
            callers[name] = Caller(live, (await registry.new_key(name)).text)
        yield Town(callers, engine)
        assert engine.restarts == 0, "the oracle saw a block read by somebody who may not see it"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATSERVE_TEST", "1")
    return write_tokenizer_folder(tmp_path / "tiny")


def lies_about(owner: str) -> dict[str, object]:
    """Everything a client might send to be taken for ``owner``; none of it is worth anything."""
    return {
        "user": owner,
        "prompt_cache_key": owner,
        "safety_identifier": owner,
        "metadata": {"tenant": owner, "scope": owner},
        "tenant": owner,
        "scopes": [owner],
    }


async def test_random_pairs_over_every_entry_point_and_both_tiers(folder: Path) -> None:
    """One tenant's prompt, put in by any entry point and left on the device or driven to the host: through any entry
    point its own tenant finds all of it, three others none of it, a salt hides it from its own tenant too, and a salt
    is worth nothing to anybody else.
    """
    rng = random.Random(20261129)
    seen: Counter[str] = Counter()
    async with town_of(folder) as town:
        for trial in range(TRIALS):
            entries = rng.choice((CHATS, COMPLETIONS))
            text = f"{trial:05d}" + "".join(rng.choice("abcdef ") for _ in range(rng.randint(60, 120)))
            # Each tenant's cache may hold what all its prompts begin with: the template's first words, some digits.
            shared = 5 + (22 if entries is CHATS else 0)
            owner, *others = rng.sample(TENANTS, 4)
            salt = {"cache_salt": "mine"} if rng.random() < 0.3 else {}
            write: Entry = rng.choice([entry for entry in entries if entry not in EXPLAINING])
            assert await write(town.callers[owner], text, **salt) <= shared
            tier = rng.choice(("device", "host"))
            if tier == "host":
                await town.crowd_out()
            for other in others:
                read = rng.choice(entries)
                lies = lies_about(owner) if read not in EXPLAINING else {}
                borrowed = salt or rng.choice(({}, {"cache_salt": owner}, {"cache_salt": "mine"}))
                found = await read(town.callers[other], text, **{**lies, **borrowed})
                assert found <= shared, (trial, write.__name__, read.__name__, tier, other, found)
                seen[f"foreign {read.__name__}"] += 1
            read = rng.choice(entries)
            hidden = {} if salt else {"cache_salt": "hidden"}
            found = await read(town.callers[owner], text, **hidden)
            assert found <= shared, (trial, write.__name__, read.__name__, tier, "another salt", found)
            for _ in range(2):
                # Others' turns may have driven it to the host meanwhile; it must be found wherever it is.
                read = rng.choice(entries)
                found = await read(town.callers[owner], text, **salt)
                assert found >= len(text) - 1, (trial, write.__name__, read.__name__, tier, found)
                seen[f"own {read.__name__}"] += 1
            seen[tier] += 1
        stats = (await town.engine.state()).stats
        assert stats.demotions > 0
        assert stats.promotions > 0
    names = {f"{who} {entry.__name__}" for who in ("own", "foreign") for entry in (*CHATS, *COMPLETIONS)}
    if TRIALS >= 80:
        assert names <= set(seen), "an entry point was not tried"
        assert min(seen["device"], seen["host"]) > 10
    foreign = sum(count for name, count in seen.items() if name.startswith("foreign"))
    print(f"{TRIALS} prompts, {foreign} foreign looks, 0 hits; {dict(seen)}")


async def test_sessions_are_found_by_their_own_tenant_alone(folder: Path) -> None:
    """A conversation over WebSocket finds its own last turn, on the host too; the same words of another do not."""
    async with town_of(folder) as town:
        for number in range(4):
            text = f"{number}: the lighthouse keeper's secret diary, page one of many"
            first, second = await town.callers["acme"].turns(text)
            assert first <= 30
            assert second >= len(text)
            await town.crowd_out()
            assert (await town.callers["beta"].turns(text))[0] <= 30
            again, _ = await town.callers["acme"].turns(text)
            assert again >= len(text)


async def test_a_publication_is_shared_and_what_hangs_below_it_is_not(folder: Path) -> None:
    """Under one published system prompt every tenant finds exactly the published tokens of another's conversation,
    members of a group those of their group's, also after the conversation was driven to the host.
    """
    async with town_of(folder) as town:
        live = town.callers["acme"].live

        async def admin(method: str, path: str, body: object = None) -> int:
            content = b"" if body is None else msgspec.json.encode(body)
            reply = await live.request(method, path, content, {"Authorization": f"Bearer {ADMIN}"})
            return int(reply.json["num_tokens"]) if reply.status == 201 else 0

        async def chat(tenant: str, question: str, system: str, **fields: object) -> int:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            fields = {"messages": messages, "max_tokens": 2, **fields}
            reply = await town.callers[tenant].post("/v1/chat/completions", fields)
            return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        public = await admin("POST", "/admin/prefixes", {"text": SYSTEM})
        group = await admin("POST", "/admin/prefixes", {"text": f"{SYSTEM} Members only.", "group": "museum"})
        assert 0 < public < group
        members, strangers = TENANTS[:2], TENANTS[2:]
        # The group's prompt begins with the public one: that much of it everybody has.
        common = 1 + len("system\n") + len(SYSTEM)
        for number in range(6):
            question = f"{number} what is in the cellar of this old museum, tell me all of it"
            for system, size, who in ((SYSTEM, public, TENANTS), (f"{SYSTEM} Members only.", group, members)):
                owner, other = random.Random(number).sample(who, 2)
                await chat(owner, question, system)
                if number % 2:
                    await town.crowd_out()
                assert await chat(other, question, system) == size
                assert await chat(other, question, system, cache_salt=owner) == size
                assert await chat(owner, question, system) >= size + len(question)
                if who is members:
                    for stranger in strangers:
                        assert await chat(stranger, f"{number}!", system, cache_salt=f"museum-{number}") == common


async def test_what_publications_leave_no_room_for_is_a_bad_request(folder: Path) -> None:
    """It would fit the pool, but not beside what is pinned: refused with the numbers, and not as a fault of ours."""
    async with town_of(folder) as town:
        caller = town.callers["acme"]
        body = {"prompt": "x" * (NUM_BLOCKS * BLOCK - 40), "max_tokens": 20}
        assert (await caller.post("/v1/completions", body)).status == 200
        admin = {"Authorization": f"Bearer {ADMIN}"}
        assert (await caller.live.post("/admin/prefixes", {"text": SYSTEM * 3}, **admin)).status == 201
        reply = await caller.live.post("/v1/completions", body, Authorization=f"Bearer {caller.key}")
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert reply.error["type"] == "invalid_request_error"
        assert str(NUM_BLOCKS * BLOCK - 20) in reply.error["message"]
        streamed = await caller.live.post(
            "/v1/completions", {**body, "stream": True}, Authorization=f"Bearer {caller.key}"
        )
        assert streamed.chunks[-1]["error"]["code"] == "context_length_exceeded"
        assert (await caller.completion("a short one still fits")) == 0
