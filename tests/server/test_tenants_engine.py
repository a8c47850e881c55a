"""Tenants over a real engine process on the oracle model: their books, and whose cache they see."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chatserve.config import CacheConfig, SchedulerConfig
from chatserve.engine.client import EngineClient
from chatserve.engine.protocol import EngineStats
from chatserve.tenancy.declared import Declared
from chatserve.tenancy.registry import TenantRegistry
from chatserve.tenancy.store import TenantStore
from chatserve.tenancy.tenant import Tenant, TenantLimits
from chatserve.tenancy.usage import Usage
from tests.e2e.byte_oracle import FACTORY
from tests.fakes import make_config
from tests.server.live import LiveServer, Reply, live_server
from tests.waiting import PATIENCE, UNHURRIED

pytestmark = pytest.mark.asyncio

ADMIN = "admin-key"
TENANTS = ("acme", "beta", "gamma")
COUNTED = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "prefix_hit_tokens",
    "computed_tokens": "computed_tokens",
    "generated_tokens": "generation_tokens",
}
"""Field of `Usage` → field of `EngineStats` that it sums up to."""


REPORTED = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:prefix_cache_queries_total": "prefix_query_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "chatserve:computed_prompt_tokens_total": "computed_prompt_tokens",
    "chatserve:aborts_total": "aborts",
}
"""Metric → field of `EngineStats` that it reports."""


class Watcher:
    """Reads the metrics again and again: counters only rise, and no gauge leaves its bounds (vllm#10583).

    Attributes:
        now: the sum of each series as it was last read, by metric.
    """

    def __init__(self, house: House) -> None:
        self._house = house
        self._seen: dict[str, float] = {}
        self.now: dict[str, float] = {}
        self.num_looks = 0

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.02)

    async def look(self) -> None:
        reply = await self._house.live.get("/metrics", Authorization=f"Bearer {ADMIN}")
        assert reply.status == 200
        self.now = {}
        self.num_looks += 1
        for family in text_string_to_metric_families(reply.body.decode()):
            for sample in family.samples:
                series = f"{sample.name}{sorted(sample.labels.items())}"
                assert sample.value >= 0, series
                self.now[sample.name] = self.now.get(sample.name, 0.0) + sample.value
                if family.type in ("counter", "histogram"):
                    assert sample.value >= self._seen.get(series, 0.0), f"{series} fell"
                    self._seen[series] = sample.value
                elif sample.name.endswith("_perc"):
                    assert sample.value <= 1, series


class House:
    """A server with three tenants, one key each."""

    def __init__(self, live: LiveServer, engine: EngineClient, registry: TenantRegistry, keys: dict[str, str]) -> None:
        self.live = live
        self.engine = engine
        self.registry = registry
        self.keys = keys

    async def complete(self, tenant: str, prompt: str, **fields: object) -> Reply:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
        return await self.live.post("/v1/completions", body, Authorization=f"Bearer {self.keys[tenant]}")

    def sums(self) -> Usage:
        """Of all tenants."""
        total = Usage()
        for usage in self.registry.ledger.totals().values():
            total.add(usage)
        return total

    async def rest(self) -> EngineStats:
        """The engine's counters once it has reported that nothing runs."""
        async with asyncio.timeout(PATIENCE):
            while True:
                state = await self.engine.state()
                if not state.live_requests and self.engine.stats.generation_tokens == state.stats.generation_tokens:
                    return state.stats
                await asyncio.sleep(0.02)


@asynccontextmanager
async def house_over(folder: Path, *, num_blocks: int = 96) -> AsyncIterator[House]:
    """A pool so small that requests preempt each other."""
    config = make_config(folder)
    engine = EngineClient(
        msgspec.structs.replace(
            config.engine,
            executor=FACTORY,
            cache=CacheConfig(num_blocks=num_blocks, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=8),
        ),
        limits=UNHURRIED,
    )
    await engine.start()
    async with asyncio.timeout(60):
        await engine.wait_ready()
    registry = TenantRegistry(TenantStore(None), pepper=bytes(32), declared=Declared())
    keys = {}
    for name in TENANTS:
        await registry.create_tenant(Tenant(name=name))
        keys[name] = (await registry.new_key(name)).text
    async with live_server(folder, engine, tenants=registry, admin_key=ADMIN) as live:  # type: ignore[arg-type]
        yield House(live, engine, registry, keys)


async def test_books_equal_the_engines_counters(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tenants in a pool that is too small for them, a third of the clients hanging up anywhere, some refused,
    and the engine killed in the middle: at rest the sums over tenants are the engine's counters to the token, before
    and after, and every admitted request is in the books once.
    """
    monkeypatch.setenv("CHATSERVE_TEST", "1")
    rng = random.Random(3)
    async with house_over(tiny_folder) as house:
        await house.registry.update_tenant("gamma", {"limits": TenantLimits(max_concurrent=2)})

        cached_by_clients = 0

        async def one() -> str:
            nonlocal cached_by_clients
            tenant, prompt = rng.choice(TENANTS), "abcdefgh" * rng.randrange(1, 9) + str(rng.randrange(20))
            fields = {"max_tokens": rng.randrange(1, 120), "n": rng.choice((1, 1, 3)), "stream": rng.random() < 0.5}
            task = asyncio.create_task(house.complete(tenant, prompt, **fields))
            if rng.random() < 0.33:
                await asyncio.wait({task}, timeout=rng.random() * 0.15)
            else:
                await asyncio.wait({task})
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return "left"
            reply = task.result()
            if reply.status == 200 and not fields["stream"]:
                cached_by_clients += reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            return str(reply.status)

        async def storm(count: int, *, kill: bool) -> list[str]:
            tasks = []
            for number in range(count):
                tasks.append(asyncio.create_task(one()))
                await asyncio.sleep(rng.random() * 0.02)
                if kill and number == count // 2:
                    os.kill(house.engine.info.pid, signal.SIGKILL)
            return await asyncio.gather(*tasks)

        watcher = Watcher(house)
        watching = asyncio.create_task(watcher.watch())
        # Four choices that do not fit the pool together: preemptions, however slowly clients come.
        crowded = await house.complete("acme", "a b c d", n=4, max_tokens=110, ignore_eos=True, temperature=1)
        cached_by_clients += crowded.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        outcomes = [str(crowded.status), *await storm(60, kill=False)]
        stats = await house.rest()
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens > 0
        assert "left" in outcomes
        for ours, engines in COUNTED.items():
            assert getattr(house.sums(), ours) == getattr(stats, engines), ours
        assert 0 < house.sums().delivered_tokens <= house.sums().generated_tokens

        last = EngineStats()

        def remember(ready: bool) -> None:
            nonlocal last
            if not ready:
                last = house.engine.stats

        house.engine.on_ready_change(remember)
        outcomes += await storm(40, kill=True)
        async with asyncio.timeout(60):
            await house.engine.wait_ready()
        outcomes += await storm(10, kill=False)
        stats = await house.rest()
        assert house.engine.restarts == 1
        for ours, engines in COUNTED.items():
            assert getattr(house.sums(), ours) == getattr(last, engines) + getattr(stats, engines), ours

        sums = house.sums()
        accepted = sums.requests_completed + sums.requests_cancelled + sums.requests_failed
        assert sums.requests_rejected == outcomes.count("429")
        assert accepted >= outcomes.count("200")
        assert accepted + sums.requests_rejected <= len(outcomes)
        for name in TENANTS:
            account = house.registry.account(name)
            assert (account.num_open, account.num_waiting, account.reserved) == (0, 0, 0), name
        state = await house.engine.state()
        assert state.recounted_held == 0
        assert watching.cancel(), watching.exception()  # it has ended only if what it saw was wrong
        await asyncio.gather(watching, return_exceptions=True)
        await watcher.look()
        assert watcher.num_looks > 5
        # At rest every number is the truth: the pool's own counts, the engine's of both lives, the clients' cached.
        assert watcher.now["vllm:kv_cache_usage_perc"] == state.stats.blocks_held / state.stats.blocks_total == 0
        assert watcher.now["vllm:num_requests_running"] == watcher.now["vllm:num_requests_waiting"] == 0
        for metric, field in REPORTED.items():
            assert watcher.now[metric] == getattr(last, field) + getattr(state.stats, field), metric
        assert watcher.now["vllm:prefix_cache_hits_total"] == sums.cached_tokens >= cached_by_clients > 0
        print(f"{len(outcomes)} requests: {sums}, {stats.preemptions} preemptions after the restart")


async def test_same_tenant_hits_and_no_other_does(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pairs, over every entry point: a prompt's second appearance is cached for its own tenant and unknown to all
    others, whatever they send along; a salt hides it from the tenant itself.
    """
    monkeypatch.setenv("CHATSERVE_TEST", "1")
    async with house_over(tiny_folder, num_blocks=512) as house:
        for number in range(30):
            prompt = chr(65 + number) + "shared words " * 6
            owner, other, third = random.Random(number).sample(TENANTS, 3)
            entry = ("/v1/completions", "/v1/chat/completions")[number % 2]

            async def cached(tenant: str, /, prompt: str = prompt, entry: str = entry, **fields: object) -> int:
                what = (
                    {"prompt": prompt}
                    if entry == "/v1/completions"
                    else {"messages": [{"role": "user", "content": prompt}]}
                )
                body = {"model": "tiny", "max_tokens": 4, "temperature": 0, **what, **fields}
                reply = await house.live.post(entry, body, Authorization=f"Bearer {house.keys[tenant]}")
                assert reply.status == 200
                return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

            lies = {"user": owner, "prompt_cache_key": owner, "cache_salt": owner, "tenant": owner}
            # A chat begins with the words of the template, which the tenant's earlier chats have cached.
            known = 8 if entry == "/v1/chat/completions" else 0
            assert await cached(owner) <= known
            assert await cached(owner) >= len(prompt) - 1
            assert await cached(other) <= known
            assert await cached(owner, cache_salt="mine") <= known
            assert await cached(third, **lies) <= known
            assert await cached(owner) >= len(prompt) - 1
