"""The door to conversation storage, and the rules every storage keeps.

Each method checks ownership: a conversation of another tenant is `NotFoundError`, exactly like one that never
existed. There is one writer per store; a call is atomic. `MemoryStore` implements it now; a durable store implements
the same protocol, which is why every method is a coroutine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chatserve.sessions.conversation import Message, MessageState


class ConversationStore(Protocol):
    """Conversations by tenant and id."""

    async def create(self, tenant: str, messages: Sequence[Message]) -> str:
        """Start a conversation with these messages (parents before children) and return its id."""
        ...

    async def append(self, tenant: str, conversation: str, messages: Sequence[Message]) -> None:
        """Add messages, all or none; each parent must be ``None``, already there, or earlier in ``messages``.

        Raises:
            NotFoundError: no such conversation of this tenant, or no such parent.
            InvalidRequestError: the conversation would exceed its limits.
        """
        ...

    async def finish(
        self,
        tenant: str,
        conversation: str,
        message: str,
        *,
        content: str,
        token_ids: bytes | None,
        state: MessageState,
    ) -> None:
        """Replace a running answer by what was delivered. Once; a finished message never changes.

        Raises:
            NotFoundError: the conversation or message is gone.
            ConflictError: the message is not running.
        """
        ...

    async def path(self, tenant: str, conversation: str, message: str) -> list[Message]:
        """The messages from the root to ``message``, both included.

        Raises:
            NotFoundError: no such conversation of this tenant, or no such message in it.
        """
        ...

    async def head(self, tenant: str, conversation: str) -> Message:
        """The message added last.

        Raises:
            NotFoundError: no such conversation of this tenant.
        """
        ...

    async def forget(self, tenant: str) -> None:
        """Drop all conversations of a tenant, which was deleted. Idempotent."""
        ...
