"""What a load asks: conversations of token ids, who asks them, and when they begin.

Everything random comes from one generator, so that the same seed gives the same work to every server. A prompt is
given as token ids and its first token is used once only, so nothing is found in a cache except where sharing is the
point. Follow-up turns contain *recorded* replies drawn beforehand, never the server's own: two servers that answer
differently still get the same tokens. Knows nothing of servers or of time passing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

FIRST_TOKEN = 1000
"""Ids below are control tokens and bytes."""

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True)
class Tenant:
    """Somebody with a key of their own.

    Attributes:
        weight: share of the conversations, relative to the other tenants.
    """

    name: str = ""
    api_key: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Conversation:
    """One or several turns of the same speaker.

    Attributes:
        users: what is new in each turn; the first may begin with a shared prefix.
        replies: the recorded answer to each turn but the last.
        pauses: seconds between an answer and the next turn.
    """

    users: tuple[tuple[int, ...], ...]
    replies: tuple[tuple[int, ...], ...]
    pauses: tuple[float, ...]
    max_tokens: int
    tenant: Tenant = field(default_factory=Tenant)

    def prompt(self, turn: int) -> list[int]:
        """Token ids of the whole history that turn number ``turn`` sends."""
        ids: list[int] = []
        for user, reply in zip(self.users[:turn], self.replies, strict=False):
            ids += [*user, *reply]
        return ids + list(self.users[turn])

    @property
    def num_tokens(self) -> int:
        """Length of the history when the last answer is complete."""
        return len(self.prompt(len(self.users) - 1)) + self.max_tokens


def text_of(ids: Sequence[int]) -> str:
    """Words in place of ids, for servers that take no ids: about one token each."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in ids)


class Prompts:
    """Random token ids of one vocabulary, reproducible from a seed."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._first = self._rng.permutation(np.arange(FIRST_TOKEN, vocab_size))
        self._used = 0

    def fresh(self, length: int) -> tuple[int, ...]:
        """Ids whose first no earlier prompt began with.

        Raises:
            RuntimeError: every id has been a first one.
        """
        if self._used == len(self._first):
            raise RuntimeError("there are no more first tokens; use another seed for the next run")
        first = int(self._first[self._used])
        self._used += 1
        rest = self._rng.integers(FIRST_TOKEN, self._vocab_size, max(0, length - 1))
        return (first, *rest.tolist())[:length]

    def conversations(
        self,
        count: int,
        *,
        prompt_tokens: int,
        output_tokens: int,
        shared: Sequence[int] = (),
        turns: int = 1,
        turn_tokens: int = 32,
        mean_pause: float = 0.0,
        tenants: Sequence[Tenant] = (Tenant(),),
    ) -> list[Conversation]:
        """``count`` conversations over the tenants in proportion to their weights.

        Args:
            prompt_tokens: of the first turn, beside ``shared``, which every conversation begins with.
            turn_tokens: of each later turn. Recorded replies are as long as real ones, ``output_tokens``.
            mean_pause: of the exponentially distributed time before each later turn, in seconds.
        """
        weights = np.array([tenant.weight for tenant in tenants], float)
        speakers = self._rng.choice(len(tenants), count, p=weights / weights.sum())
        made = []
        for speaker in speakers.tolist():
            users = [(*shared, *self.fresh(prompt_tokens)), *(self.fresh(turn_tokens) for _ in range(turns - 1))]
            replies = [self.fresh(output_tokens) for _ in range(turns - 1)]
            pauses = self._rng.exponential(mean_pause, turns - 1) if mean_pause else np.zeros(turns - 1)
            made.append(
                Conversation(tuple(users), tuple(replies), tuple(pauses.tolist()), output_tokens, tenants[speaker])
            )
        return made

    def poisson(self, count: int, rate: float) -> list[float]:
        """Start times, in seconds from the beginning, of a Poisson process with ``rate`` starts per second."""
        return np.cumsum(self._rng.exponential(1.0 / rate, count)).tolist()  # type: ignore[no-any-return]
