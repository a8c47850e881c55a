"""Which blocks are given up when a tier is full, and what becomes of them.

`EvictionOrder` finds the least recently used node that can give blocks up; one heap per owner, because the owner
furthest above its share pays first (`Shares`). `Evictor` takes blocks from the device tier: each is demoted to the
host tier while there is room, or room can be made from what was used even longer ago; else it is dropped with
everything below it. Nothing here ever waits.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from chatserve.cache.node import Node
from chatserve.cache.radix_tree import RadixTree

MAX_REMEMBERED_DROPS = 4096
"""Dropped runs whose first block is remembered, to tell "evicted" from "never seen"."""


class Shares:
    """How many blocks each owner may count on, in blocks of one tier.

    An owner's share is its part of the pool by weight. Below its floor an owner pays only if nobody else can; above
    its cap it pays first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._weights: dict[int, float] = {}
        self._floors: dict[int, int] = {}
        self._caps: dict[int, int] = {}
        self._total_weight = 0.0

    def set(self, owner: int, *, weight: float = 1.0, floor: float = 0.0, cap: float = 1.0) -> None:
        """Declare an owner; ``floor`` and ``cap`` are fractions of the pool."""
        self._total_weight += weight - self._weights.get(owner, 0.0)
        self._weights[owner] = weight
        self._floors[owner] = int(floor * self._num_blocks)
        self._caps[owner] = int(cap * self._num_blocks)

    def claim(self, owner: int, usage: int) -> tuple[int, float]:
        """How strongly ``owner``, using ``usage`` blocks, should pay: compare these, the greatest pays.

        Classes: 2 above the cap, 1 ordinary, 0 at or below the floor.
        """
        weight = self._weights.get(owner, 1.0)
        share = self._num_blocks * weight / max(self._total_weight, weight)
        if usage > self._caps.get(owner, self._num_blocks):
            return 2, usage - share
        return (0 if usage <= self._floors.get(owner, 0) else 1), usage - share


class EvictionOrder:
    """Nodes that may give blocks up on one tier: per owner a heap, one lazy entry per node."""

    def __init__(
        self,
        is_evictable: Callable[[Node], bool],
        owner_of: Callable[[Node], int],
        usage: dict[int, int],
        shares: Shares,
    ) -> None:
        self._is_evictable = is_evictable
        self._owner_of = owner_of
        self._usage = usage
        self._shares = shares
        self._heaps: dict[int, list[tuple[int, int, Node]]] = {}
        self._queued: set[Node] = set()
        self._ties = 0

    def __contains__(self, node: Node) -> bool:
        return node in self._queued

    def note(self, node: Node) -> None:
        """``node`` may have become evictable."""
        if node not in self._queued and self._is_evictable(node):
            self._queued.add(node)
            self._push(node)

    def next(self) -> Node | None:
        """The node that pays next: the oldest of the owner who should pay most. It stays queued."""
        if len(self._heaps) == 1:
            [owner] = self._heaps
            return self._oldest(owner)
        claims = [(self._shares.claim(owner, self._usage.get(owner, 0)), owner) for owner in self._heaps]
        for _, owner in sorted(claims, reverse=True):
            node = self._oldest(owner)
            if node is not None:
                return node
        return None

    def _oldest(self, owner: int) -> Node | None:
        heap = self._heaps[owner]
        while heap:
            last_used, _, node = heap[0]
            if not self._is_evictable(node):
                # It was held again, got children or is gone; whoever ends that state notes it anew.
                heapq.heappop(heap)
                self._queued.discard(node)
            elif node.last_used != last_used:
                # Used since it was queued. Times only rise, so the entry was early, never late.
                heapq.heappop(heap)
                self._push(node)
            else:
                return node
        del self._heaps[owner]
        return None

    def _push(self, node: Node) -> None:
        self._ties += 1
        heap = self._heaps.setdefault(self._owner_of(node), [])
        heapq.heappush(heap, (node.last_used, self._ties, node))


class Evictor:
    """Frees device blocks; remembers the copies that demotions need.

    Attributes:
        demotions: (device block, host block) pairs not yet taken by a plan. The host blocks are held by the plan
            until it has run; the device blocks are free at once, because demotions are the first thing a plan does.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._dropped: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.demotions: list[tuple[int, int]] = []
        self.num_evictions = 0
        self.num_demotions = 0
        self.num_host_drops = 0

    def free_device(self, count: int) -> None:
        """Free up to ``count`` idle device blocks, each run from its end."""
        freed = 0
        refs = self._tree.pool.refs
        while freed < count and (node := self._tree.device_order.next()) is not None:
            keep = len(node.blocks)
            floor = max(0, keep - (count - freed))
            while keep > floor and refs[node.blocks[keep - 1]] == 1:
                keep -= 1
            freed += len(node.blocks) - keep
            self._give_up(node, keep)
        self.num_evictions += freed

    def _give_up(self, node: Node, keep: int) -> None:
        """Demote or drop the device blocks of ``node`` from index ``keep`` on."""
        tree = self._tree
        room = self._host_room(len(node.blocks) - keep, node.last_used)
        if keep + room < len(node.blocks):
            # What cannot follow to the host goes, and with it all that depends on it.
            self._drop(node, keep + room)
        if room:
            pool = tree.host_pool
            destinations = pool.allocate(room)
            self.demotions += zip(node.blocks[keep:], destinations, strict=True)
            tree.demote(node, keep, destinations)
            self.num_demotions += room

    def _host_room(self, count: int, last_used: int) -> int:
        """How many of ``count`` host blocks can be had without giving up anything used after ``last_used``."""
        tree = self._tree
        pool = tree.host_pool
        while pool.num_free < count:
            node = tree.host_order.next()
            if node is None or node.last_used > last_used:
                break
            drop = 0
            wanted = count - pool.num_free
            while drop < min(wanted, len(node.host_blocks)) and pool.refs[node.host_blocks[-1 - drop]] == 1:
                drop += 1
            self.num_host_drops += drop
            self._drop(node, node.length - drop)
        return min(count, pool.num_free)

    def _drop(self, node: Node, keep: int) -> None:
        """Forget the run from block ``keep`` on, and remember for a while that it was there."""
        prefix = self._tree.path_tokens(node, keep + 1)
        self._dropped[(node.scope, hash(prefix))] = node.last_used
        self._dropped.move_to_end((node.scope, hash(prefix)))
        if len(self._dropped) > MAX_REMEMBERED_DROPS:
            self._dropped.popitem(last=False)
        self._tree.cut(node, keep)

    def last_eviction(self, tokens: bytes, num_blocks: int, scopes: tuple[int, ...]) -> int | None:
        """When the block after the first ``num_blocks`` of a prompt was last used before it was dropped, if it was."""
        end = (num_blocks + 1) * self._tree.block_bytes
        if end > len(tokens):
            return None
        key = hash(tokens[:end])
        return max((self._dropped[(s, key)] for s in scopes if (s, key) in self._dropped), default=None)
