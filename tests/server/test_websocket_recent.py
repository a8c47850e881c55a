"""What is remembered of sends and ends is bounded tenant by tenant; the memory alone, and a server under a flood."""

from __future__ import annotations

import pytest

from chatserve.server import ws_recent
from chatserve.server.ws_recent import IDEMPOTENCY_SECONDS, Recent
from tests.server.house import House
from tests.server.ws_client import ws_client

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ws_recent, "MAX_REMEMBERED", 4)


async def test_a_flood_forgets_its_own() -> None:
    """Of each tenant the latest are known, however many another has sent."""
    recent = Recent[str]()
    recent.add_send("quiet", "s").set_result("first")
    recent.add_ended("quiet", "g")
    for number in range(50):
        recent.add_send("flood", f"s{number}").set_result("")
        recent.add_ended("flood", f"g{number}")
    kept = recent.find_send("quiet", "s")
    assert kept is not None
    assert kept.result() == "first"
    assert recent.has_ended("quiet", "g")
    assert [n for n in range(50) if recent.find_send("flood", f"s{n}") is not None] == [46, 47, 48, 49]
    assert [n for n in range(50) if recent.has_ended("flood", f"g{n}")] == [46, 47, 48, 49]
    assert recent.find_send("flood", "s") is None
    assert not recent.has_ended("flood", "g")


async def test_what_is_being_accepted_is_not_forgotten() -> None:
    """A resend must find the first send until it has come to something."""
    recent = Recent[str]()
    first = recent.add_send("one", "first")
    for number in range(10):
        recent.add_send("one", str(number)).set_result("")
    assert recent.find_send("one", "first") is first
    first.set_result("")
    recent.add_send("one", "next").set_result("")
    assert recent.find_send("one", "first") is None


async def test_sends_expire_of_tenants_that_are_silent_too() -> None:
    """Ten minutes after a send it is forgotten, at the next send of anybody."""
    now = 0.0
    recent = Recent[str](clock=lambda: now)
    recent.add_send("silent", "a").set_result("")
    recent.add_send("talks", "a").set_result("")
    now = 300.0
    recent.add_send("talks", "b").set_result("")
    now = IDEMPOTENCY_SECONDS
    assert recent.find_send("talks", "a") is not None
    now += 1
    assert recent.find_send("talks", "a") is None
    assert recent.find_send("talks", "b") is not None
    assert list(recent._sends) == ["talks"]


async def test_a_deleted_tenant_leaves_nothing() -> None:
    """Neither what it had, nor what ends or is refused after it was deleted."""
    recent = Recent[str]()
    recent.add_send("gone", "a").set_result("")
    recent.add_send("kept", "a").set_result("")
    recent.add_ended("gone", "g1")
    recent.forget("gone")
    recent.add_ended("gone", "g2")
    recent.drop_send("gone", "a")
    assert list(recent._sends) == list(recent._ended) == ["kept"]


async def test_a_resend_during_anothers_flood_starts_nothing(house: House) -> None:
    """The quiet tenant's resend gets its first answer, and its cancel of it is still understood."""

    def bearer(tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {house.keys[tenant]}"}

    async with (
        ws_client(house.live, additional_headers=bearer("beta")) as quiet,
        ws_client(house.live, additional_headers=bearer("acme")) as flood,
    ):
        first = await quiet.call("chat.send", id="same", content="hi")
        gen = first["gens"][0]["gen"]
        await quiet.end_of(gen)
        for _ in range(8):
            await flood.ask("hi")
        submitted = len(house.live.engine.submissions)
        async with ws_client(house.live, additional_headers=bearer("beta")) as again:
            assert await again.call("chat.send", id="same", content="hi") == first
            assert (await again.call("gen.cancel", gen=gen))["type"] == "ack"
        assert len(house.live.engine.submissions) == submitted
