"""The edges of `/v1/ws`: who may connect, what is refused and how, and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from chatserve.config import ServerConfig
from chatserve.server import app, ws_transport
from chatserve.server.run import bind
from chatserve.server.websocket import websocket_routes
from chatserve.server.ws_connection import ConnectionLimits
from tests.fakes import FakeEngineClient, Script, ids, say
from tests.server import live as live_module
from tests.server.live import LiveServer, live_server
from tests.server.ws_client import WsClient, ws_client
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.asyncio

KEY = "sk-test-1"


@contextmanager
def limits(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Iterator[None]:
    """Servers started inside have these limits for every socket."""
    routes = functools.partial(websocket_routes, limits=ConnectionLimits(**values))
    with monkeypatch.context() as patch:
        patch.setattr(app, "websocket_routes", routes)
        yield


async def close_code(client: WsClient) -> int | None:
    """Read until the server closes; the code it gave."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await client.receive()
    return client.socket.close_code


async def refused(live: LiveServer, **options: Any) -> InvalidStatus:
    """The HTTP answer to a handshake that must fail."""
    with pytest.raises(InvalidStatus) as caught:
        async with ws_client(live, hello=False, **options):
            pass
    return caught.value


@pytest.mark.parametrize(
    ("offered", "accepted"),
    [
        (None, False),
        (["other"], False),
        (["chatserve.v2"], False),
        (["chatserve.v1.msgpack"], False),
        (["chatserve.v1"], True),
        (["other", "chatserve.v1"], True),
    ],
)
async def test_subprotocol(live: LiveServer, offered: list[str] | None, accepted: bool) -> None:
    """Exactly chatserve.v1 is echoed; without it there is no socket, but a 400 that says what to offer."""
    options = {"subprotocols": None if offered is None else [Subprotocol(name) for name in offered]}
    if accepted:
        async with ws_client(live, **options) as client:
            assert client.socket.subprotocol == "chatserve.v1"
    else:
        response = (await refused(live, **options)).response
        assert response.status_code == 400
        assert "chatserve.v1" in json.loads(response.body)["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("own", True),
        ("http://evil.example", False),
        ("null", False),
        ("http://127.0.0.1:1", False),
        ("https://own", False),
        ("http://localhost.evil.example", False),
    ],
)
async def test_origin(live: LiveServer, origin: str | None, allowed: bool) -> None:
    """A page of another origin is refused with 403 before anything is accepted, whatever else it sends."""
    own = f"127.0.0.1:{live.port}"
    value = None if origin is None else origin.replace("https://own", f"https://{own}").replace("own", f"http://{own}")
    if allowed:
        async with ws_client(live, origin=value) as client:
            assert client.messages[0]["type"] == "welcome"
    else:
        error = await refused(live, origin=value, additional_headers={"Cookie": "chatserve_session=x"})
        assert error.response.status_code == 403


@asynccontextmanager
async def keyed(folder: Path, **config: Any) -> AsyncIterator[LiveServer]:
    """A server with one key."""
    server = ServerConfig(port=0, drain_timeout=2.0, api_keys=(KEY,), **config)
    async with live_server(folder, FakeEngineClient(), server=server) as live:
        yield live


async def test_bearer_keys(tiny_folder: Path) -> None:
    """The right key opens; a wrong, empty or missing one is a clean 401, never a 500."""
    async with keyed(tiny_folder) as live:
        async with ws_client(live, additional_headers={"Authorization": f"Bearer {KEY}"}) as client:
            assert (await client.ask("hi"))[1] == "Hello!"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"Authorization": KEY}):
            response = (await refused(live, additional_headers=headers)).response
            assert response.status_code == 401
            assert json.loads(response.body)["error"]["code"] == "invalid_api_key"


