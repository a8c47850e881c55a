"""Whose word is taken for where a request comes from: the proxies that were named, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from chatserve.config import ServerConfig
from chatserve.server import auth
from chatserve.server.auth_guard import WRONG_KEYS_PER_MINUTE
from chatserve.server.run import DrainingServer, bind, build_context
from chatserve.text.chat_template import ChatTemplate
from chatserve.text.tokenizer import Tokenizer
from tests.fakes import FakeEngineClient, make_config
from tests.server.live import HI, live_server, parse_reply
from tests.waiting import PATIENCE

pytestmark = pytest.mark.asyncio

KEY = "0123456789abcdef" * 2
TRIES = 3 * WRONG_KEYS_PER_MINUTE


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wrong key is forgotten, however slow the machine."""
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: 1000.0))


Try = Callable[[str], Awaitable[int]]
"""Sends a wrong key with this X-Forwarded-For; the status."""


async def num_seen(send: Try, forwarded: str) -> int:
    """How many wrong keys are looked at when ``forwarded`` changes with each (``{}`` in it)."""
    statuses = [await send(forwarded.format(number + 1)) for number in range(TRIES)]
    assert set(statuses) <= {401, 429}
    return statuses.count(401)


@asynccontextmanager
async def tcp(folder: Path, *trusted: str) -> AsyncIterator[Callable[[str], Try]]:
    """A server on loopback; gives the peer of an address."""
    config = ServerConfig(port=0, api_keys=(KEY,), trusted_proxies=trusted)
    async with live_server(folder, FakeEngineClient(), server=config) as live:

        def peer(address: str) -> Try:
            async def send(forwarded: str) -> int:
                live.address = address
                reply = await live.get("/v1/models", Authorization="Bearer wrong", X_Forwarded_For=forwarded)
                return reply.status

            return send

        yield peer


@asynccontextmanager
async def unix(folder: Path, path: Path, *trusted: str) -> AsyncIterator[Try]:
    """A server on a Unix socket."""
    config = make_config(folder, server=ServerConfig(uds=str(path), api_keys=(KEY,), trusted_proxies=trusted))
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    server = DrainingServer(build_context(config, FakeEngineClient(), tokenizer, template))  # type: ignore[arg-type]
    task = asyncio.create_task(server._serve([bind(config.server)]))

    async def send(forwarded: str) -> int:
        reader, writer = await asyncio.open_unix_connection(str(path))
        head = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer wrong\r\n"
        writer.write(f"{head}X-Forwarded-For: {forwarded}\r\n\r\n".encode())
        reply = parse_reply(await asyncio.wait_for(reader.read(), PATIENCE))
        writer.close()
        return reply.status

    try:
        yield send
    finally:
        server.drain()
        await asyncio.wait_for(task, PATIENCE)


async def test_nobody_chooses_an_address(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once any loopback peer was believed: a new X-Forwarded-For with each guess and none was ever over the limit.
    uvicorn's variable for this opens nothing either.
    """
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with tcp(tiny_folder) as peer:
        assert await num_seen(peer("127.0.0.1"), "203.0.113.{}") == WRONG_KEYS_PER_MINUTE


async def test_a_trusted_proxys_clients_are_counted_apart(tiny_folder: Path) -> None:
    """Each client that the proxy saw has its own limit; what a client wrote before that, and other peers, count not."""
    async with tcp(tiny_folder, "127.0.0.1", "10.9.0.0/16") as peer:
        proxy = peer("127.0.0.1")
        assert await num_seen(proxy, "203.0.113.{}") == TRIES
        assert await num_seen(proxy, "198.51.100.{}, 192.0.2.1") == WRONG_KEYS_PER_MINUTE
        assert await num_seen(proxy, "198.51.100.{}, 192.0.2.2, 10.9.8.7") == WRONG_KEYS_PER_MINUTE
        assert await proxy("192.0.2.3") == 401
        assert await num_seen(peer("127.0.0.2"), "203.0.114.{}") == WRONG_KEYS_PER_MINUTE


@pytest.mark.parametrize("trusted", [(), ("127.0.0.1",)])
async def test_peers_on_a_unix_socket_share_one_limit(
    tiny_folder: Path, tmp_path: Path, trusted: tuple[str, ...]
) -> None:
    """Once a Unix socket had no limit at all; and whom it is trusted for is said, not assumed."""
    async with unix(tiny_folder, tmp_path / "s", *trusted) as send:
        assert await num_seen(send, "203.0.113.{}") == WRONG_KEYS_PER_MINUTE


async def test_a_proxy_behind_a_unix_socket_can_be_trusted(tiny_folder: Path, tmp_path: Path) -> None:
    """Named ``unix``, it says who its clients are; a client that writes the header itself gains nothing."""
    async with unix(tiny_folder, tmp_path / "s", "unix") as send:
        assert await num_seen(send, "203.0.113.{}") == TRIES
        assert await num_seen(send, "203.0.114.{}, 192.0.2.1") == WRONG_KEYS_PER_MINUTE
        assert await send("192.0.2.2") == 401


async def test_the_scheme_is_a_trusted_proxys_word_too(tiny_folder: Path) -> None:
    """Behind a proxy that ends TLS the server's own page is of an https origin."""
    for trusted, status in (((), 403), (("127.0.0.1",), 200)):
        config = ServerConfig(port=0, trusted_proxies=trusted)
        async with live_server(tiny_folder, FakeEngineClient(), server=config) as live:
            headers = {"Origin": f"https://127.0.0.1:{live.port}", "X_Forwarded_Proto": "https"}
            assert (await live.post("/v1/chat/completions", {"messages": HI}, **headers)).status == status
