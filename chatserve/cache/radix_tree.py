"""The prefix cache: runs of tokens mapped to physical blocks, one tree for all scopes.

Path-compressed at block granularity: an edge carries a run of whole blocks (one contiguous int32 byte string
beside the list of block ids) and splits only at block boundaries. A partial block is always a leaf node of its
own. Children are found by (scope, hash of their first block); the hash is an index only, tokens and scope are
compared on every hit. Beside that map each scope's children are kept in the order of their first block's
tokens, so that the child sharing the longest part of a block is a neighbour found by bisection.

The tree knows tokens, scopes and logical time. It does not know sequences: from a block to its place in the
tree leads only `node_of`, which splits keep true.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.eviction import EvictionOrder, Node

TOKEN_BYTES = 4


class Match:
    """What of a token run is cached and visible.

    Attributes:
        blocks: whole blocks, in order.
        tail_block: a block whose first ``tail_tokens`` tokens continue the run, or ``None``. It is reused by
            copying, or taken over.
        tail_takeable: the tail is a partial node of the asker's own scope, matched to its end.
        num_tokens: all matched tokens, tail included.
    """

    __slots__ = ("blocks", "num_tokens", "tail_block", "tail_takeable", "tail_tokens")

    def __init__(self, blocks: list[int], num_tokens: int, tail_block: int | None, tail_tokens: int, takeable: bool):
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.tail_block = tail_block
        self.tail_tokens = tail_tokens
        self.tail_takeable = takeable


class RadixTree:
    """Maps token prefixes to blocks of one pool."""

    def __init__(self, pool: BlockPool, block_size: int, hash_block: Callable[[bytes], int]) -> None:
        self.pool = pool
        self.block_bytes = block_size * TOKEN_BYTES
        self._hash = hash_block
        self.root = Node(None, -1, 0, bytearray(), [])
        self.node_of: list[Node | None] = [None] * pool.num_blocks
        self.num_evictions = 0
        self._order = EvictionOrder(self.is_evictable)

    # ------------------------------------------------------------------ lookup

    def match(self, tokens: bytes, scopes: tuple[int, ...], now: int) -> Match:
        """Longest visible cached prefix of ``tokens``; the path is marked as used at ``now``.

        Args:
            tokens: int32 bytes; nothing beyond them is matched.
            scopes: interned scopes the asker may see, widest first. The walk goes down a wider scope and tries
                the narrower ones at every node; at equal length the wider one wins.
        """
        best_node, best_full, best_bytes = self.root, 0, 0
        tail: Node | None = None
        tail_index = 0
        stack: list[tuple[Node, int, int]] = [(self.root, 0, 0)]
        while stack:
            node, pos, level = stack.pop()
            deeper = []
            for index in range(level, len(scopes)):
                child, same = self._best_child(node, scopes[index], tokens, pos)
                if child is None:
                    continue
                full = same // self.block_bytes
                if pos + same > best_bytes:
                    best_bytes = pos + same
                    if full:
                        best_node, best_full = child, full
                    else:
                        best_node, best_full = node, len(node.blocks)
                    tail = child if same % self.block_bytes else None
                    tail_index = full
                if full == len(child.blocks):
                    deeper.append((child, pos + same, index))
            # Wider scopes are explored first, so that they win among equals.
            stack.extend(reversed(deeper))
        blocks = self._path_blocks(best_node, best_full)
        self._touch(tail or best_node, now)
        if tail is None:
            return Match(blocks, best_bytes // TOKEN_BYTES, None, 0, False)
        tail_bytes = best_bytes - len(blocks) * self.block_bytes
        takeable = tail.scope == scopes[-1] and len(tail.tokens) == tail_bytes and len(tail.blocks) == 1
        return Match(blocks, best_bytes // TOKEN_BYTES, tail.blocks[tail_index], tail_bytes // TOKEN_BYTES, takeable)

    def _best_child(self, node: Node, scope: int, tokens: bytes, pos: int) -> tuple[Node | None, int]:
        """The child of ``node`` in ``scope`` that shares most with ``tokens[pos:]``, and how many bytes."""
        first = tokens[pos : pos + self.block_bytes]
        if len(first) == self.block_bytes:
            child = self._child(node, scope, first)
            if child is not None:
                return child, common_prefix(child.tokens, 0, tokens, pos)
        entry = node.ordered.get(scope)
        if entry is None or not first:
            return None, 0
        keys, nodes = entry
        at = bisect_left(keys, first)
        best: Node | None = None
        best_same = 0
        # Sorted by bytes, so the longest common prefix is that of a neighbour. Among equals the partial node
        # wins (it sorts first): its block may be taken over instead of copied.
        for i in (at - 1, at):
            if 0 <= i < len(keys):
                same = common_prefix(keys[i], 0, first, 0)
                if same > best_same:
                    best, best_same = nodes[i], same
        return best, best_same

    def _child(self, node: Node, scope: int, first: bytes) -> Node | None:
        bucket = node.children.get((scope, self._hash(first)))
        if bucket is not None:
            for child in bucket:
                if child.tokens.startswith(first):
                    return child
        return None

    def _path_blocks(self, node: Node, count: int) -> list[int]:
        """Block ids from the root to the ``count``-th block of ``node``."""
        if node.parent is None or node.parent is self.root:
            return node.blocks[:count]
        runs = [node.blocks[:count]]
        above: Node | None = node.parent
        while above is not None:
            runs.append(above.blocks)
            above = above.parent
        return [block for run in reversed(runs) for block in run]

    def _touch(self, node: Node | None, now: int) -> None:
        while node is not None and node.last_used < now:
            node.last_used = now
            node = node.parent

    # ------------------------------------------------------------------ growth

    def publish(
        self, scopes: tuple[int, ...], prefix: Sequence[int], tokens: bytes, blocks: list[int], now: int
    ) -> list[int]:
        """Hang a run of whole blocks below a held prefix, in the narrowest of ``scopes``.

        Where the tree already has a visible run of the same tokens, its blocks are returned instead of the
        given ones, and the caller adopts them.

        Args:
            prefix: the blocks before the run; all of them are in the tree.
            tokens: int32 bytes of the run, exactly ``len(blocks)`` blocks.
            blocks: held by the caller.

        Returns:
            The tree's block for each position of the run.
        """
        size = self.block_bytes
        node = self.root
        if prefix:
            held = self.node_of[prefix[-1]]
            if held is None:
                raise RuntimeError("published below a block that is not in the tree")
            node = held
        offset = len(prefix) - node.start
        result: list[int] = []
        pos = 0
        while pos < len(tokens):
            if offset < len(node.blocks):
                same = common_prefix(node.tokens, offset * size, tokens, pos) // size
                result += node.blocks[offset : offset + same]
                pos += same * size
                offset += same
                if pos == len(tokens):
                    break
                if offset < len(node.blocks):
                    node = self._split(node, offset)
            child = None
            for scope in scopes:
                child = self._child(node, scope, tokens[pos : pos + size])
                if child is not None:
                    break
            if child is None:
                fresh = blocks[pos // size :]
                node = self._append(node, scopes[-1], tokens[pos:], fresh)
                result += fresh
                break
            node, offset = child, 0
        self._touch(node, now)
        return result

    def publish_tail(self, scopes: tuple[int, ...], prefix: Sequence[int], tokens: bytes, block: int, now: int) -> bool:
        """Hang a partial block below a held prefix, unless a visible run already covers its tokens.

        Returns:
            Whether the tree became a holder of ``block``.
        """
        node = self.root
        if prefix:
            held = self.node_of[prefix[-1]]
            if held is None:
                raise RuntimeError("published below a block that is not in the tree")
            node = held
        offset = len(prefix) - node.start
        if offset < len(node.blocks):
            if common_prefix(node.tokens, offset * self.block_bytes, tokens, 0) == len(tokens):
                return False
            node = self._split(node, offset)
        for scope in scopes:
            _, same = self._best_child(node, scope, tokens, 0)
            if same == len(tokens):
                return False
        self._drop_covered_partials(node, scopes[-1], tokens)
        child = Node(node, scopes[-1], node.start + len(node.blocks), bytearray(tokens), [block])
        self._link(child)
        self.pool.hold_cached(child.blocks)
        self.node_of[block] = child
        self._touch(child, now)
        return True

    def take_over(self, block: int) -> None:
        """A sequence becomes the owner of an idle partial tail: the tree forgets it, the block stays held."""
        node = self.node_of[block]
        if node is None:
            raise RuntimeError("a block that is not in the tree cannot be taken over")
        self._unlink(node)
        self.node_of[block] = None
        node.blocks = []
        self.pool.hand_over(block)
        self._note_parent(node)

    def _append(self, node: Node, scope: int, tokens: bytes, blocks: list[int]) -> Node:
        """Add a run below ``node``: in place where ``node`` is a leaf of the same scope, else as a child."""
        self._drop_covered_partials(node, scope, tokens)
        self.pool.hold_cached(blocks)
        if node is not self.root and node.scope == scope and not node.ordered:
            node.tokens += tokens
            node.blocks += blocks
        else:
            node = Node(node, scope, node.start + len(node.blocks), bytearray(tokens), list(blocks))
            self._link(node)
        node_of = self.node_of
        for block in blocks:
            node_of[block] = node
        return node

    def _drop_covered_partials(self, node: Node, scope: int, tokens: bytes) -> None:
        """Remove the partial children of ``node`` whose tokens are a prefix of ``tokens``."""
        entry = node.ordered.get(scope)
        if entry is None:
            return
        keys, nodes = entry
        first = tokens[: self.block_bytes]
        at = bisect_left(keys, first) - 1
        while at >= 0 and keys[at][:TOKEN_BYTES] == first[:TOKEN_BYTES]:
            if len(keys[at]) < self.block_bytes and first.startswith(keys[at]):
                self._remove_leaf(nodes[at])
            at -= 1

    def _split(self, node: Node, offset: int) -> Node:
        """Cut ``node``'s run before its block ``offset``; returns the new upper node.

        The lower part keeps its identity, so its children and its place in the heap stay valid.
        """
        cut = offset * self.block_bytes
        self._unlink(node)
        upper = Node(node.parent, node.scope, node.start, node.tokens[:cut], node.blocks[:offset])
        upper.last_used = node.last_used
        self._link(upper)
        node.parent = upper
        node.start += offset
        del node.tokens[:cut]
        del node.blocks[:offset]
        self._link(node)
        node_of = self.node_of
        for block in upper.blocks:
            node_of[block] = upper
        return upper

    def _link(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        first = bytes(node.tokens[: self.block_bytes])
        if len(first) == self.block_bytes:
            parent.children.setdefault((node.scope, self._hash(first)), []).append(node)
        keys, nodes = parent.ordered.setdefault(node.scope, ([], []))
        at = bisect_left(keys, first)
        keys.insert(at, first)
        nodes.insert(at, node)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        first = bytes(node.tokens[: self.block_bytes])
        if len(first) == self.block_bytes:
            key = (node.scope, self._hash(first))
            bucket = parent.children[key]
            bucket.remove(node)
            if not bucket:
                del parent.children[key]
        keys, nodes = parent.ordered[node.scope]
        at = bisect_left(keys, first)
        while nodes[at] is not node:
            at += 1
        del keys[at]
        del nodes[at]
        if not keys:
            del parent.ordered[node.scope]

    # ------------------------------------------------------------------ shrinking

    def note_idle(self, block: int) -> None:
        """Tell the tree that a holder of ``block`` may just have gone."""
        node = self.node_of[block]
        if node is not None:
            self._order.note(node)

    def _note_parent(self, node: Node) -> None:
        if node.parent is not None:
            self._order.note(node.parent)

    def is_evictable(self, node: Node) -> bool:
        """Whether the end of this run can be given up now: nothing hangs below it and nobody holds it."""
        return not node.ordered and bool(node.blocks) and self.pool.refs[node.blocks[-1]] == 1

    def evict(self, count: int) -> int:
        """Free up to ``count`` idle blocks, least recently used nodes first, each from its end.

        Returns:
            How many were freed. O(log nodes) per node touched, never a walk over the tree.
        """
        freed = 0
        refs = self.pool.refs
        while freed < count and (node := self._order.oldest()) is not None:
            keep = len(node.blocks)
            floor = max(0, keep - (count - freed))
            while keep > floor and refs[node.blocks[keep - 1]] == 1:
                keep -= 1
            freed += len(node.blocks) - keep
            self._cut(node, keep)
        self.num_evictions += freed
        return freed

    def _cut(self, node: Node, keep: int) -> None:
        """Give up all but the first ``keep`` blocks of a leaf."""
        if keep == 0:
            self._remove_leaf(node)
            return
        dropped = node.blocks[keep:]
        del node.blocks[keep:]
        del node.tokens[keep * self.block_bytes :]
        self._forget(dropped)

    def _remove_leaf(self, node: Node) -> None:
        self._unlink(node)
        dropped, node.blocks = node.blocks, []
        self._forget(dropped)
        self._note_parent(node)

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self.node_of[block] = None
        self.pool.drop_cached(blocks)

    def drop_from(self, block: int) -> None:
        """Forget ``block`` and everything below it; sequences that hold such blocks keep them, unpublished."""
        node = self.node_of[block]
        if node is None:
            return
        offset = node.blocks.index(block)
        for below in [n for n in self._nodes_below(node) if n is not node]:
            self._unlink(below)
            dropped, below.blocks = below.blocks, []
            self._forget(dropped)
        self._cut(node, offset)
        self._order.note(node)

    def drop_scope(self, scope: int) -> None:
        """Forget every run of ``scope``. Narrower scopes that hang below go with it."""
        tops = [n for n in self._nodes_below(self.root) if n.scope == scope and n.parent and n.parent.scope != scope]
        for node in tops:
            self.drop_from(node.blocks[0])

    def nodes(self) -> Iterator[Node]:
        """Every node, children before parents."""
        return self._nodes_below(self.root)

    def _nodes_below(self, node: Node) -> Iterator[Node]:
        """``node`` and all below it, children before parents."""
        order = [node]
        for each in order:
            for _, nodes in each.ordered.values():
                order += nodes
        return reversed(order)


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
