"""Ends a stream of text at a stop string, whatever pieces the text comes in.

Follows all stop strings at once with the automaton of Aho and Corasick ("Efficient string matching", 1975), so the
cost per character does not depend on how many there are, and the automaton's depth is exactly the number of
characters that must be held back. Used per choice by the server; knows no tokens.
"""

from __future__ import annotations

from collections import deque

import msgspec

from chatserve.errors import InvalidRequestError

MAX_STOP_CHARACTERS = 8192


class _Node(msgspec.Struct, gc=True):
    """A prefix of some stop string.

    Attributes:
        depth: its length.
        fallback: the longest proper suffix of it that is such a prefix, too; ``None`` at the root.
        stop: the longest stop string that ends here.
    """

    depth: int
    children: dict[str, _Node] = {}
    fallback: _Node | None = None
    stop: str | None = None


class StopAutomaton:
    """The stop strings of one request, compiled once for all of its streams.

    Attributes:
        root: where a stream starts. Nothing changes it or what hangs below it any more.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """
        Raises:
            InvalidRequestError: an empty stop string, or more than ``MAX_STOP_CHARACTERS`` in all.
        """
        if not all(stops):
            raise InvalidRequestError("A stop string must not be empty.", param="stop")
        if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"Stop strings may have {MAX_STOP_CHARACTERS} characters in all; send shorter ones.", param="stop"
            )
        self.root = _automaton(stops)


class StopMatcher:
    """Watches one stream.

    The stop that is complete first wins; of those complete at the same character, the longest. Text is held back
    only as far as it is a proper prefix of a stop.

    Attributes:
        matched: the stop string that ended the text, once it has.
    """

    def __init__(self, stops: tuple[str, ...] | StopAutomaton, include: bool = False) -> None:
        """
        Args:
            stops: compiled ones may be shared by any number of streams.
            include: the stop string itself is shown, too.

        Raises:
            InvalidRequestError: see `StopAutomaton`.
        """
        self.matched: str | None = None
        self._include = include
        self._root = stops.root if isinstance(stops, StopAutomaton) else StopAutomaton(stops).root
        self._node = self._root
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be shown now; once a stop has matched, what lies before it (or through it), then nothing.

        Args:
            text: the next piece of the stream, of any length.
        """
        if self.matched is not None:
            return ""
        root, node = self._root, self._node
        if not root.children:
            return text
        for position, character in enumerate(text):
            child = node.children.get(character)
            while child is None and node.fallback is not None:
                node = node.fallback
                child = node.children.get(character)
            node = child or root
            if node.stop is not None:
                self.matched = node.stop
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(node.stop)]
        self._node = node
        text = self._held + text
        cut = len(text) - node.depth
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text held back, when the stream ends without a match."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for character, child in node.children.items():
            suffix = node.fallback
            while suffix is not None and character not in suffix.children:
                suffix = suffix.fallback
            child.fallback = root if suffix is None else suffix.children[character]
            child.stop = child.stop or child.fallback.stop
            queue.append(child)
    return root