async def test_a_page_without_a_session_is_told(tiny_folder: Path) -> None:
    """A browser cannot read a 401 of a handshake: it is accepted, told why, and closed with 4401."""
    async with keyed(tiny_folder) as live:
        own = f"http://127.0.0.1:{live.port}"
        for cookie in ({}, {"Cookie": "chatserve_session=stale"}):
            async with ws_client(live, hello=False, origin=own, additional_headers=cookie) as client:
                error = await client.receive()
                assert error["error"]["code"] == "invalid_api_key"
                assert await close_code(client) == 4401
        login = await live.post("/ui/login", {"key": KEY}, Origin=own)
        cookie = {"Cookie": login.headers["set-cookie"].split(";")[0]}
        async with ws_client(live, origin=own, additional_headers=cookie) as client:
            assert (await client.ask("hi"))[1] == "Hello!"
        assert (await refused(live, additional_headers=cookie)).response.status_code == 403, "a cookie needs its page"


async def test_keys_in_the_query_or_subprotocol_do_nothing(tiny_folder: Path) -> None:
    """Credentials in places that get logged are not looked at."""
    async with keyed(tiny_folder) as live:
        with pytest.raises(InvalidStatus):
            async with connect(
                f"ws://127.0.0.1:{live.port}/v1/ws?api_key={KEY}", subprotocols=[Subprotocol("chatserve.v1")]
            ):
                pass
        names = [Subprotocol("chatserve.v1"), Subprotocol(f"openai-insecure-api-key.{KEY}")]
        assert (await refused(live, subprotocols=names)).response.status_code == 401


async def test_number_of_sockets(tiny_folder: Path) -> None:
    """The limit refuses with 429, and a socket that closes makes room."""
    server = ServerConfig(port=0, drain_timeout=2.0, max_websocket_connections=2)
    async with live_server(tiny_folder, FakeEngineClient(), server=server) as live, ws_client(live):
        async with ws_client(live):
            assert (await refused(live)).response.status_code == 429
        # The server may not have noticed yet.
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(InvalidStatus):
                    async with ws_client(live) as client:
                        assert client.messages
                    break


