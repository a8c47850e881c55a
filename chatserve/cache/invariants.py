"""What must be true of pool, tree and manager at any moment between two steps.

Full recounts, O(everything): tests call them after operations; production never does.
"""

from __future__ import annotations

from chatserve.cache.kv_cache_manager import BlockTable, KVCacheManager
from chatserve.cache.radix_tree import RadixTree


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself."""


def require(ok: bool, message: str) -> None:
    """Raise `InvariantError` unless ``ok``."""
    if not ok:
        raise InvariantError(message)


def check_tree(tree: RadixTree) -> None:
    """Runs, children, order, depth, the way from block to node, evictability."""
    pool, size = tree.pool, tree.block_bytes
    seen: set[int] = set()
    for node in tree.nodes():
        partial = len(node.tokens) < size and node is not tree.root
        require(len(node.blocks) == -(-len(node.tokens) // size), "run and blocks differ in length")
        require(partial or len(node.tokens) % size == 0, "a whole-block run ends inside a block")
        require(not (partial and node.ordered), "a partial node has children")
        listed = sorted(id(n) for bucket in node.children.values() for n in bucket)
        full = sorted(id(n) for _, ns in node.ordered.values() for n in ns if len(n.tokens) >= size)
        require(listed == full, "map and order disagree")
        for scope, (keys, nodes) in node.ordered.items():
            require(keys == sorted(keys), "children out of order")
            require(len(keys) == len(set(keys)) == len(nodes) > 0, "two children with one first block")
            for key, child in zip(keys, nodes, strict=True):
                require(child.tokens[:size] == key and child.scope == scope, "child under a wrong key")
                require(child.parent is node, "child with another parent")
                require(child.start == node.start + len(node.blocks), "child at a wrong depth")
        held = [pool.refs[block] > 1 for block in node.blocks]
        require(held == sorted(held, reverse=True), "held blocks are not a prefix of the run")
        require(node.queued or not tree.is_evictable(node), "an evictable node is not queued")
        for block in node.blocks:
            require(block not in seen and tree.node_of[block] is node, "node_of is wrong")
            seen.add(block)
    require(seen == {b for b, cached in enumerate(pool.cached) if cached}, "cached marks differ from the tree")
    require(all((n is not None) == (b in seen) for b, n in enumerate(tree.node_of)), "node_of keeps a stale node")


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
    if not manager.copy_sources:
        # A copy's source is held for a moment without what lies before it.
        check_tree(manager.tree)
