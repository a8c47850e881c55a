"""A WebSocket client that speaks `chatserve.v1` and remembers everything it was told.

Checks on the way what must always hold: offsets without gaps or repeats, growing sequence numbers, one terminal message
per generation, the announced length and hash. Used by the WebSocket tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.server.live import LiveServer
from tests.waiting import PATIENCE

PROTOCOL = "chatserve.v1"
Json = dict[str, Any]


class WsClient:
    """One socket.

    Attributes:
        texts, ends: by generation id: text so far, and the terminal message.
        messages: everything received, in order.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.name = secrets.token_hex(8)  # an id that comes again within minutes would be taken for a resend
        self.messages: list[Json] = []
        self.texts: dict[str, str] = {}
        self.ends: dict[str, Json] = {}
        self._seqs: dict[str, int] = {}
        self._ids = itertools.count(1)

    async def send(self, type_: str, **fields: object) -> str:
        """Send a command with a fresh id and return the id."""
        given = fields.pop("id", None)
        command_id = str(given) if given is not None else f"{self.name}-{next(self._ids)}"
        await self.socket.send(json.dumps({"type": type_, "id": command_id, **fields}))
        return command_id

    async def receive(self) -> Json:
        """The next message, checked and remembered."""
        frame = await asyncio.wait_for(self.socket.recv(), PATIENCE)
        message = json.loads(frame)
        self.messages.append(message)
        self._check(message)
        return message

    def _check(self, message: Json) -> None:
        gen = message.get("gen")
        if gen is None:
            return
        assert gen not in self.ends, f"a message after the end: {message}"
        if message["type"] == "gen.delta":
            have = self.texts.get(gen, "")
            assert message["off"] == len(have), "deltas neither leave gaps nor repeat"
            assert message["end"] == len(have) + len(message["text"])
            assert message["seq"] > self._seqs.get(gen, -1)
            self._seqs[gen] = message["seq"]
            self.texts[gen] = have + message["text"]
        elif message["type"] in ("gen.done", "gen.failed"):
            self.ends[gen] = message
            text = self.texts.setdefault(gen, "")
            assert message["end"] == len(text)
            if message["type"] == "gen.done":
                assert message["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()

    async def reply(self, command_id: str) -> Json:
        """Read until the answer to a command comes."""
        while True:
            message = await self.receive()
            if message.get("re") == command_id:
                return message

    async def call(self, type_: str, **fields: object) -> Json:
        """Send a command and return its answer."""
        return await self.reply(await self.send(type_, **fields))

    async def hello(self) -> Json:
        welcome = await self.call("hello", client={"name": "test", "version": "1"})
        assert welcome["type"] == "welcome", welcome
        return welcome

    async def end_of(self, gen: str) -> Json:
        """Read until a generation ends; its terminal message."""
        while gen not in self.ends:
            await self.receive()
        return self.ends[gen]

    async def until(self, type_: str) -> Json:
        """Read until a message of a type comes."""
        while True:
            message = await self.receive()
            if message["type"] == type_:
                return message

    async def ask(self, content: str, **fields: object) -> tuple[Json, str, Json]:
        """A whole turn: ack, text, terminal message of its first answer."""
        ack = await self.call("chat.send", content=content, **fields)
        assert ack["type"] == "ack", ack
        gen = ack["gens"][0]["gen"]
        end = await self.end_of(gen)
        return ack, self.texts[gen], end


@asynccontextmanager
async def ws_client(live: LiveServer, *, hello: bool = True, **options: Any) -> AsyncIterator[WsClient]:
    """A connected client, greeted unless told otherwise."""
    options.setdefault("subprotocols", [Subprotocol(PROTOCOL)])
    options.setdefault("open_timeout", PATIENCE)
    options.setdefault("max_queue", None)  # with its usual limit, a close waits ten seconds behind unread messages
    async with connect(f"ws://127.0.0.1:{live.port}/v1/ws", compression=None, **options) as socket:
        client = WsClient(socket)
        if hello:
            await client.hello()
        yield client
