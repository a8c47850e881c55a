"""Stop strings never leak and text is never held longer than it must be."""

from __future__ import annotations

import random

import pytest

from chatserve.errors import InvalidRequestError
from chatserve.text.stop_strings import MAX_STOP_CHARACTERS, StopAutomaton, StopMatcher
from tests.line_trace import lines_run


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Text before the first stop to be complete (the longest of those complete at one place), and that stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def longest_held(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of a stop."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


def test_random_streams_against_a_plain_search() -> None:
    """2*10^4 random texts, cut at random, with up to four overlapping stops: same text, same stop, least holding."""
    rng = random.Random(7)
    matched = 0
    for _ in range(20_000):
        alphabet = "ab" if rng.random() < 0.5 else "abc 🙂"
        stops = tuple("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 4)))
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 30)))
        include = rng.random() < 0.3
        matcher = StopMatcher(stops, include)
        before, stop = reference(text, stops)
        shown, fed, position = "", "", 0
        while position < len(text):
            piece = text[position : position + rng.randint(0, 5)]
            position += len(piece)
            fed += piece
            shown += matcher.push(piece)
            assert (before + (stop or "") if include else before).startswith(shown)
            if matcher.matched is None:
                assert len(shown) == len(fed) - longest_held(fed, stops)
        shown += matcher.flush()
        assert matcher.matched == stop
        assert shown == (before + (stop or "") if include else before)
        matched += stop is not None
    assert 2000 < matched < 19_000


def test_a_stop_over_several_tokens_does_not_leak() -> None:
    """Tokens DEF, G, HI, J with stop DEFGHIJ show nothing; EFG is found inside and across tokens."""
    matcher = StopMatcher(("DEFGHIJ",))
    assert [matcher.push(token) for token in ("DEF", "G", "HI", "J", "more")] == [""] * 5
    assert matcher.matched == "DEFGHIJ"
    inside = StopMatcher(("EFG",))
    assert "".join(inside.push(token) for token in ("DEF", "G", "HI")) == "D"
    assert inside.matched == "EFG"


def test_held_text_comes_out_at_the_end() -> None:
    """An output that ends with the beginning of a stop is not cut short, and flushing twice adds nothing."""
    matcher = StopMatcher(("STOP",))
    assert matcher.push("go ST") == "go "
    assert matcher.flush() == "ST"
    assert matcher.flush() == ""
    assert matcher.matched is None


def test_nothing_is_held_without_need() -> None:
    """Where no stop can begin, every token is shown in its own step."""
    matcher = StopMatcher(("zzz",))
    tokens = ["The", " quick", " brown", " fox"]
    assert [matcher.push(token) for token in tokens] == tokens


def test_without_stops_text_passes() -> None:
    """No stop strings: nothing is held or matched."""
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""
    assert matcher.matched is None


def test_longest_of_the_stops_that_end_together() -> None:
    """Of two stops complete at the same character the longer one is cut out; a shorter one that is earlier wins."""
    together = StopMatcher(("b", "ab"))
    assert together.push("xab") == "x"
    assert together.matched == "ab"
    earlier = StopMatcher(("abc", "b"))
    assert earlier.push("xabc") == "xa"
    assert earlier.matched == "b"


def test_include_shows_the_stop_and_nothing_after() -> None:
    """With the stop included, the text ends exactly with it."""
    matcher = StopMatcher(("##",), include=True)
    assert matcher.push("a#") == "a"
    assert matcher.push("#b") == "##"
    assert matcher.push("c") == ""


@pytest.mark.parametrize("stops", [("",), ("a", ""), ("x" * (MAX_STOP_CHARACTERS + 1),)])
def test_impossible_stops_are_refused_by_name(stops: tuple[str, ...]) -> None:
    """Empty or enormous stop strings are the client's error, naming the field."""
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"


def test_cost_is_linear_on_the_worst_text() -> None:
    """Near-matches of long stops cost a bounded number of steps per character, however they overlap."""
    stops = tuple("a" * 500 + chr(ord("b") + n) for n in range(16))
    matcher = StopMatcher(stops)
    shown = sum(len(matcher.push("a")) for _ in range(50_000))
    assert shown == 50_000 - 500


def test_streams_share_what_was_compiled() -> None:
    """Streams over one automaton do not see each other, and 2,048 of them cost no more memory or time than one."""
    compiled = StopAutomaton(("x" * (MAX_STOP_CHARACTERS - 3), "END"))
    matchers = [StopMatcher(compiled) for _ in range(2048)]
    assert {id(matcher._root) for matcher in matchers} == {id(compiled.root)}
    assert len(lines_run(lambda: StopMatcher(compiled))) < 10
    first, second, *_ = matchers
    assert [first.push("aEN"), second.push("bE"), first.push("D"), second.push("x")] == ["a", "b", "", "E"]
    assert (first.matched, second.matched) == ("END", None)
