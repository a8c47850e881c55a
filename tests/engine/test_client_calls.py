"""Calls with answers across a real engine process: publish, explain, purge, tenants that outlive an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array

import pytest

from chatserve.engine.protocol import Finished, Started
from chatserve.errors import EngineUnavailableError
from chatserve.sampling_params import SamplingParams
from chatserve.scope import Scope
from tests.engine.test_client import CONFIG, _allow_test_executors, on_uvloop, running
from tests.waiting import PATIENCE, eventually

__all__ = ["_allow_test_executors"]

PUBLIC = Scope("public")
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, seed=0)


def visible(tenant: str) -> tuple[Scope, ...]:
    return (PUBLIC, Scope("tenant", tenant))


@on_uvloop
async def test_publish_explain_purge_and_usage() -> None:
    """A published prefix is found by others, explained truly, and purging a tenant takes only its own."""
    prompt = array("i", range(100, 150)).tobytes()
    async with running(CONFIG) as client:
        published = await client.publish(prompt, (PUBLIC,))
        assert published.error_code is None
        stream = client.submit(prompt + array("i", [7, 8, 9]).tobytes(), GREEDY, scopes=visible("a"), tenant="a")
        cached = 0
        while True:
            events = await stream.next()
            cached += sum(event.cached_tokens for event in events if isinstance(event, Started))
            if any(isinstance(event, Finished) for event in events):
                break
        assert cached == 50
        assert (await client.explain(prompt, visible("b"))).miss == "complete"
        assert (await client.purge("a")).device_blocks > 0
        assert (await client.explain(prompt, visible("a"))).device_tokens == 49
        usage = {tenant.tenant: tenant for tenant in (await client.state()).tenants}
        assert usage["a"].cached_tokens == 50
        assert usage[""].computed_tokens == 50


@on_uvloop
async def test_a_call_to_a_dying_engine_fails_at_once_and_tenants_are_declared_again() -> None:
    """Nobody waits for an answer that cannot come; weights outlive the engine."""
    async with running(CONFIG) as client:
        client.set_tenant("heavy", weight=4.0)
        pid = client.info.pid
        os.kill(pid, signal.SIGSTOP)
        call = asyncio.ensure_future(client.state())
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            await asyncio.wait_for(call, PATIENCE)
        await eventually(lambda: client.ready and client.info.pid != pid, 2 * PATIENCE)
        assert "heavy" in {tenant.tenant for tenant in (await client.state()).tenants}
