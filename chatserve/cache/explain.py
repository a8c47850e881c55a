"""Why a prompt is, or is not, found in the cache. Touches nothing: asking does not keep anything warm."""

from __future__ import annotations

from typing import Literal

from chatserve.cache.kv_cache_manager import KVCacheManager
from chatserve.cache.node import TOKEN_BYTES

Miss = Literal["complete", "differs", "evicted", "never_seen"]


def explain_match(
    manager: KVCacheManager, tokens: bytes, scopes: tuple[int, ...], step: int
) -> tuple[int, int, Miss, int | None]:
    """(tokens on the device, tokens on the host, why it ends there, steps since what was evicted was last used).

    Args:
        tokens: int32 bytes of a prompt; the last token is always computed.
        scopes: what the asker may see. Nothing else is looked at.
    """
    if not scopes:
        return 0, 0, "never_seen", None
    size = manager.block_size
    match = manager.match(tokens, scopes, now=-1)
    device = len(match.blocks) * size
    host = len(match.host_blocks) * size
    if match.tail_on_host or match.host_blocks:
        host = match.num_tokens - device
    else:
        device = match.num_tokens
    if (match.num_tokens + 1) * TOKEN_BYTES >= len(tokens):
        return device, host, "complete", None
    evicted = manager.evictor.last_eviction(tokens, match.num_blocks, scopes)
    if evicted is not None:
        return device, host, "evicted", step - evicted
    return device, host, "differs" if match.num_tokens and match.continues else "never_seen", None
