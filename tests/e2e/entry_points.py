"""Every way a prompt gets into the server, and how much of it the answer says was cached."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.server.live import LiveServer, Reply
from tests.server.ws_client import ws_client

Json = dict[str, Any]


def cached_of(usage: Json) -> int:
    """``cached_tokens`` of a usage object."""
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@dataclass
class Caller:
    """One tenant at the door of a server."""

    live: LiveServer
    key: str

    async def post(self, path: str, body: Json) -> Reply:
        reply = await self.live.post(path, body, Authorization=f"Bearer {self.key}")
        assert reply.status == 200, reply.body
        return reply

    async def chat(self, text: str, **fields: object) -> int:
        reply = await self.post("/v1/chat/completions", {"messages": _messages(text), **_SHORT, **fields})
        return cached_of(reply.json["usage"])

    async def chat_streamed(self, text: str, **fields: object) -> int:
        return _streamed(await self.post("/v1/chat/completions", {"messages": _messages(text), **_STREAM, **fields}))

    async def chat_choices(self, text: str, **fields: object) -> int:
        return await self.chat(text, n=3, seed=1, temperature=1.0, **fields)

    async def chat_explained(self, text: str, **fields: object) -> int:
        salt = {key: value for key, value in fields.items() if key == "cache_salt"}
        reply = await self.post("/v1/cache/explain", {"messages": _messages(text), **salt})
        return sum(reply.json["cached_tokens"].values())

    async def socket(self, text: str, **fields: object) -> int:
        """The first message of a new conversation."""
        ack, _, end = await self._over_socket(text, None, **fields)
        assert ack["conv"]
        return cached_of(end["usage"])

    async def _over_socket(self, text: str, where: Json | None, **fields: object) -> tuple[Json, str, Json]:
        headers = {"Authorization": f"Bearer {self.key}"}
        salt = {key: value for key, value in fields.items() if key == "cache_salt"}
        async with ws_client(self.live, additional_headers=headers) as client:
            params = {"max_tokens": 2, "temperature": 0, **salt}
            return await client.ask(text, params=params, **(where or {}))

    async def turns(self, text: str) -> list[int]:
        """Cached tokens of two turns of one conversation over two sockets: a session, found again."""
        ack, _, first = await self._over_socket(text, None)
        where = {"conv": ack["conv"], "parent": ack["gens"][0]["msg"]}
        _, _, second = await self._over_socket("and on", where)
        return [cached_of(first["usage"]), cached_of(second["usage"])]

    async def completion(self, text: str, **fields: object) -> int:
        reply = await self.post("/v1/completions", {"prompt": text, **_SHORT, **fields})
        return cached_of(reply.json["usage"])

    async def completion_streamed(self, text: str, **fields: object) -> int:
        return _streamed(await self.post("/v1/completions", {"prompt": text, **_STREAM, **fields}))

    async def completion_batch(self, text: str, **fields: object) -> int:
        """Beside an other prompt of the same request; what is cached of both is told as one number."""
        reply = await self.post("/v1/completions", {"prompt": [text, "."], **_SHORT, **fields})
        return cached_of(reply.json["usage"])

    async def completion_explained(self, text: str, **fields: object) -> int:
        salt = {key: value for key, value in fields.items() if key == "cache_salt"}
        reply = await self.post("/v1/cache/explain", {"prompt": text, **salt})
        return sum(reply.json["cached_tokens"].values())


Entry = Callable[..., Awaitable[int]]

CHATS: tuple[Entry, ...] = (
    Caller.chat,
    Caller.chat_streamed,
    Caller.chat_choices,
    Caller.socket,
    Caller.chat_explained,
)
"""Entry points that render one user message alike, so that each may find what another has cached."""

COMPLETIONS: tuple[Entry, ...] = (
    Caller.completion,
    Caller.completion_streamed,
    Caller.completion_batch,
    Caller.completion_explained,
)
"""The same for bare text."""

EXPLAINING: tuple[Entry, ...] = (Caller.chat_explained, Caller.completion_explained)
"""Those that ask, and leave nothing behind."""

_SHORT: Json = {"max_tokens": 2, "temperature": 0}
_STREAM: Json = {**_SHORT, "stream": True, "stream_options": {"include_usage": True}}


def _messages(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def _streamed(reply: Reply) -> int:
    return cached_of(reply.chunks[-1]["usage"])
