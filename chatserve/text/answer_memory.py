"""Remembers which token ids were behind recent answers, for clients that send a conversation's text every time.

Text does not determine ids: the same answer may be retokenised differently from how it was generated, and then its
cached KV blocks are not found. Keyed by scope and exact text, so one tenant's ids never enter another's prompt.
Written and read by `chatserve.server.generation_service`, told of deleted tenants by `chatserve.server.tenant_sync`;
bounded, in memory, forgotten on restart.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable

from chatserve.scope import Scope

BYTES_PER_TOKEN = 4

UNUSED_SECONDS = 86_400.0
"""What nobody asked for in so long goes first when room is needed, whoever's it is."""


class _Shelf:
    """What one owner has: ids by scope and text, with when they were last used, the oldest first; and how many."""

    __slots__ = ("answers", "num_tokens")

    def __init__(self) -> None:
        self.answers: OrderedDict[tuple[Scope, str], tuple[bytes, float]] = OrderedDict()
        self.num_tokens = 0


class AnswerMemory:
    """Bounded by number of answers and by their tokens in all.

    Where room is needed, what was not used for a day goes; then the owner that has most loses its oldest.

    Args:
        clock: seconds of a steady clock.
    """

    def __init__(
        self,
        max_answers: int = 16_384,
        max_tokens: int = 4_194_304,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._shelves: dict[tuple[str, str], _Shelf] = {}
        self._num_answers = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_answers

    @property
    def num_tokens(self) -> int:
        """Tokens of all remembered answers."""
        return self._num_tokens

    def remember(self, scope: Scope, text: str, token_ids: bytes) -> None:
        """Keep the int32 ``token_ids`` of ``text``; the latest ids win where a text was generated twice."""
        self._pop(scope, text)
        num_tokens = len(token_ids) // BYTES_PER_TOKEN
        if not text or num_tokens > self._max_tokens:
            return
        shelf = self._shelves.setdefault((scope.kind, scope.owner), _Shelf())
        shelf.answers[scope, text] = token_ids, self._clock()
        shelf.num_tokens += num_tokens
        self._num_answers += 1
        self._num_tokens += num_tokens
        self._make_room()

    def recall(self, scope: Scope, text: str) -> bytes | None:
        """The ids behind ``text``, or ``None`` if it is not known in exactly this scope."""
        shelf = self._shelves.get((scope.kind, scope.owner))
        if shelf is None or (scope, text) not in shelf.answers:
            return None
        token_ids, _ = shelf.answers.pop((scope, text))
        shelf.answers[scope, text] = token_ids, self._clock()
        return token_ids

    def forget(self, tenant: str) -> None:
        """Forget everything remembered in a tenant's private scopes."""
        shelf = self._shelves.pop(("tenant", tenant), _Shelf())
        self._num_answers -= len(shelf.answers)
        self._num_tokens -= shelf.num_tokens

    def _make_room(self) -> None:
        if not self._over():
            return
        unused_since = self._clock() - UNUSED_SECONDS
        for shelf in list(self._shelves.values()):
            unused = itertools.takewhile(lambda answer: answer[1][1] < unused_since, shelf.answers.items())
            for key, _ in list(unused):
                self._pop(*key)
        while self._over():
            too_many = self._num_answers > self._max_answers
            fullest = max(self._shelves.values(), key=lambda s: len(s.answers) if too_many else s.num_tokens)
            self._pop(*next(iter(fullest.answers)))

    def _over(self) -> bool:
        return self._num_answers > self._max_answers or self._num_tokens > self._max_tokens

    def _pop(self, scope: Scope, text: str) -> None:
        owner = (scope.kind, scope.owner)
        shelf = self._shelves.get(owner)
        if shelf is None or (scope, text) not in shelf.answers:
            return
        num_tokens = len(shelf.answers.pop((scope, text))[0]) // BYTES_PER_TOKEN
        shelf.num_tokens -= num_tokens
        self._num_tokens -= num_tokens
        self._num_answers -= 1
        if not shelf.answers:
            del self._shelves[owner]
