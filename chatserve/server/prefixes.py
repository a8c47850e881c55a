"""Prefixes that the operator publishes: system prompts that every tenant, or a group, shares in the cache.

Renders a system prompt to the tokens that every conversation under it begins with, has the engine compute and pin
them, and does so again whenever an engine takes another's place. Holds the list; `chatserve.engine.publications` holds
the blocks. Declared ones come from the configuration, others through ``/admin/prefixes`` and live as long as the
server.
"""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import structlog

from chatserve.config import Prefix
from chatserve.engine.client import EngineClient
from chatserve.errors import ChatserveError, ConflictError, InvalidRequestError, NotFoundError
from chatserve.scope import Scope
from chatserve.server.generation_service import GenerationService
from chatserve.text.chat_template import ChatMessage

MAX_PREFIXES = 256


class PublishedPrefix(msgspec.Struct):
    """One published system prompt.

    Attributes:
        id: from its text and group, so that publishing twice is publishing once.
        group: who sees it; empty for everybody.
        num_tokens, num_blocks: what is pinned; 0 blocks while it is not.
        error: why it is not, if it was tried.
    """

    id: str
    text: str
    group: str = ""
    num_tokens: int = 0
    num_blocks: int = 0
    error: str | None = None


class PrefixRegistry:
    """Every published prefix of one server."""

    def __init__(self, engine: EngineClient, service: GenerationService, declared: tuple[Prefix, ...]) -> None:
        self._engine = engine
        self._service = service
        self._prefixes = {p.id: p for p in (_prefix(each.text, each.group) for each in declared)}
        self._warming: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("chatserve.prefixes")
        engine.on_ready_change(self._warm)

    def list(self) -> list[PublishedPrefix]:
        """All of them, in the order of their publication."""
        return list(self._prefixes.values())

    async def publish(self, text: str, group: str = "") -> PublishedPrefix:
        """Compute and pin a system prompt.

        Raises:
            InvalidRequestError: it is empty, or does not fit the budget; with numbers.
            ConflictError: there are too many already.
            EngineUnavailableError: not now.
        """
        if not text.strip():
            raise InvalidRequestError("The text of a prefix must not be empty.", param="text")
        prefix = _prefix(text, group)
        known = self._prefixes.get(prefix.id)
        if known is None and len(self._prefixes) >= MAX_PREFIXES:
            raise ConflictError(f"{MAX_PREFIXES} prefixes are published, the most there may be. Withdraw one first.")
        prefix = known or prefix
        await self._pin(prefix)
        if prefix.error is not None:
            raise InvalidRequestError(prefix.error, param="text")
        self._prefixes[prefix.id] = prefix
        return prefix

    async def withdraw(self, prefix_id: str) -> None:
        """End a publication; what is cached of it becomes ordinary cache."""
        prefix = self._prefixes.pop(prefix_id, None)
        if prefix is None:
            raise NotFoundError(f"No prefix {prefix_id[:80]!r} is published.")
        if self._engine.ready:
            await self._engine.publish(self._render(prefix), self._scopes(prefix), withdraw=True)

    async def _pin(self, prefix: PublishedPrefix) -> None:
        tokens = self._render(prefix)
        self._service.refuse_unknown_tokens(tokens, "text")
        reply = await self._engine.publish(tokens, self._scopes(prefix))
        prefix.num_tokens, prefix.num_blocks, prefix.error = reply.num_tokens, reply.num_blocks, reply.error_message

    def _render(self, prefix: PublishedPrefix) -> bytes:
        """The tokens that renderings with different continuations have in common (int32)."""
        system = ChatMessage(role="system", content=prefix.text)
        try:
            one, two = (
                self._service.template.render([system, ChatMessage(role="user", content=text)]).token_ids
                for text in ("alpha", "Ωmega 7")
            )
        except InvalidRequestError as error:
            error.param = error.param and "text"  # what is said of `messages` is of the text here
            raise
        common = 0
        while common < min(len(one), len(two)) and one[common : common + 4] == two[common : common + 4]:
            common += 4
        if not common:
            raise InvalidRequestError("This model's chat template puts nothing before the first user message.")
        return one[:common]

    def _scopes(self, prefix: PublishedPrefix) -> tuple[Scope, ...]:
        public = self._service.scope("public")
        return (public, self._service.scope("group", prefix.group)) if prefix.group else (public,)

    def _warm(self, ready: bool) -> None:
        """A new engine knows nothing: publish everything again."""
        if ready and self._prefixes and (self._warming is None or self._warming.done()):
            self._warming = asyncio.get_running_loop().create_task(self._publish_all())

    async def _publish_all(self) -> None:
        for prefix in self.list():
            try:
                await self._pin(prefix)
            except ChatserveError as error:
                prefix.num_blocks, prefix.error = 0, error.message
            if prefix.error is not None:
                self._log.warning("prefix not published", prefix=prefix.id, error=prefix.error)


def _prefix(text: str, group: str) -> PublishedPrefix:
    digest = hashlib.sha256(msgspec.msgpack.encode((text, group))).hexdigest()
    return PublishedPrefix(f"prefix_{digest[:24]}", text, group)
