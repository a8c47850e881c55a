"""A real server on a real socket, in the test's own event loop, over a fake engine.

Knows how to start and stop one and how to speak raw HTTP to it; what is asked and expected belongs to the tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatserve.config import ServerConfig
from chatserve.server.context import ServerContext
from chatserve.server.run import DrainingServer, bind, build_context, url_of
from chatserve.tenancy.registry import TenantRegistry
from chatserve.text.chat_template import ChatTemplate
from chatserve.text.tokenizer import Tokenizer
from tests.fakes import FakeEngineClient, make_config
from tests.waiting import PATIENCE

HI = [{"role": "user", "content": "hi"}]


@dataclass
class Reply:
    """One HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, checked for its shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[str]:
        """Data of every complete event of a stream."""
        assert self.body.endswith(b"\n\n")
        frames = self.body.decode().split("\n\n")[:-1]
        return [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events that are JSON."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]


class LiveServer:
    """Address and inside of a running server.

    Attributes:
        address: the loopback address that new connections come from.
    """

    def __init__(self, server: DrainingServer, context: ServerContext, engine: FakeEngineClient, url: str) -> None:
        self.server = server
        self.context = context
        self.engine = engine
        self.url = url
        self.port = int(url.rsplit(":", 1)[1])
        self.address = "127.0.0.1"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.address, 0))

    async def raw(self, data: bytes, *, patience: float = PATIENCE) -> bytes:
        """Send bytes, then read until the server closes."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            return await asyncio.wait_for(reader.read(), patience)
        finally:
            writer.close()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        host: str | None = None,
    ) -> Reply:
        """One request on a connection of its own."""
        head = {"Host": host or f"127.0.0.1:{self.port}", "Connection": "close", **(headers or {})}
        if body:
            head = {"Content-Type": "application/json", "Content-Length": str(len(body)), **head}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        return parse_reply(await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body))

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def post(self, path: str, content: object, **headers: str) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return await self.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})

    async def chat(self, **fields: object) -> Reply:
        return await self.post("/v1/chat/completions", {"model": "tiny", "messages": HI, **fields})

    async def chat_from(self, origin: str) -> Reply:
        """A chat as a browser page of that origin would send it."""
        return await self.post("/v1/chat/completions", {"messages": HI}, Origin=origin)

    async def complete(self, **fields: object) -> Reply:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "hi", **fields})


def parse_reply(data: bytes) -> Reply:
    """Take one HTTP/1.1 answer apart; chunked bodies are joined, and must be complete."""
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest, body = body, b""
        while True:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body, rest = body + rest[:length], rest[length + 2 :]
            if length == 0:
                break
    return Reply(int(status_line.split(" ")[1]), headers, body)


@asynccontextmanager
async def live_server(
    folder: Path,
    engine: FakeEngineClient,
    *,
    max_queued: int = 1024,
    server: ServerConfig | None = None,
    tenants: TenantRegistry | None = None,
    admin_key: str | None = None,
) -> AsyncIterator[LiveServer]:
    """Serve until the block ends; then nothing may be left running."""
    config = make_config(folder, server=server, max_queued=max_queued, admin_key=admin_key)
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    context = build_context(config, engine, tokenizer, template, tenants)  # type: ignore[arg-type]
    listener = bind(config.server)
    draining = DrainingServer(context)
    task = asyncio.create_task(draining._serve([listener]))
    while not draining.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield LiveServer(draining, context, engine, url_of(listener))
    finally:
        draining.should_exit = True
        await task
        await engine.close()
        assert context.service.num_running == 0
