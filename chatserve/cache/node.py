"""One edge of the prefix tree and the node below it: plain data that `RadixTree` writes."""

from __future__ import annotations

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
