"""HTTP as bytes: framing tricks, floods and slowness end in one clean refusal, with bounded memory and time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from chatserve.config import ServerConfig
from chatserve.server import http_protocol
from tests.fakes import FakeEngineClient, Script
from tests.server.live import HI, LiveServer, live_server, parse_reply
from tests.waiting import PATIENCE

BODY = json.dumps({"messages": HI}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.asyncio
async def test_chunked_bodies_are_understood(live: LiveServer) -> None:
    """The control for the negatives below: well-formed chunked framing works."""
    reply = await live.raw(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY))
    assert parse_reply(reply).status == 200


SMUGGLING = {
    "bad chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "bad chunk end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%sXX0\r\n\r\n" % (len(BODY), BODY),
    "length and chunked": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "two lengths": HEAD + b"Content-Length: %d\r\nContent-Length: 3\r\n\r\n" % len(BODY) + BODY,
    "negative length": HEAD + b"Content-Length: -5\r\n\r\n" + BODY,
    "huge length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "plus length": HEAD + b"Content-Length: +5\r\n\r\n" + BODY,
    "space before colon": HEAD + b"Content-Length : %d\r\n\r\n" % len(BODY) + BODY,
    "unknown coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + BODY,
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "folded header": HEAD + b"X-A: 1\r\n b\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "nul in header": HEAD + b"X-A: a\x00b\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "not http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    "bad version": b"GET /livez HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "bad method": b"BREW /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "connect": b"CONNECT evil:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n",
    "two hosts": b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "bad path": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.asyncio
async def test_ambiguous_framing_gets_one_refusal(live: LiveServer) -> None:
    """What two parsers could read differently is answered at most once, with a 4xx, and never reaches the engine."""
    for name, data in SMUGGLING.items():
        reply = await live.raw(data)
        assert reply.count(b"HTTP/1.1 ") == 1, (name, reply)
        assert 400 <= int(reply.split(b" ")[1]) < 500, (name, reply)
        assert b"Traceback" not in reply, name
    assert not live.engine.submissions
    assert (await live.get("/livez")).status == 200


@pytest.mark.asyncio
async def test_pipelined_requests_get_one_answer_then_a_close(live: LiveServer) -> None:
    """A second request sent before the first was answered is dropped with the connection, never mixed in."""
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    reply = await live.raw(request + request)
    assert reply.count(b"HTTP/1.1 200") == 1
    assert len(live.engine.submissions) == 1


@pytest.mark.asyncio
async def test_keep_alive(live: LiveServer) -> None:
    """One connection carries request after request."""
    reader, writer = await live.connect()
    for _ in range(3):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["object"] == "chat.completion"
    writer.close()


def rss_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.asyncio
async def test_header_and_url_floods(live: LiveServer) -> None:
    """A 10 MB header, 10,000 headers and a 100 KB URL are refused early; memory does not follow them."""
    floods = {
        431: [
            (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a" * 10_000_000),
            (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"X-A: b\r\n" * 10_000),
        ],
        414: [(b"GET /", b"a" * 100_000)],
    }
    before = rss_kib()
    for status, cases in floods.items():
        for start, rest in cases:
            reader, writer = await live.connect()
            writer.write(start)
            for offset in range(0, len(rest), 65536):
                writer.write(rest[offset : offset + 65536])
                await asyncio.sleep(0)
            reply = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
            assert reply.startswith(b"HTTP/1.1 %d" % status), (status, reply[:200])
            writer.transport.abort()
    assert rss_kib() - before < 40_000  # the flood itself is made in this process


@pytest.mark.asyncio
async def test_body_over_the_limit(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A declared or a chunked body over 4 MiB is 413 before it is read to its end, and the client gets to read it."""
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", PATIENCE)  # for what this process has yet to send
    limit = live.context.config.server.max_body_bytes
    declared = await live.raw(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n{" % (limit + 1))
    assert parse_reply(declared).error["code"] == "request_too_large"
    whole = await live.post("/v1/chat/completions", b'{"x":"' + b"a" * limit + b'"}')
    assert whole.status == 413
    reader, writer = await live.connect()
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(limit // 0x10000 + 2):
        writer.write(piece)
        await asyncio.sleep(0)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)).startswith(b"HTTP/1.1 413")
    writer.transport.abort()
    just_right = b'{"messages":[{"role":"user","content":"hi"}],"unknown":"' + b"a" * (limit - 58) + b'"}'
    assert len(just_right) == limit
    assert (await live.post("/v1/chat/completions", just_right)).status == 200


@pytest.mark.asyncio
async def test_endless_refused_body_is_cut(live: LiveServer) -> None:
    """After a refusal the rest of a body is thrown away, but not without end."""
    reader, writer = await live.connect()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data\r\n")
    writer.write(b"Content-Length: 100000000\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)).startswith(b"HTTP/1.1 415")
    sent = 0
    with pytest.raises(ConnectionError):  # noqa: PT012 - which of the writes fails is the kernel's choice
        while sent < 100_000_000:
            writer.write(b"a" * 65536)
            await writer.drain()
            sent += 65536
    assert sent < 32_000_000
    writer.transport.abort()


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["nothing", "headers", "body", "second request"])
async def test_slow_senders_are_cut(tiny_folder: Path, where: str) -> None:
    """A byte now and then does not hold a connection, however long they come: 408 and a close, wherever it stalls."""
    config = ServerConfig(port=0, receive_timeout=1.0)
    async with live_server(tiny_folder, FakeEngineClient(), server=config) as live:
        reader, writer = await live.connect()
        if where == "headers":
            writer.write(HEAD)
        elif where == "body":
            writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
        elif where == "second request":
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            writer.write(b"GET /livez HTTP/1.1\r\n")
        reading = asyncio.create_task(reader.read())
        async with asyncio.timeout(PATIENCE):
            while not reading.done():
                await asyncio.sleep(0.05)
                if where != "nothing":
                    writer.write(b"x")
        reply = await reading
        assert reply.startswith(b"HTTP/1.1 408")
        assert parse_reply(reply).error["code"] == "request_timeout"
        writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("rest", [b"", b"zz not a chunk"])
async def test_refused_requests_get_no_second_answer(tiny_folder: Path, rest: bytes) -> None:
    """A request that was answered while its body was on its way gets no other answer when the body stalls or breaks."""
    config = ServerConfig(port=0, receive_timeout=1.0)
    async with live_server(tiny_folder, FakeEngineClient(), server=config) as live:
        reader, writer = await live.connect()
        writer.write(HEAD.replace(b"json", b"xml") + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 415")
        writer.write(rest)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()


@pytest.mark.asyncio
async def test_deadline_ends_with_the_request(tiny_folder: Path) -> None:
    """Answering may take longer than receiving may: a slow answer is not cut by the receive deadline."""
    engine = FakeEngineClient(Script([120] * 4, delay=0.5))
    async with live_server(tiny_folder, engine, server=ServerConfig(port=0, receive_timeout=1.0)) as live:
        assert (await live.chat()).json["choices"][0]["message"]["content"] == "xxxx"


@pytest.mark.asyncio
async def test_slow_senders_do_not_slow_others(tiny_folder: Path) -> None:
    """200 stalled connections, all of them open throughout, cost a healthy client nothing it would notice."""
    async with live_server(tiny_folder, FakeEngineClient(), server=ServerConfig(port=0, receive_timeout=3600)) as live:
        stalled = [await live.connect() for _ in range(200)]
        for _, writer in stalled:
            writer.write(HEAD)
        assert (await live.chat()).status == 200
        started = time.process_time()  # of this process alone: the machine may be busy
        for _ in range(20):
            assert (await live.chat()).status == 200
        assert (time.process_time() - started) / 20 < 0.25
        assert len(live.server.server_state.connections) >= 200
        for _, writer in stalled:
            writer.transport.abort()


@pytest.mark.asyncio
async def test_expect_continue(live: LiveServer) -> None:
    """curl's large posts ask first; a refused one is refused without asking for its body."""
    reader, writer = await live.connect()
    writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(BODY)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    reader, writer = await live.connect()
    writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 100000000\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.asyncio
async def test_offered_upgrades_are_ignored(live: LiveServer) -> None:
    """curl --http2 offers h2c; it is answered in HTTP/1.1, and a body (which the parser takes for the other protocol)
    is refused cleanly.
    """
    offer = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    reader, writer = await live.connect()
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"}"), PATIENCE)).startswith(b"HTTP/1.1 200")
    writer.close()
    reader, writer = await live.connect()
    writer.write(HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    assert head.startswith(b"HTTP/1.1 400")
    writer.close()


@pytest.mark.asyncio
async def test_http_1_0_client(live: LiveServer) -> None:
    """A 1.0 client without Host gets its answer and a close."""
    reply = await live.raw(b"GET /livez HTTP/1.0\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.endswith(b'{"status":"ok"}')
