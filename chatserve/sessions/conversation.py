"""What a conversation is made of: immutable messages that point at their parent, so that edits are branches.

Plain data. Knows neither storage nor generation: `ConversationStore` implementations keep these, and the server
creates them. An assistant message remembers the token ids behind its text, so that the next turn reuses their KV
blocks instead of retokenising.
"""

from __future__ import annotations

import secrets
import time
from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]
MessageState = Literal["running", "complete", "cancelled", "failed"]


class Message(msgspec.Struct, frozen=True):
    """One node of a conversation.

    Attributes:
        parent: the message before it; ``None`` for a root.
        content: the text; for an answer, exactly what was delivered. Empty while it is running.
        token_ids: int32 ids that decode to ``content`` exactly; ``None`` where they are not known.
        state: only an answer is ever anything but ``complete``.
        created_ms: Unix time in milliseconds.
    """

    id: str
    parent: str | None
    role: Role
    content: str
    token_ids: bytes | None = None
    state: MessageState = "complete"
    created_ms: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory this message is charged for, in bytes (at most four per character, ids and a flat overhead)."""
        return 4 * len(self.content) + len(self.token_ids or b"") + _MESSAGE_OVERHEAD


_MESSAGE_OVERHEAD = 512


def new_message(role: Role, content: str, *, parent: str | None, state: MessageState = "complete") -> Message:
    """A message with a fresh unguessable id, created now."""
    return Message(
        id=new_id("m"), parent=parent, role=role, content=content, state=state, created_ms=time.time_ns() // 10**6
    )


def new_id(kind: str) -> str:
    """An unguessable id that says what it names: ``m_…``, ``c_…`` (96 random bits)."""
    return f"{kind}_{secrets.token_hex(12)}"
