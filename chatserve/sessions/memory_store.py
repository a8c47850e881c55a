"""Conversations in memory, bounded in number and bytes.

Where room is needed, what was not used for a day goes; then the tenant that has most loses its oldest first. One
conversation may have an eighth of the room: its tenant could not pay for it with anything else.
Knows messages only. Not durable: a restart forgets everything, and clients are told by a new boot id. Called from one
event loop, by the WebSocket hub; no method waits, so each is atomic.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from chatserve.errors import ConflictError, InvalidRequestError, NotFoundError
from chatserve.sessions.conversation import Message, MessageState, new_id

UNUSED_SECONDS = 86_400.0
"""What nobody used in so long goes first when room is needed, whoever's it is."""


class _Conversation:
    __slots__ = ("head", "messages", "num_bytes", "tenant", "used")

    def __init__(self, tenant: str, used: float) -> None:
        self.tenant = tenant
        self.messages: dict[str, Message] = {}
        self.num_bytes = 0
        self.head = ""
        self.used = used


class _Shelf:
    """What one tenant has: its conversations, least recently used first, and their bytes."""

    __slots__ = ("num_bytes", "order")

    def __init__(self) -> None:
        self.order: OrderedDict[str, None] = OrderedDict()
        self.num_bytes = 0


class MemoryStore:
    """A `ConversationStore` without persistence.

    Args:
        max_conversations: conversations kept over all tenants.
        max_bytes: bytes of messages kept over all tenants (see `Message.num_bytes`). One conversation takes no more
            messages beyond an eighth of it.
        max_messages: messages one conversation may hold.
        clock: seconds of a steady clock.
    """

    def __init__(
        self,
        *,
        max_conversations: int = 4096,
        max_bytes: int = 256 * 2**20,
        max_messages: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._max_bytes_each = max_bytes // 8
        self._max_messages = max_messages
        self._conversations: dict[str, _Conversation] = {}
        self._shelves: dict[str, _Shelf] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes charged for all messages."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._conversations)

    async def create(self, tenant: str, messages: Sequence[Message]) -> str:
        """See `ConversationStore.create`."""
        identifier = new_id("c")
        conversation = _Conversation(tenant, self._clock())
        self._insert(conversation, messages)
        self._conversations[identifier] = conversation
        self._shelves[tenant].order[identifier] = None
        self._evict(keep=identifier)
        return identifier

    async def append(self, tenant: str, conversation: str, messages: Sequence[Message]) -> None:
        """See `ConversationStore.append`."""
        self._insert(self._owned(tenant, conversation), messages)
        self._evict(keep=conversation)

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
        """See `ConversationStore.finish`."""
        owned = self._owned(tenant, conversation)
        before = _message(owned, message)
        if before.state != "running":
            raise ConflictError(f"Message {message} is already {before.state}; start a new one.", code="already_done")
        after = msgspec.structs.replace(before, content=content, token_ids=token_ids, state=state)
        owned.messages[message] = after
        self._charge(owned, after.num_bytes - before.num_bytes)
        self._evict(keep=conversation)

    async def path(self, tenant: str, conversation: str, message: str) -> list[Message]:
        """See `ConversationStore.path`."""
        owned = self._owned(tenant, conversation)
        found = [_message(owned, message)]
        while (parent := found[-1].parent) is not None:
            found.append(owned.messages[parent])
        found.reverse()
        return found

    async def head(self, tenant: str, conversation: str) -> Message:
        """See `ConversationStore.head`."""
        owned = self._owned(tenant, conversation)
        return owned.messages[owned.head]

    async def forget(self, tenant: str) -> None:
        """See `ConversationStore.forget`."""
        shelf = self._shelves.get(tenant)
        for identifier in list(shelf.order) if shelf is not None else ():
            self._remove(identifier)

    def _owned(self, tenant: str, identifier: str) -> _Conversation:
        conversation = self._conversations.get(identifier)
        if conversation is None or conversation.tenant != tenant:
            raise NotFoundError("No such conversation; it may have been forgotten. Start a new one.", param="conv")
        self._shelves[tenant].order.move_to_end(identifier)
        conversation.used = self._clock()
        return conversation

    def _insert(self, conversation: _Conversation, messages: Sequence[Message]) -> None:
        known = set(conversation.messages)
        for message in messages:
            if message.parent is not None and message.parent not in known:
                raise NotFoundError("No such message in this conversation to continue from.", param="parent")
            known.add(message.id)
        if len(known) > self._max_messages:
            raise InvalidRequestError(
                f"This conversation would have more than {self._max_messages} messages; start a new one.",
                code="conversation_full",
            )
        added = sum(message.num_bytes for message in messages)
        if conversation.num_bytes + added > self._max_bytes_each:
            raise InvalidRequestError(
                f"This conversation would need more than {self._max_bytes_each} bytes; start a new one.",
                code="conversation_full",
            )
        for message in messages:
            conversation.messages[message.id] = message
            conversation.head = message.id
        self._charge(conversation, added)

    def _charge(self, conversation: _Conversation, num_bytes: int) -> None:
        conversation.num_bytes += num_bytes
        self._shelves.setdefault(conversation.tenant, _Shelf()).num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _evict(self, *, keep: str) -> None:
        """Make room: what is unused, then from whoever has most of what there is too much of; never the one in hand."""
        if not self._over():
            return
        unused_since = self._clock() - UNUSED_SECONDS
        for shelf in list(self._shelves.values()):
            unused = itertools.takewhile(lambda name: self._conversations[name].used < unused_since, shelf.order)
            for identifier in list(unused):
                self._remove(identifier)
        while self._over():
            shelves = [shelf for shelf in self._shelves.values() if len(shelf.order) > 1 or keep not in shelf.order]
            if not shelves:
                return
            too_many = len(self._conversations) > self._max_conversations
            fullest = max(shelves, key=lambda shelf: len(shelf.order) if too_many else shelf.num_bytes)
            # The one in hand was touched last, so it is not the first of two.
            self._remove(next(iter(fullest.order)))

    def _over(self) -> bool:
        return len(self._conversations) > self._max_conversations or self._num_bytes > self._max_bytes

    def _remove(self, identifier: str) -> None:
        conversation = self._conversations.pop(identifier)
        shelf = self._shelves[conversation.tenant]
        del shelf.order[identifier]
        shelf.num_bytes -= conversation.num_bytes
        self._num_bytes -= conversation.num_bytes
        if not shelf.order:
            del self._shelves[conversation.tenant]


def _message(conversation: _Conversation, identifier: str) -> Message:
    message = conversation.messages.get(identifier)
    if message is None:
        raise NotFoundError("No such message in this conversation.", param="parent")
    return message
