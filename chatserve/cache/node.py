"""One edge of the prefix tree, the node below it, and how that node finds its children.

A node knows its run and its children; what a run means, where it may be cut and what its blocks cost is
`RadixTree`'s part, which alone writes here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

TOKEN_BYTES = 4


class Node:
    """A run of tokens and where its KV lies.

        run:  [ device blocks ][ host blocks ]      one cut; what hangs below host blocks is on the host too
              0        len(blocks)        length

    Attributes:
        scope: interned scope that owns the run; -1 only at the root.
        start: depth of the run's first block, in blocks from the root.
        tokens: int32 bytes of the run. Shorter than a block only in a partial node, which is a leaf.
        blocks: device block ids.
        host_blocks: host block ids of the rest of the run.
        children: (scope, hash of first block) to the nodes of that bucket; whole-block children only.
        ordered: per scope the first blocks' bytes and the nodes, sorted; partial children too.
        num_device_children: children whose run begins on the device.
        last_used: logical time of the last match or publication that passed here.
    """

    __slots__ = (
        "blocks",
        "children",
        "host_blocks",
        "last_used",
        "num_device_children",
        "ordered",
        "parent",
        "scope",
        "start",
        "tokens",
    )

    def __init__(self, parent: Node | None, scope: int, start: int, tokens: bytearray) -> None:
        self.parent = parent
        self.scope = scope
        self.start = start
        self.tokens = tokens
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.children: dict[tuple[int, int], list[Node]] = {}
        self.ordered: dict[int, tuple[list[bytes], list[Node]]] = {}
        self.num_device_children = 0
        self.last_used = 0

    @property
    def length(self) -> int:
        """Blocks of the run, on either tier."""
        return len(self.blocks) + len(self.host_blocks)

    # ------------------------------------------------------------------ children

    def exact_child(self, scope: int, first: bytes, key: int) -> Node | None:
        """The child of ``scope`` whose run begins with the whole block ``first``, of hash ``key``."""
        bucket = self.children.get((scope, key))
        if bucket is not None:
            for child in bucket:
                # The hash only finds the bucket: tokens are compared, and the scope is part of the key.
                if child.tokens.startswith(first):
                    return child
        return None

    def nearest_child(self, scope: int, first: bytes) -> tuple[Node | None, int]:
        """The child of ``scope`` whose first block shares most with ``first``, and how many bytes.

        Sorted by bytes, so the longest common prefix is that of a neighbour. Among equals the shorter, partial node
        wins where it is one: its block may be taken over instead of copied.
        """
        entry = self.ordered.get(scope)
        if entry is None or not first:
            return None, 0
        keys, nodes = entry
        at = bisect_left(keys, first)
        best: Node | None = None
        best_same = 0
        for i in (at - 1, at):
            if 0 <= i < len(keys):
                same = common_prefix(keys[i], 0, first, 0)
                if same > best_same:
                    best, best_same = nodes[i], same
        return best, best_same

    def partial_children(self, scope: int, first: bytes) -> list[Node]:
        """The partial children of ``scope`` whose tokens are a proper prefix of ``first``."""
        entry = self.ordered.get(scope)
        if entry is None:
            return []
        keys, nodes = entry
        found = []
        # One bisection per possible length: siblings may be many, and all begin with the same token.
        for length in range(TOKEN_BYTES, len(first), TOKEN_BYTES):
            prefix = first[:length]
            at = bisect_left(keys, prefix)
            if at < len(keys) and keys[at] == prefix:
                found.append(nodes[at])
        return found

    def iter_children(self) -> Iterator[Node]:
        """All children, of every scope."""
        for _, nodes in self.ordered.values():
            yield from nodes

    def link(self, child: Node, first: bytes, key: int | None) -> None:
        """Add a child whose run begins with ``first``; ``key`` is that block's hash, ``None`` for a partial one."""
        if child.blocks:
            self.num_device_children += 1
        if key is not None:
            self.children.setdefault((child.scope, key), []).append(child)
        keys, nodes = self.ordered.setdefault(child.scope, ([], []))
        at = bisect_left(keys, first)
        keys.insert(at, first)
        nodes.insert(at, child)

    def unlink(self, child: Node, first: bytes, key: int | None) -> None:
        """Remove a child; the arguments are those it was linked with."""
        if child.blocks:
            self.num_device_children -= 1
        if key is not None:
            bucket = self.children[child.scope, key]
            bucket.remove(child)
            if not bucket:
                del self.children[child.scope, key]
        keys, nodes = self.ordered[child.scope]
        at = bisect_left(keys, first)
        while nodes[at] is not child:
            at += 1
        del keys[at]
        del nodes[at]
        if not keys:
            del self.ordered[child.scope]


def common_prefix(a: bytes | bytearray, a_start: int, b: bytes | bytearray, b_start: int) -> int:
    """Bytes, in whole tokens, that ``a`` from ``a_start`` and ``b`` from ``b_start`` have in common."""
    count = min(len(a) - a_start, len(b) - b_start)
    if count <= 0:
        return 0
    left, right = a[a_start : a_start + count], b[b_start : b_start + count]
    if left == right:
        return count
    words = count // TOKEN_BYTES
    differs = np.frombuffer(left, np.int32, words) != np.frombuffer(right, np.int32, words)
    return int(differs.argmax()) * TOKEN_BYTES
