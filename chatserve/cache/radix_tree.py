"""The prefix cache: runs of tokens mapped to physical blocks on two tiers, one tree for all scopes.

Path-compressed at block granularity: an edge carries a run of whole blocks (one contiguous int32 byte string
beside the list of block ids) and splits only at block boundaries. A partial block is always a leaf node of its
own. Children are found by (scope, hash of their first block); the hash is an index only, tokens and scope are
compared on every hit. Beside that map each scope's children are kept in the order of their first block's
tokens, so that the child sharing the longest part of a block is a neighbour found by bisection.

The tree knows tokens, scopes, tiers and logical time. It does not know sequences: from a block to its place in the
tree leads only `node_of`, which splits keep true. What is given up when a tier is full, `cache.eviction` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.match import Match
from chatserve.cache.node import TOKEN_BYTES, Node, common_prefix

if TYPE_CHECKING:
    from chatserve.cache.eviction import EvictionOrder


class RadixTree:
    """Maps token prefixes to blocks of a device pool and a host pool.

    Attributes:
        node_of, host_node_of: the node that carries a block of either tier.
        owner_of_scope: who is charged for a scope's blocks; owner 0 where nobody is named.
        device_usage, host_usage: blocks in the tree per owner.
        device_order, host_order: set by `KVCacheManager`, which builds the three together.
    """

    def __init__(
        self, pool: BlockPool, host_pool: BlockPool, block_size: int, hash_block: Callable[[bytes], int]
    ) -> None:
        self.pool = pool
        self.host_pool = host_pool
        self.block_bytes = block_size * TOKEN_BYTES
        self.root = Node(None, -1, 0, bytearray())
        self.node_of: list[Node | None] = [None] * pool.num_blocks
        self.host_node_of: list[Node | None] = [None] * host_pool.num_blocks
        self.owner_of_scope: dict[int, int] = {}
        self.device_usage: dict[int, int] = {}
        self.host_usage: dict[int, int] = {}
        self.device_order: EvictionOrder
        self.host_order: EvictionOrder
        self._hash = hash_block
        self._of_scope: dict[int, dict[Node, None]] = {}  # in the order they were linked, so that replays agree

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
                        best_node, best_full = node, node.length
                    tail = child if same % self.block_bytes else None
                    tail_index = full
                if full == child.length:
                    deeper.append((child, pos + same, index))
            # Wider scopes are explored first, so that they win among equals.
            stack.extend(reversed(deeper))
        blocks, host_blocks = self._path_blocks(best_node, best_full)
        match = Match(blocks, host_blocks, best_bytes // TOKEN_BYTES)
        self._touch(tail or best_node, now)
        match.continues = best_full < best_node.length or any(scope in best_node.ordered for scope in scopes)
        if tail is not None:
            tail_bytes = best_bytes - match.num_blocks * self.block_bytes
            match.tail_tokens = tail_bytes // TOKEN_BYTES
            match.tail_on_host = tail_index >= len(tail.blocks)
            run = tail.host_blocks if match.tail_on_host else tail.blocks
            match.tail_block = run[tail_index - len(tail.blocks) if match.tail_on_host else tail_index]
            match.tail_takeable = tail.scope == scopes[-1] and len(tail.tokens) == tail_bytes
        return match

    def _best_child(self, node: Node, scope: int, tokens: bytes, pos: int) -> tuple[Node | None, int]:
        """The child of ``node`` in ``scope`` that shares most with ``tokens[pos:]``, and how many bytes."""
        first = tokens[pos : pos + self.block_bytes]
        if len(first) == self.block_bytes:
            child = self._child(node, scope, first)
            if child is not None:
                return child, common_prefix(child.tokens, 0, tokens, pos)
        return node.nearest_child(scope, first)

    def _child(self, node: Node, scope: int, first: bytes) -> Node | None:
        """The child of ``node`` in ``scope`` whose run begins with this whole block."""
        return node.exact_child(scope, first, self._hash(first))

    def _path_blocks(self, node: Node, count: int) -> tuple[list[int], list[int]]:
        """Device and host block ids from the root to the ``count``-th block of ``node``."""
        device = [node.blocks[:count]]
        host = [node.host_blocks[: max(0, count - len(node.blocks))]]
        above = node.parent
        while above is not None and above is not self.root:
            device.append(above.blocks)
            host.append(above.host_blocks)
            above = above.parent
        if len(device) == 1:
            return device[0], host[0]
        return [b for run in reversed(device) for b in run], [b for run in reversed(host) for b in run]

    def path_tokens(self, node: Node, count: int) -> bytes:
        """int32 bytes from the root to the end of the ``count``-th block of ``node``."""
        runs = [bytes(node.tokens[: count * self.block_bytes])]
        above = node.parent
        while above is not None:
            runs.append(bytes(above.tokens))
            above = above.parent
        return b"".join(reversed(runs))

    def _touch(self, node: Node | None, now: int) -> None:
        while node is not None and node.last_used < now:
            node.last_used = now
            node = node.parent

    # ------------------------------------------------------------------ growth

    def publish(
        self, scopes: tuple[int, ...], prefix: Sequence[int], tokens: bytes, blocks: list[int], now: int
    ) -> list[int]:
        """Hang a run of whole blocks below a held prefix, in the narrowest of ``scopes``.

        Where the tree already has a visible run of the same tokens on the device, its blocks are returned instead
        of the given ones, and the caller adopts them. A run of its own scope on the host gives way to the given
        blocks; one of a wider scope stays as it is, because what others read must not come from this caller.

        Args:
            prefix: the device blocks before the run; all of them are in the tree.
            tokens: int32 bytes of the run, exactly ``len(blocks)`` blocks.
            blocks: held by the caller.

        Returns:
            The tree's device block for each position of the run.
        """
        size = self.block_bytes
        node = self._node_at(prefix)
        offset = len(prefix) - node.start
        if offset == node.length and node.scope == scopes[-1] and not node.ordered:
            # A sequence that decodes: its own leaf grows.
            self._extend(node, tokens, blocks)
            self._touch(node, now)
            return blocks
        result: list[int] = []
        pos = 0
        while pos < len(tokens):
            if offset < node.length:
                usable = node.length if node.scope == scopes[-1] else len(node.blocks)
                same = min(common_prefix(node.tokens, offset * size, tokens, pos) // size, usable - offset)
                result += node.blocks[offset : offset + same]
                twins = offset + same - len(node.blocks)
                if twins > 0:
                    fresh = blocks[len(result) : len(result) + twins]
                    self._replace_host(node, fresh)
                    result += fresh
                pos += same * size
                offset += same
                if pos == len(tokens):
                    break
                if offset < node.length:
                    node = self._split(node, offset)
            child = None
            for scope in scopes:
                child = self._child(node, scope, tokens[pos : pos + size])
                if child is not None and (child.blocks or scope == scopes[-1]):
                    break
                child = None
            if child is None:
                fresh = blocks[pos // size :]
                node = self._append(node, scopes[-1], tokens[pos:], fresh)
                result += fresh
                break
            node, offset = child, 0
        self._touch(node, now)
        return result

    def publish_tail(self, scopes: tuple[int, ...], prefix: Sequence[int], tokens: bytes, block: int, now: int) -> None:
        """Hang a partial block below a held prefix, unless a visible run on the device already covers its tokens."""
        node = self._node_at(prefix)
        offset = len(prefix) - node.start
        if offset < node.length:
            if common_prefix(node.tokens, offset * self.block_bytes, tokens, 0) == len(tokens):
                return
            node = self._split(node, offset)
        for scope in scopes:
            twin, same = self._best_child(node, scope, tokens, 0)
            if twin is not None and same == len(tokens):
                if not twin.blocks and twin.scope == scopes[-1] and len(twin.tokens) == same:
                    self._replace_host(twin, [block])
                    self._touch(twin, now)
                return
        self._drop_covered_partials(node, scopes[-1], tokens)
        child = Node(node, scopes[-1], node.start + node.length, bytearray(tokens))
        self._link(child)
        self._add_device(child, [block])
        self._touch(child, now)

    def _node_at(self, prefix: Sequence[int]) -> Node:
        if not prefix:
            return self.root
        node = self.node_of[prefix[-1]]
        if node is None:
            raise RuntimeError("published below a block that is not in the tree")
        return node

    def take_over(self, block: int) -> None:
        """A sequence becomes the owner of an idle partial tail: the tree forgets it, the block stays held."""
        node = self.node_of[block]
        if node is None:
            raise RuntimeError("a block that is not in the tree cannot be taken over")
        self.node_of[block] = None
        self._charge(self.device_usage, node, -1)
        self.pool.hand_over(block)
        self._unlink(node)
        node.blocks = []
        self._note_parent(node)

    def _append(self, node: Node, scope: int, tokens: bytes, blocks: list[int]) -> Node:
        """Add a run below ``node``: in place where ``node`` is a leaf of the same scope, else as a child."""
        self._drop_covered_partials(node, scope, tokens)
        if node.scope == scope and not node.ordered and not node.host_blocks:
            self._extend(node, tokens, blocks)
            return node
        child = Node(node, scope, node.start + node.length, bytearray(tokens))
        self._link(child)
        self._add_device(child, blocks)
        return child

    def _extend(self, node: Node, tokens: bytes, blocks: list[int]) -> None:
        """A leaf's run grows in place."""
        node.tokens += tokens
        self._add_device(node, blocks)

    def _add_device(self, node: Node, blocks: list[int]) -> None:
        """The run's device part grows by ``blocks``, of which the tree becomes a holder."""
        if not node.blocks and node.parent is not None:
            node.parent.num_device_children += 1
        node.blocks += blocks
        node_of = self.node_of
        for block in blocks:
            node_of[block] = node
        self.pool.hold_cached(blocks)
        self._charge(self.device_usage, node, len(blocks))

    def _charge(self, usage: dict[int, int], node: Node, count: int) -> None:
        owner = self.owner(node)
        usage[owner] = usage.get(owner, 0) + count

    def owner(self, node: Node) -> int:
        """Who is charged for the blocks of ``node``."""
        return self.owner_of_scope.get(node.scope, 0)

    def _drop_covered_partials(self, node: Node, scope: int, tokens: bytes) -> None:
        """Remove the partial children of ``node`` whose tokens are a prefix of ``tokens``."""
        for child in node.partial_children(scope, tokens[: self.block_bytes]):
            self.cut(child, 0)

    def _split(self, node: Node, offset: int) -> Node:
        """Cut ``node``'s run before its block ``offset``; returns the new upper node.

        The lower part keeps its identity, so its children and its place in the eviction orders stay valid.
        """
        cut = offset * self.block_bytes
        self._unlink(node)
        upper = Node(node.parent, node.scope, node.start, node.tokens[:cut])
        upper.last_used = node.last_used
        upper.host_blocks = node.host_blocks[: max(0, offset - len(node.blocks))]
        del node.host_blocks[: len(upper.host_blocks)]
        upper.blocks = node.blocks[:offset]
        del node.blocks[:offset]
        self._link(upper)
        node.parent = upper
        node.start += offset
        del node.tokens[:cut]
        self._link(node)
        for block in upper.blocks:
            self.node_of[block] = upper
        for block in upper.host_blocks:
            self.host_node_of[block] = upper
        return upper

    def _link(self, node: Node) -> None:
        assert node.parent is not None
        first = bytes(node.tokens[: self.block_bytes])
        node.parent.link(node, first, self._hash(first) if len(first) == self.block_bytes else None)
        self._of_scope.setdefault(node.scope, {})[node] = None

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        first = bytes(node.tokens[: self.block_bytes])
        node.parent.unlink(node, first, self._hash(first) if len(first) == self.block_bytes else None)
        nodes = self._of_scope[node.scope]
        del nodes[node]
        if not nodes:
            del self._of_scope[node.scope]

    # ------------------------------------------------------------------ between tiers

    def demote(self, node: Node, keep: int, host_blocks: list[int]) -> None:
        """The device blocks from ``keep`` on move to ``host_blocks``; the device blocks lose the tree's hold.

        The host blocks get the tree as a second holder: their first one is the plan that fills them.
        """
        moved = node.blocks[keep:]
        node.host_blocks[:0] = host_blocks
        for block in host_blocks:
            self.host_node_of[block] = node
        self.host_pool.hold_cached(host_blocks)
        self._charge(self.host_usage, node, len(host_blocks))
        self._drop_device(node, keep, moved)

    def promote(self, host_blocks: list[int], blocks: list[int]) -> None:
        """The first host blocks of a path move to device ``blocks``, which a sequence holds.

        The host blocks lose the tree's hold; the plan that reads them holds them until it has run.
        """
        done = 0
        while done < len(host_blocks):
            node = self.host_node_of[host_blocks[done]]
            if node is None:
                raise RuntimeError("promoted a host block that is not in the tree")
            count = min(len(node.host_blocks), len(host_blocks) - done)
            self._replace_host(node, blocks[done : done + count])
            done += count

    def _replace_host(self, node: Node, blocks: list[int]) -> None:
        """The first host blocks of ``node`` give way to device ``blocks`` with the same content."""
        dropped = node.host_blocks[: len(blocks)]
        del node.host_blocks[: len(blocks)]
        self._forget_host(node, dropped)
        self._add_device(node, blocks)

    def take_over_host(self, block: int) -> None:
        """A partial tail on the host becomes a sequence's own by a copy: the tree forgets it."""
        node = self.host_node_of[block]
        if node is not None:
            self.cut(node, 0)

    def note_idle(self, block: int) -> None:
        """Tell the tree that a holder of a device block may just have gone."""
        node = self.node_of[block]
        if node is not None:
            self.device_order.note(node)

    def note_host_idle(self, block: int) -> None:
        """Tell the tree that a holder of a host block may just have gone."""
        node = self.host_node_of[block]
        if node is not None:
            self.host_order.note(node)

    def is_device_evictable(self, node: Node) -> bool:
        """Whether the end of the device part can be given up: nothing on the device hangs below, nobody holds it."""
        return not node.num_device_children and bool(node.blocks) and self.pool.refs[node.blocks[-1]] == 1

    def is_host_evictable(self, node: Node) -> bool:
        """Whether the end of the host part can be given up: it is a leaf, and no plan is using it."""
        return not node.ordered and bool(node.host_blocks) and self.host_pool.refs[node.host_blocks[-1]] == 1

    # ------------------------------------------------------------------ shrinking

    def cut(self, node: Node, keep: int) -> None:
        """Forget all of ``node``'s run but its first ``keep`` blocks, and everything below it.

        Sequences that hold such blocks keep them, unpublished.
        """
        for below in self._nodes_below(node):
            if below is not node:
                self._remove(below)
        if keep == 0:
            self._remove(node)
        else:
            del node.tokens[keep * self.block_bytes :]
            keep_host = max(0, keep - len(node.blocks))
            dropped = node.host_blocks[keep_host:]
            del node.host_blocks[keep_host:]
            self._forget_host(node, dropped)
            self._drop_device(node, keep, node.blocks[keep:])
            self.device_order.note(node)
            self.host_order.note(node)
        self._note_parent(node)

    def _remove(self, node: Node) -> None:
        self._unlink(node)
        host_blocks, node.host_blocks = node.host_blocks, []
        self._forget_host(node, host_blocks)
        blocks, node.blocks = node.blocks, []
        self._forget_device(node, blocks)

    def _drop_device(self, node: Node, keep: int, dropped: list[int]) -> None:
        """The device part ends at ``keep``; ``dropped`` is what lay behind."""
        if not dropped:
            return
        del node.blocks[keep:]
        self._forget_device(node, dropped)
        if not node.blocks and node.parent is not None:
            node.parent.num_device_children -= 1
            self._note_parent(node)

    def _forget_device(self, node: Node, blocks: list[int]) -> None:
        for block in blocks:
            self.node_of[block] = None
        self.pool.drop_cached(blocks)
        self._charge(self.device_usage, node, -len(blocks))

    def _forget_host(self, node: Node, host_blocks: list[int]) -> None:
        for block in host_blocks:
            self.host_node_of[block] = None
        self.host_pool.drop_cached(host_blocks)
        self._charge(self.host_usage, node, -len(host_blocks))

    def _note_parent(self, node: Node) -> None:
        if node.parent is not None:
            self.device_order.note(node.parent)
            self.host_order.note(node.parent)

    def drop_from(self, block: int) -> None:
        """Forget device ``block`` and everything below it."""
        node = self.node_of[block]
        if node is not None:
            self.cut(node, node.blocks.index(block))

    def drop_scope(self, scope: int) -> tuple[list[int], list[int]]:
        """Forget every run of ``scope``. Narrower scopes that hang below go with it. Costs nothing of others' runs.

        Returns:
            The device and host blocks that left the tree.
        """
        tops = [node for node in self.nodes_of(scope) if node.parent is not None and node.parent.scope != scope]
        gone = [below for top in tops for below in self._nodes_below(top)]
        blocks = [block for node in gone for block in node.blocks]
        host_blocks = [block for node in gone for block in node.host_blocks]
        for node in tops:
            self.cut(node, 0)
        return blocks, host_blocks

    def nodes_of(self, scope: int) -> Iterable[Node]:
        """Every node of ``scope``."""
        return self._of_scope.get(scope, {}).keys()

    def nodes(self) -> Iterator[Node]:
        """Every node, children before parents."""
        return self._nodes_below(self.root)

    def _nodes_below(self, node: Node) -> Iterator[Node]:
        """``node`` and all below it, children before parents."""
        order = [node]
        for each in order:
            order += each.iter_children()
        return reversed(order)
