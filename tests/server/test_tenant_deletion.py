"""A tenant that is deleted takes along what the server keeps of it, and nothing of anybody else's."""

from __future__ import annotations

import functools

import pytest

from chatserve.server import app
from chatserve.server.websocket import websocket_routes
from chatserve.sessions.memory_store import MemoryStore
from tests.fakes import Script, ids
from tests.server.house import House
from tests.server.ws_client import ws_client
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The conversations of a house that is built after this."""
    store = MemoryStore()
    monkeypatch.setattr(app, "websocket_routes", functools.partial(websocket_routes, store=store))
    return store


async def test_a_deleted_tenant_leaves_nothing(store: MemoryStore, house: House) -> None:
    """Remembered answers, conversations and cache go, also of an answer that was running; the other's stay."""
    bearers = {name: {"Authorization": f"Bearer {key}"} for name, key in house.keys.items()}
    answers = house.live.context.service._answers
    async with (
        ws_client(house.live, additional_headers=bearers["acme"]) as gone,
        ws_client(house.live, additional_headers=bearers["beta"]) as kept,
    ):
        ack, _, _ = await kept.ask("hi")
        conversations, num_bytes, num_answers = len(store), store.num_bytes, len(answers)
        assert (conversations, num_answers) == (1, 1)
        await gone.ask("hi")
        house.live.engine.script = Script(tokens=ids("par"), hang=True)
        running = await gone.call("chat.send", content="more")
        await gone.until("gen.delta")
        assert (len(store), len(answers)) == (3, 2)
        assert (await house.admin("DELETE", "/admin/tenants/acme")).status == 204
        assert (await gone.end_of(running["gens"][0]["gen"]))["type"] == "gen.failed"
        await eventually(lambda: house.live.engine.purged == ["acme"] and len(store) == conversations)
        assert (store.num_bytes, len(answers)) == (num_bytes, num_answers)
        house.live.engine.script = Script(tokens=ids("fine"))
        await kept.ask("go on", conv=ack["conv"])
