"""Answers are recalled exactly, within their scope only, and memory stays bounded."""

from __future__ import annotations

import random

from chatserve.scope import Scope
from chatserve.text.answer_memory import AnswerMemory

ONE, TWO = Scope("tenant", "one"), Scope("tenant", "two")


def ids(count: int) -> bytes:
    return bytes(4 * count)


def test_only_the_same_scope_and_text_recall() -> None:
    """Another tenant, another salt, or one more space finds nothing."""
    memory = AnswerMemory()
    memory.remember(ONE, "Hello", b"\1\0\0\0")
    assert memory.recall(ONE, "Hello") == b"\1\0\0\0"
    assert memory.recall(TWO, "Hello") is None
    assert memory.recall(Scope("tenant", "one", salt="x"), "Hello") is None
    assert memory.recall(ONE, "Hello ") is None


def test_latest_ids_win() -> None:
    """The same text generated again with other ids replaces the older ids and their count."""
    memory = AnswerMemory()
    memory.remember(ONE, "Hello", ids(5))
    memory.remember(ONE, "Hello", ids(2))
    assert memory.recall(ONE, "Hello") == ids(2)
    assert (len(memory), memory.num_tokens) == (1, 2)


def test_least_recently_used_goes_first() -> None:
    """A recalled answer outlives one that nobody asked for."""
    memory = AnswerMemory(max_answers=2)
    memory.remember(ONE, "a", ids(1))
    memory.remember(ONE, "b", ids(1))
    assert memory.recall(ONE, "a") is not None
    memory.remember(ONE, "c", ids(1))
    assert memory.recall(ONE, "b") is None
    assert memory.recall(ONE, "a") is not None


def test_bounds_hold_under_random_use() -> None:
    """Entries and tokens never exceed their limits, and the token count is the sum of what is there."""
    rng = random.Random(8)
    memory = AnswerMemory(max_answers=20, max_tokens=100)
    sizes: dict[str, int] = {}
    for _ in range(5000):
        text, count = str(rng.randrange(60)), rng.randrange(120)
        if rng.random() < 0.5:
            memory.remember(ONE, text, ids(count))
            sizes[text] = count
        else:
            found = memory.recall(ONE, text)
            assert found is None or len(found) == 4 * sizes[text]
        assert len(memory) <= 20
        assert memory.num_tokens <= 100
    held = [memory.recall(ONE, str(n)) for n in range(60)]
    assert memory.num_tokens == sum(len(found) // 4 for found in held if found is not None)


def test_what_cannot_fit_or_match_is_not_kept() -> None:
    """An answer beyond the whole budget evicts nothing; an empty text is no key."""
    memory = AnswerMemory(max_tokens=10)
    memory.remember(ONE, "a", ids(4))
    memory.remember(ONE, "b", ids(11))
    memory.remember(ONE, "", ids(1))
    assert memory.recall(ONE, "a") == ids(4)
    assert memory.recall(ONE, "b") is None
    assert memory.recall(ONE, "") is None


def test_a_purge_forgets_one_tenant() -> None:
    """With all its salts; others' answers, and the count of tokens, stay right."""
    memory = AnswerMemory()
    salted = Scope("tenant", "one", salt="x")
    for scope, count in ((ONE, 3), (salted, 4), (TWO, 5), (Scope("public"), 6)):
        memory.remember(scope, "a", ids(count))
    memory.forget("one")
    assert memory.recall(ONE, "a") is memory.recall(salted, "a") is None
    assert memory.recall(TWO, "a") == ids(5)
    assert (len(memory), memory.num_tokens) == (2, 11)


def test_a_flood_forgets_its_own() -> None:
    """A tenant with few answers keeps them, however many another has, and under however many salts."""
    memory = AnswerMemory(max_answers=50, max_tokens=400)
    for i in range(5):
        memory.remember(TWO, str(i), ids(10))
    for i in range(500):
        memory.remember(Scope("tenant", "one", salt=str(i % 7)), str(i), ids(1 + i % 13))
        assert len(memory) <= 50
        assert memory.num_tokens <= 400
    assert all(memory.recall(TWO, str(i)) == ids(10) for i in range(5))
    memory.forget("one")
    assert (len(memory), memory.num_tokens) == (5, 50)


def test_what_is_unused_for_a_day_goes_before_the_fullest_pays() -> None:
    """Nothing goes while there is room; then the unused, of whoever has least; a recall counts as use."""
    now = 0.0
    memory = AnswerMemory(max_answers=8, clock=lambda: now)
    for text in ("left", "asked for"):
        memory.remember(TWO, text, ids(3))
    for i in range(5):
        memory.remember(ONE, str(i), ids(3))
    now = 86_000.0
    assert memory.recall(TWO, "asked for") is not None
    assert all(memory.recall(ONE, str(i)) is not None for i in range(5))
    now = 86_401.0
    memory.remember(ONE, "5", ids(3))
    assert len(memory) == 8
    memory.remember(ONE, "6", ids(3))
    assert (len(memory), memory.num_tokens) == (8, 24)
    assert memory.recall(TWO, "left") is None
    assert memory.recall(TWO, "asked for") == ids(3)
    assert all(memory.recall(ONE, str(i)) == ids(3) for i in range(7))
