"""Remembers which token ids were behind recent answers, for clients that send a conversation's text every time.

Text does not determine ids: the same answer may be retokenised differently from how it was generated, and then its
cached KV blocks are not found. Keyed by scope and exact text, so one tenant's ids never enter another's prompt.
Written and read by `chatserve.server.generation_service`; bounded, in memory, forgotten on restart.
"""

from __future__ import annotations

from collections import OrderedDict

from chatserve.scope import Scope

BYTES_PER_TOKEN = 4


class AnswerMemory:
    """Least recently used answers go first, by number of answers and by their tokens in all."""

    def __init__(self, max_answers: int = 16_384, max_tokens: int = 4_194_304) -> None:
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._answers: OrderedDict[tuple[Scope, str], bytes] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_tokens(self) -> int:
        """Tokens of all remembered answers."""
        return self._num_tokens

    def remember(self, scope: Scope, text: str, token_ids: bytes) -> None:
        """Keep the int32 ``token_ids`` of ``text``; the latest ids win where a text was generated twice."""
        key = (scope, text)
        self._num_tokens -= len(self._answers.pop(key, b"")) // BYTES_PER_TOKEN
        num_tokens = len(token_ids) // BYTES_PER_TOKEN
        if not text or num_tokens > self._max_tokens:
            return
        self._answers[key] = token_ids
        self._num_tokens += num_tokens
        while len(self._answers) > self._max_answers or self._num_tokens > self._max_tokens:
            _, forgotten = self._answers.popitem(last=False)
            self._num_tokens -= len(forgotten) // BYTES_PER_TOKEN

    def recall(self, scope: Scope, text: str) -> bytes | None:
        """The ids behind ``text``, or ``None`` if it is not known in exactly this scope."""
        key = (scope, text)
        token_ids = self._answers.get(key)
        if token_ids is not None:
            self._answers.move_to_end(key)
        return token_ids

    def forget(self, tenant: str) -> None:
        """Forget everything remembered in a tenant's private scopes."""
        gone = [key for key in self._answers if key[0].kind == "tenant" and key[0].owner == tenant]
        for key in gone:
            self._num_tokens -= len(self._answers.pop(key)) // BYTES_PER_TOKEN
