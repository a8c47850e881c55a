"""The short way of a token: from the engine's delivery to the connection, in the same call, in order, once each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from chatserve.config import ServerConfig
from chatserve.engine.client import Delta
from chatserve.engine.protocol import Finished
from chatserve.sampling_params import SamplingParams
from chatserve.server.auth import Principal
from chatserve.server.generation import ChoiceDone, Event, Generation, GenerationRequest, TextDelta
from chatserve.server.ws_transport import WebSocketProtocol
from tests.fakes import FakeEngineClient, FakeStream, Script, say
from tests.server.live import LiveServer, live_server
from tests.server.ws_client import ws_client


def texts(events: list[Event]) -> str:
    """The text in events."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def start(live: LiveServer) -> tuple[Generation, FakeStream]:
    """A generation whose engine says nothing by itself."""
    live.engine.script = Script([], hang=True, delay=3600.0)
    scopes = live.context.scopes_for(Principal())
    request = GenerationRequest(prompt_ids=bytes(4), sampling=SamplingParams(seed=1), scopes=scopes)
    generation = live.context.service.start(request)
    return generation, cast(FakeStream, generation._stream)


@pytest.mark.asyncio
async def test_delivered_in_the_same_call(live: LiveServer) -> None:
    """While the consumer waits, each delivery reaches the sink before `put` returns, and the consumer sleeps on until
    the end, which is its own; what came before it waited is its own, too.
    """
    generation, stream = start(live)
    seen: list[str] = []

    def deliver(events: list[Event]) -> bool:
        seen.append(texts(events))
        return True

    generation.deliver_to(deliver)
    stream.put([Delta(0, 97)])
    assert seen == []
    assert texts(await generation.next()) == "a"
    waiting = asyncio.ensure_future(generation.next())
    await asyncio.sleep(0)
    for token in b"bcd":
        stream.put([Delta(0, token)])
    assert seen == ["b", "c", "d"]
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.open.clear()
    stream.put([Delta(0, 101), Finished(stream.request_id, 0, "length")])
    last = await waiting
    assert texts(last) == "e"
    assert last[-1] == ChoiceDone(0, "length")
    assert await generation.next() == []
    assert generation.choice_text(0) == "abcde"
    assert live.context.service.num_running == 0


@pytest.mark.asyncio
async def test_refused_and_failed_deliveries(live: LiveServer) -> None:
    """What the sink refuses wakes the consumer, before what comes meanwhile; what it raises is the consumer's."""
    generation, stream = start(live)
    generation.deliver_to(lambda events: False)
    waiting = asyncio.ensure_future(generation.next())
    await asyncio.sleep(0)
    stream.put([Delta(0, 97)])
    stream.put([Delta(0, 98)])
    got = texts(await waiting)
    got += texts(await generation.next()) if got == "a" else ""
    assert got == "ab"

    def broken(events: list[Event]) -> bool:
        raise ZeroDivisionError

    generation.deliver_to(broken)
    waiting = asyncio.ensure_future(generation.next())
    await asyncio.sleep(0)
    stream.put([Delta(0, 99)])
    with pytest.raises(ZeroDivisionError):
        await waiting
    generation.cancel()
    assert await generation.next() == []


@pytest.mark.asyncio
async def test_one_event_per_token(tiny_folder: Path) -> None:
    """Tokens that arrive together are events of their own, streamed to one reader in order."""
    engine = FakeEngineClient(say("abcdefgh"))
    real_put = FakeStream.put
    held: list[object] = []

    def put_in_threes(self: FakeStream, events: list[object]) -> None:
        held.extend(events)
        if len(held) >= 3 or not self.open:
            real_put(self, held.copy())  # type: ignore[arg-type]
            held.clear()

    async with live_server(tiny_folder, engine, server=ServerConfig(port=0)) as live:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeStream, "put", put_in_threes)
            reply = await live.chat(stream=True)
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in reply.chunks]
    assert [delta for delta in deltas if delta] == list("abcdefgh")


@pytest.mark.asyncio
async def test_websocket_pieces_are_in_order(live: LiveServer) -> None:
    """Two answers on one socket, faster than they may be sent: no gap, no repeat (the client checks), the same text."""
    text = "".join(chr(97 + i % 26) for i in range(400))
    live.engine.script = say(text, delay=0.001)
    async with ws_client(live) as client:
        ack = await client.call("chat.send", content="hi", params={"n": 2})
        for gen in ack["gens"]:
            await client.end_of(gen["gen"])
        assert [client.texts[gen["gen"]] for gen in ack["gens"]] == [text, text]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 200_000])
def test_text_frames_are_frames(size: int) -> None:
    """A reader of the protocol finds one whole text frame, whatever its length."""
    written: list[bytes] = []
    protocol = cast(WebSocketProtocol, SimpleNamespace(transport=SimpleNamespace(write=written.append)))
    WebSocketProtocol.write_text(protocol, b"x" * size)
    client = ClientProtocol(parse_uri("ws://localhost/"), state=State.OPEN, max_size=None)
    client.receive_data(b"".join(written))
    (frame,) = client.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.fin, bytes(frame.data)) == (Opcode.TEXT, True, b"x" * size)
