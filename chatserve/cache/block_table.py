"""What `KVCacheManager` hands out: block tables, admissions, and the copies that are due before a forward.

Plain data. The manager alone writes block tables; everybody else reads.
"""

from __future__ import annotations


class BlockTable:
    """The physical blocks of one sequence, in order of position.

    Attributes:
        blocks: block ids; every one is held by this sequence.
        num_published: how many of them, from the first, are in the tree.
        scopes: interned scopes the sequence may see; it publishes into the last.
        first_own: index of the first block that this sequence itself put into the tree, or ``None``.
        epoch: epoch of its own scope when it was admitted.
        detached: it publishes nothing any more (its prefix left the tree, or its scope was purged).
        shared_tail: the last block with content may have other holders and must be copied before a write.
    """

    __slots__ = ("blocks", "detached", "epoch", "first_own", "num_published", "scopes", "shared_tail")

    def __init__(self, blocks: list[int], num_published: int, scopes: tuple[int, ...], epoch: int) -> None:
        self.blocks = blocks
        self.num_published = num_published
        self.scopes = scopes
        self.first_own: int | None = None
        self.epoch = epoch
        self.detached = False
        self.shared_tail = False


class Admission:
    """A granted place in KV memory.

    Attributes:
        table: covers every known token and one block of growth.
        num_cached: tokens whose KV is already there.
    """

    __slots__ = ("num_cached", "table")

    def __init__(self, table: BlockTable, num_cached: int) -> None:
        self.table = table
        self.num_cached = num_cached


TableChange = tuple[int, int]
"""(index, block): position in a block table and the block that stands there now."""


class BlockCopies:
    """What a plan does to KV memory before its forward, as int32 [k, 2] (source, destination) pairs.

    First `clears` and `host_clears`, purged blocks to zero. Then `demotions` device → host, `promotions` host →
    device, `copies` device → device. Within each, sources and destinations are disjoint. Everything read or written
    stays held until the plan has run, except the sources of demotions: whatever is written into those blocks next
    comes later in the same plan. So a worker may take its time over the tiers' copies: a demotion has until its
    source is written or its destination read, a promotion until its destination is read or written, and both have
    until the plan ends.
    """

    __slots__ = ("clears", "copies", "demotions", "host_clears", "promotions")

    def __init__(self, clears: bytes, host_clears: bytes, demotions: bytes, promotions: bytes, copies: bytes) -> None:
        self.clears = clears
        self.host_clears = host_clears
        self.demotions = demotions
        self.promotions = promotions
        self.copies = copies
