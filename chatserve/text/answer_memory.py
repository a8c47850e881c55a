"""Remembers which token ids were behind recent answers, for clients that send a conversation's text every time.

Text does not determine ids: the same answer may be retokenised differently from how it was generated, and then its
cached KV blocks are not found. Keyed by scope and exact text, so one tenant's ids never enter another's prompt.
Written and read by `chatserve.server.generation_service`; bounded, in memory, forgotten on restart.
"""

from __future__ import annotations

from collections import OrderedDict

from chatserve.scope import Scope

BYTES_PER_TOKEN = 4


class _Shelf:
    """What one owner has: ids by scope and text, least recently used first, and how many there are."""

    __slots__ = ("answers", "num_tokens")

    def __init__(self) -> None:
        self.answers: OrderedDict[tuple[Scope, str], bytes] = OrderedDict()
        self.num_tokens = 0

    def pop(self, key: tuple[Scope, str]) -> int:
        """Forget an answer if it is known; its tokens."""
        num_tokens = len(self.answers.pop(key, b"")) // BYTES_PER_TOKEN
        self.num_tokens -= num_tokens
        return num_tokens


class AnswerMemory:
    """Bounded by number of answers and by their tokens in all; the owner that has most loses its oldest first."""

    def __init__(self, max_answers: int = 16_384, max_tokens: int = 4_194_304) -> None:
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
        shelf.answers[scope, text] = token_ids
        shelf.num_tokens += num_tokens
        self._num_answers += 1
        self._num_tokens += num_tokens
        while (too_many := self._num_answers > self._max_answers) or self._num_tokens > self._max_tokens:
            fullest = max(self._shelves.values(), key=lambda s: len(s.answers) if too_many else s.num_tokens)
            self._pop(*next(iter(fullest.answers)))

    def recall(self, scope: Scope, text: str) -> bytes | None:
        """The ids behind ``text``, or ``None`` if it is not known in exactly this scope."""
        shelf = self._shelves.get((scope.kind, scope.owner))
        if shelf is None or (scope, text) not in shelf.answers:
            return None
        shelf.answers.move_to_end((scope, text))
        return shelf.answers[scope, text]

    def forget(self, tenant: str) -> None:
        """Forget everything remembered in a tenant's private scopes."""
        shelf = self._shelves.pop(("tenant", tenant), _Shelf())
        self._num_answers -= len(shelf.answers)
        self._num_tokens -= shelf.num_tokens

    def _pop(self, scope: Scope, text: str) -> None:
        owner = (scope.kind, scope.owner)
        shelf = self._shelves.get(owner)
        if shelf is None or (scope, text) not in shelf.answers:
            return
        self._num_tokens -= shelf.pop((scope, text))
        self._num_answers -= 1
        if not shelf.answers:
            del self._shelves[owner]
