"""What a lookup in the prefix tree found: plain data, true for the state of the tree it was made from."""

from __future__ import annotations


class Match:
    """What of a token run is cached and visible.

    Attributes:
        blocks: whole device blocks, in order.
        host_blocks: whole host blocks that follow them.
        tail_block: a block whose first ``tail_tokens`` tokens continue the run, or ``None``. It is reused by
            copying, or taken over.
        tail_on_host: which tier's id ``tail_block`` is.
        tail_takeable: the tail is a partial node of the asker's own scope, matched to its end.
        num_tokens: all matched tokens, tail included.
        continues: something visible is cached beyond them, with other tokens.
    """

    __slots__ = (
        "blocks",
        "continues",
        "host_blocks",
        "num_tokens",
        "tail_block",
        "tail_on_host",
        "tail_takeable",
        "tail_tokens",
    )

    def __init__(self, blocks: list[int], host_blocks: list[int], num_tokens: int) -> None:
        self.blocks = blocks
        self.host_blocks = host_blocks
        self.num_tokens = num_tokens
        self.continues = False
        self.tail_block: int | None = None
        self.tail_tokens = 0
        self.tail_on_host = False
        self.tail_takeable = False

    @property
    def num_blocks(self) -> int:
        """Whole blocks on either tier."""
        return len(self.blocks) + len(self.host_blocks)
