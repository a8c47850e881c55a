"""Where a server listens: free ports, Unix sockets, addresses that cannot be had, and what it logs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path

import pytest
import structlog

from chatserve.config import ServerConfig
from chatserve.errors import ConfigError
from chatserve.server.log_setup import configure_logging
from chatserve.server.run import DrainingServer, bind, build_context, serve, url_of
from chatserve.text.chat_template import ChatTemplate
from chatserve.text.tokenizer import Tokenizer
from tests.fakes import FakeEngineClient, make_config
from tests.waiting import PATIENCE


def test_addresses() -> None:
    """Port 0 is a free port, told in the URL; a taken port is a ConfigError that says so."""
    with bind(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match="--port"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="no-such-host"):
        bind(ServerConfig(host="no-such-host.invalid", port=0))
    if socket.has_ipv6:
        try:
            listener = bind(ServerConfig(host="::1", port=0))
        except ConfigError:
            return  # a machine without IPv6 loopback says so in the same way
        with listener:
            assert url_of(listener).startswith("http://[::1]:")


@pytest.mark.asyncio
async def test_unix_socket(tiny_folder: Path, tmp_path: Path) -> None:
    """Only the owner may open it, a stale one is replaced, any Host will do, and it serves."""
    path = tmp_path / "chat.sock"
    config = make_config(tiny_folder, server=ServerConfig(uds=str(path)))
    bind(config.server).close()
    listener = bind(config.server)
    assert path.stat().st_mode & 0o777 == 0o600
    assert url_of(listener) == f"unix:{path}"
    tokenizer = Tokenizer.from_folder(tiny_folder)
    engine = FakeEngineClient()
    context = build_context(config, engine, tokenizer, ChatTemplate.from_folder(tiny_folder, tokenizer))  # type: ignore[arg-type]
    server = DrainingServer(context)
    task = asyncio.create_task(server._serve([listener]))
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: whatever.example\r\nConnection: close\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith(b"HTTP/1.1 200")
    writer.close()
    server.drain()
    await asyncio.wait_for(task, PATIENCE)


@pytest.mark.asyncio
async def test_serve_refuses_before_it_listens(tiny_folder: Path) -> None:
    """An open address without keys never gets as far as a socket."""
    config = make_config(tiny_folder, server=ServerConfig(host="0.0.0.0", port=0))
    heard: list[str] = []
    with pytest.raises(ConfigError, match="--api-key"):
        await serve(config, FakeEngineClient(), on_listening=heard.append)  # type: ignore[arg-type]
    assert not heard


def test_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines carry events and foreign records alike; a traceback holds code, never the values of variables."""
    before = structlog.get_config()
    handlers, level = logging.getLogger().handlers, logging.getLogger().level
    try:
        configure_logging(ServerConfig(log_format="json"))
        secret = "my secret prompt"
        try:
            len(5)  # type: ignore[arg-type]
        except TypeError:
            structlog.get_logger("x").exception("failed", request_id="r1")
        logging.getLogger("uvicorn.error").error("foreign")
        structlog.get_logger("x").debug("hidden")
        own, foreign = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    finally:
        structlog.configure(**before)
        logging.getLogger().handlers, logging.getLogger().level = handlers, level
    assert (own["event"], own["level"], own["request_id"]) == ("failed", "error", "r1")
    assert "TypeError" in own["exception"]
    assert secret not in json.dumps(own)
    assert foreign["event"] == "foreign"