async def test_hello_must_come(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent socket, or one that says everything but hello, is closed with 4408."""
    with limits(monkeypatch, hello_seconds=1.5):
        async with live_server(tiny_folder, FakeEngineClient()) as live:
            async with ws_client(live, hello=False) as silent, ws_client(live, hello=False) as rude:
                error = await rude.call("chat.send", content="hi")
                assert error["error"]["code"] == "hello_required"
                assert await close_code(silent) == 4408
                assert await close_code(rude) == 4408
            assert live.engine.submissions == []


async def test_malformed_frames(live: LiveServer) -> None:
    """Three malformed frames get an error each, the fourth closes with 4400; good frames between still work."""
    async with ws_client(live) as client:
        for frame in ("not json", "[1,2]", '{"id":"x"}'):
            await client.socket.send(frame)
            error = await client.receive()
            assert error["type"] == "error"
            assert "re" not in error
            assert error["error"]["code"] == "malformed_frame"
            assert (await client.call("ping", t=1))["type"] == "pong"
        await client.socket.send('{"type":5}')
        assert await close_code(client) == 4400


@pytest.mark.parametrize(
    "frame",
    [
        '{"type":"chat.send","id":"a","content":"\\ud800"}',
        '{"type":"chat.send","id":"a","content":"x","later":"\\ud800"}',
        '{"type":"chat.send","id":"a","content":"x","\\udc00":1}',
        '{"type":"chat.send","id":"' + "a" * 65 + '"}',
        '{"type":"chat.send","id":""}',
        '{"type":"chat.send","id":7}',
        *('{"type":"ping","id":"a","x":' + "[" * depth + "]" * depth + "}" for depth in (100, 1000, 20_000, 120_000)),
        '{"type":"chat.send","id":"a","content":' + '{"a":' * 1000 + "1" + "}" * 1000 + "}",
        '{"type":"ping","id":"a","t":NaN}',
        "",
        "{" * 1000,
        '{"type":"ping"} {"type":"ping"}',
    ],
)
async def test_frames_that_are_no_messages(live: LiveServer, frame: str) -> None:
    """Surrogates, depth in known and unknown fields, unfit ids: one error, no stack trace, and the socket lives."""
    async with ws_client(live) as client:
        await client.socket.send(frame)
        error = (await client.receive())["error"]
        assert error["code"] == "malformed_frame"
        assert error["type"] == "invalid_request_error"
        assert "Traceback" not in error["message"]
        assert (await client.call("ping"))["type"] == "pong"


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"type": "chat.later"}, "unknown_type", "type"),
        ({"type": "gen.attach", "gen": "g", "from": 0}, "unsupported", "type"),
        ({"type": "chat.regenerate", "msg": "m"}, "unsupported", "type"),
        ({"type": "sub", "topic": "usage"}, "unsupported", "type"),
        ({"type": "hello"}, "already_done", "type"),
        ({"type": "chat.send"}, "invalid_value", "content"),
        ({"type": "chat.send", "content": None}, "invalid_value", "content"),
        ({"type": "chat.send", "content": ["x"]}, "invalid_value", "content"),
        ({"type": "chat.send", "content": "x", "params": []}, "invalid_value", "params"),
        ({"type": "chat.send", "content": "x", "conv": 5}, "invalid_value", "conv"),
        ({"type": "chat.send", "content": "x", "parent": "m"}, "invalid_value", "conv"),
        ({"type": "chat.send", "content": "x", "edit_of": "m"}, "unsupported_parameter", "edit_of"),
        ({"type": "chat.send", "content": "x", "watch": False}, "unsupported_parameter", "watch"),
        ({"type": "gen.cancel"}, "invalid_value", None),
        ({"type": "gen.cancel", "gen": "x" * 65}, "invalid_value", "gen"),
    ],
)
async def test_refused_commands(live: LiveServer, message: dict[str, Any], code: str, param: str | None) -> None:
    """A wrong command gets exactly one error that carries its id and names the field; it is not malformed."""
    async with ws_client(live) as client:
        for attempt in range(6):
            answer = await client.call(
                message["type"], id=f"c{attempt}", **{k: v for k, v in message.items() if k != "type"}
            )
            assert answer["type"] == "error"
            assert (answer["error"]["code"], answer["error"].get("param")) == (code, param)
        assert (await client.call("ping"))["type"] == "pong"
        assert [m.get("re") for m in client.messages].count("c0") == 1
    assert live.engine.submissions == []


async def test_binary_frames(live: LiveServer) -> None:
    """Binary is not negotiated: 1003."""
    async with ws_client(live) as client:
        await client.socket.send(b"\x00\x01")
        assert await close_code(client) == 1003


async def test_frame_size(live: LiveServer) -> None:
    """A frame of the limit is read; one byte more closes with 1009."""
    async with ws_client(live) as client:
        head, tail = '{"type":"ping","id":"big","x":"', '"}'
        fits = head + "x" * (256 * 1024 - len(head) - len(tail)) + tail
        await client.socket.send(fits)
        assert (await client.reply("big"))["type"] == "pong"
        await client.socket.send(head + "x" + fits[len(head) :])
        assert await close_code(client) == 1009


async def test_invalid_utf8(live: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    """A text frame that is not UTF-8 closes with 1007 and leaves no stack trace in the log."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(
        f"GET /v1/ws HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "Sec-WebSocket-Protocol: chatserve.v1\r\n\r\n".encode()
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(bytes([0x81, 0x82, 0, 0, 0, 0, 0xFF, 0xFE]))
    data = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    assert data[:1] == b"\x88"
    assert int.from_bytes(data[2:4], "big") == 1007
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_too_many_commands(live: LiveServer) -> None:
    """A flood is closed with 4429 and the seconds to wait."""
    async with ws_client(live) as client:
        with contextlib.suppress(ConnectionClosed):
            for number in range(200):
                await client.socket.send(json.dumps({"type": "ping", "id": str(number)}))
        assert await close_code(client) == 4429
        assert client.socket.close_reason == "1"


def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of servers and of `narrow_socket` hold little in the kernel, so that not reading shows soon."""

    def narrow_bind(config: ServerConfig) -> socket.socket:
        listener = bind(config)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(live_module, "bind", narrow_bind)


def narrow_socket(port: int) -> socket.socket:
    """A client's side of such a connection."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", port))
    made.setblocking(False)
    return made


@pytest.mark.parametrize("by", ["time", "bytes"])
async def test_slow_reader(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A socket that never reads is given up with 4410, and its answers are stopped; others notice nothing.

    Where bytes are to decide, the time comes after this test's patience. When it reads again, all of it is still there.
    """
    monkeypatch.setattr(ws_transport, "ABORT_SECONDS", 3600.0)
    endless = Script(tokens=ids("x" * 100_000), hang=True)
    engine = FakeEngineClient(lambda submission, _: endless if submission.request_id == 0 else say("fine"))
    engine.info = msgspec.structs.replace(engine.info, max_model_len=10**9, max_tokens_in_pool=10**9)
    server = ServerConfig(port=0, drain_timeout=2.0, send_timeout=0.5 if by == "time" else 3600.0)
    small_buffers(monkeypatch)
    with limits(monkeypatch, max_pending_bytes=2**30 if by == "time" else 20_000):
        async with (
            live_server(tiny_folder, engine, server=server) as live,
            ws_client(live, sock=narrow_socket(live.port)) as slow,
            ws_client(live) as other,
        ):
            await slow.call("chat.send", content="hi", params={"n": 16})
            slow.socket.transport.pause_reading()
            await asyncio.wait_for(engine.submissions[0].aborted_event.wait(), PATIENCE)
            assert (await other.ask("hello"))[1] == "fine"
            assert live.context.service.num_running == 0
            slow.socket.transport.resume_reading()
            assert await close_code(slow) == 4410


async def test_a_reader_that_pauses_loses_nothing(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What piled up comes merged into few deltas, whole and in order; the client checks offsets and hash."""
    text = "0123456789" * 4000
    engine = FakeEngineClient(say(text))
    engine.info = msgspec.structs.replace(engine.info, max_model_len=10**6, max_tokens_in_pool=10**6)
    small_buffers(monkeypatch)
    server = ServerConfig(port=0, drain_timeout=2.0, send_timeout=3600.0)
    async with (
        live_server(tiny_folder, engine, server=server) as live,
        ws_client(live, sock=narrow_socket(live.port)) as client,
    ):
        ack = await client.call("chat.send", content="hi")
        gen = ack["gens"][0]["gen"]
        await client.until("gen.delta")
        client.socket.transport.pause_reading()
        await eventually(lambda: live.context.service.num_running == 0, 100)
        client.socket.transport.resume_reading()
        end = await client.end_of(gen)
    assert client.texts[gen] == text
    assert end["reason"] == "stop"
    deltas = [message for message in client.messages if message["type"] == "gen.delta"]
    assert sum(message["n"] for message in deltas) == len(text)


async def test_a_peer_that_never_reads_again_is_cut_off(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the close frame is not waited for for ever: the connection is gone soon after 4410."""
    engine = FakeEngineClient(Script(tokens=ids("x" * 100_000), hang=True))
    engine.info = msgspec.structs.replace(engine.info, max_model_len=10**9, max_tokens_in_pool=10**9)
    server = ServerConfig(port=0, drain_timeout=2.0, send_timeout=1.0)
    small_buffers(monkeypatch)
    monkeypatch.setattr(ws_transport, "ABORT_SECONDS", 1.0)
    async with (
        live_server(tiny_folder, engine, server=server) as live,
        ws_client(live, sock=narrow_socket(live.port)) as slow,
    ):
        await slow.call("chat.send", content="hi", params={"n": 16})
        assert len(live.server.server_state.connections) == 1
        slow.socket.transport.pause_reading()
        await eventually(lambda: not live.server.server_state.connections)
        slow.socket.transport.abort()
