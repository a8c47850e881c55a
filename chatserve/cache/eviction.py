"""Nodes of the prefix tree, and the order in which their blocks are given up.

Least recently used first, in logical time. Found incrementally: a heap with one entry per node that may be
evictable, corrected lazily, so that eviction never walks the tree. `RadixTree` is the only caller.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Node:
    """One edge and the node below it.

    Attributes:
        scope: interned scope that owns the run; -1 only at the root.
        start: depth of the run's first block, in blocks from the root.
        tokens: int32 bytes of the run. Shorter than a block only in a partial node, which is a leaf.
        blocks: the run's block ids.
        children: (scope, hash of first block) to the nodes of that bucket; whole-block children only.
        ordered: per scope the first blocks' bytes and the nodes, sorted; partial children too.
        last_used: logical time of the last match or release that passed here.
        queued: an entry of the eviction heap points here.
    """

    __slots__ = ("blocks", "children", "last_used", "ordered", "parent", "queued", "scope", "start", "tokens")

    def __init__(self, parent: Node | None, scope: int, start: int, tokens: bytearray, blocks: list[int]) -> None:
        self.parent = parent
        self.scope = scope
        self.start = start
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[tuple[int, int], list[Node]] = {}
        self.ordered: dict[int, tuple[list[bytes], list[Node]]] = {}
        self.last_used = 0
        self.queued = False


class EvictionOrder:
    """The evictable nodes, oldest first; O(log n) per node touched."""

    def __init__(self, is_evictable: Callable[[Node], bool]) -> None:
        self._is_evictable = is_evictable
        self._heap: list[tuple[int, int, Node]] = []
        self._ties = 0

    def note(self, node: Node) -> None:
        """``node`` may have become evictable."""
        if not node.queued and self._is_evictable(node):
            node.queued = True
            self._push(node)

    def oldest(self) -> Node | None:
        """The evictable node that was used longest ago; it stays queued."""
        heap = self._heap
        while heap:
            last_used, _, node = heap[0]
            if not self._is_evictable(node):
                # It was held again, got children or is gone; whoever ends that state notes it anew.
                heapq.heappop(heap)
                node.queued = False
            elif node.last_used != last_used:
                # Used since it was queued. Times only rise, so the entry was early, never late.
                heapq.heappop(heap)
                self._push(node)
            else:
                return node
        return None

    def _push(self, node: Node) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (node.last_used, self._ties, node))
