"""What must be true of pool, tree and manager at any moment between two steps.

Full recounts, O(everything): tests call them after operations; production never does.
"""

from __future__ import annotations

from collections import Counter

from chatserve.cache.block_table import BlockTable
from chatserve.cache.kv_cache_manager import KVCacheManager
from chatserve.cache.node import Node
from chatserve.cache.radix_tree import RadixTree


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself."""


def require(ok: bool, message: str) -> None:
    """Raise `InvariantError` unless ``ok``."""
    if not ok:
        raise InvariantError(message)


def check_tree(tree: RadixTree) -> None:
    """Runs, children, order, depth, tiers, the way from block to node, charges, evictability."""
    size = tree.block_bytes
    seen: dict[int, Node] = {}
    host_seen: dict[int, Node] = {}
    usage: Counter[int] = Counter()
    host_usage: Counter[int] = Counter()
    of_scope: Counter[int] = Counter()
    for node in tree.nodes():
        of_scope[node.scope] += node is not tree.root
        require(node is tree.root or node in tree.nodes_of(node.scope), "a node is missing among its scope's")
        partial = len(node.tokens) < size and node is not tree.root
        require(node.length == -(-len(node.tokens) // size), "run and blocks differ in length")
        require(partial or len(node.tokens) % size == 0, "a whole-block run ends inside a block")
        require(not (partial and node.ordered), "a partial node has children")
        _check_children(node, size)
        device_children = [n for _, nodes in node.ordered.values() for n in nodes if n.blocks]
        require(len(device_children) == node.num_device_children, "device children are miscounted")
        require(not (device_children and node.host_blocks), "a device block hangs below a host block")
        held = [tree.pool.refs[block] > 1 for block in node.blocks]
        require(held == sorted(held, reverse=True), "held blocks are not a prefix of the run")
        require(node in tree.device_order or not tree.is_device_evictable(node), "an evictable node is not queued")
        require(node in tree.host_order or not tree.is_host_evictable(node), "a host-evictable node is not queued")
        for block in node.blocks:
            require(block not in seen, "a block is twice in the tree")
            seen[block] = node
        for block in node.host_blocks:
            require(block not in host_seen, "a host block is twice in the tree")
            host_seen[block] = node
        usage[tree.owner(node)] += len(node.blocks)
        host_usage[tree.owner(node)] += len(node.host_blocks)
    require(all(len(list(tree.nodes_of(scope))) == n for scope, n in of_scope.items()), "a scope has a node too many")
    for pool, found, node_of in (
        (tree.pool, seen, tree.node_of),
        (tree.host_pool, host_seen, tree.host_node_of),
    ):
        require(set(found) == {b for b, cached in enumerate(pool.cached) if cached}, "cached marks are wrong")
        require(all(found.get(b) is n for b, n in enumerate(node_of)), "the way from a block to its node is wrong")
    require(+usage == +Counter(tree.device_usage), "device blocks are charged wrongly")
    require(+host_usage == +Counter(tree.host_usage), "host blocks are charged wrongly")


def _check_children(node: Node, size: int) -> None:
    listed = sorted(id(n) for bucket in node.children.values() for n in bucket)
    full = sorted(id(n) for _, ns in node.ordered.values() for n in ns if len(n.tokens) >= size)
    require(listed == full, "map and order disagree")
    for scope, (keys, nodes) in node.ordered.items():
        require(keys == sorted(keys), "children out of order")
        require(len(keys) == len(set(keys)) == len(nodes) > 0, "two children with one first block")
        for key, child in zip(keys, nodes, strict=True):
            require(child.tokens[:size] == key and child.scope == scope, "child under a wrong key")
            require(child.parent is node, "child with another parent")
            require(child.start == node.start + node.length, "child at a wrong depth")


def check_manager(manager: KVCacheManager, tables: list[BlockTable]) -> None:
    """Reference counts recounted from the holders: the tree, the live tables, copies in flight."""
    manager.pool.check()
    refs = [int(cached) for cached in manager.pool.cached]
    for table in tables:
        require(len(set(table.blocks)) == len(table.blocks), "a block is twice in one table")
        for block in table.blocks:
            refs[block] += 1
    for source in manager.copy_sources:
        refs[source] += 1
    require(refs == manager.pool.refs, "reference counts differ from the holders")
    manager.host_pool.check()
    host_refs = [int(cached) for cached in manager.host_pool.cached]
    for block in manager.host_blocks_in_flight:
        host_refs[block] += 1
    require(host_refs == manager.host_pool.refs, "host reference counts differ from the holders")
    if not manager.copy_sources:
        # A copy's source is held for a moment without what lies before it.
        check_tree(manager.tree)
