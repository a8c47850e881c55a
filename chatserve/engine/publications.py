"""Prefixes that the operator publishes to everybody or to a group.

A publication is computed by an ordinary request of the operator that publishes into the wide scope, and then pinned:
its blocks are held like a sequence's, within a budget, until it is withdrawn. `EngineCore` is the only caller.
"""

from __future__ import annotations

from chatserve.cache.block_table import BlockTable
from chatserve.cache.kv_cache_manager import KVCacheManager
from chatserve.engine.protocol import Publish, PublishReply
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.fairness import OPERATOR
from chatserve.scheduler.output import Finished
from chatserve.scheduler.request import Request
from chatserve.scheduler.scheduler import Scheduler

PIN_SHARE = 0.25
"""Part of the pool that publications may pin."""

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)


Key = tuple[tuple[int, ...], bytes]
"""(interned scopes, int32 tokens): what makes two publications the same."""


class Publications:
    """What is pinned, and what is being computed to be pinned.

    Request ids of publications are negative, so that they never meet a client's.
    """

    def __init__(self, scheduler: Scheduler, manager: KVCacheManager) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._pinned: dict[Key, BlockTable] = {}
        self._computing: dict[int, Key] = {}
        self._callers: dict[Key, list[int]] = {}
        self._next_id = -1

    @property
    def pending(self) -> bool:
        """Whether a publication is being computed."""
        return bool(self._computing)

    @property
    def tables(self) -> list[BlockTable]:
        """Block tables of everything that is pinned."""
        return list(self._pinned.values())

    def begin(self, message: Publish, scopes: tuple[int, ...]) -> PublishReply | None:
        """Start computing a publication, or withdraw one; a reply where nothing has to be computed."""
        key = (scopes, message.prompt)
        tokens = len(message.prompt) // 4
        if message.withdraw:
            return self._withdraw(message.call_id, key)
        if key in self._pinned:
            return PublishReply(message.call_id, tokens, len(self._pinned[key].blocks))
        if key in self._callers:
            self._callers[key].append(message.call_id)
            return None
        blocks = -(-tokens // self._manager.block_size)
        budget = int(PIN_SHARE * self._manager.pool.num_blocks)
        room = min(budget, self._scheduler.blocks_to_spare()) - self._manager.num_pinned
        if blocks > room:
            return PublishReply(
                message.call_id,
                tokens,
                0,
                "invalid_value",
                f"The prefix needs {blocks} blocks; {max(0, room)} of the {budget} that may be pinned are left. "
                "Withdraw another prefix, shorten this one, or give the server more KV memory.",
            )
        self._callers[key] = [message.call_id]
        self._computing[self._next_id] = key
        self._scheduler.add(Request(self._next_id, message.prompt, _SAMPLING, scopes, tenant=OPERATOR))
        self._next_id -= 1
        return None

    def _withdraw(self, call_id: int, key: Key) -> PublishReply:
        tokens = len(key[1]) // 4
        table = self._pinned.pop(key, None)
        if table is not None:
            self._manager.unpin(table)
            return PublishReply(call_id, tokens, 0)
        for request_id, computing in self._computing.items():
            if computing == key:
                self._scheduler.abort(request_id)
                return PublishReply(call_id, tokens, 0)
        return PublishReply(call_id, tokens, 0, "not_found", "No such prefix is published.")

    def end(self, finished: Finished) -> list[PublishReply]:
        """A publication's request has ended: pin what it computed, and tell whoever asked for it."""
        key = self._computing.pop(finished.request_id, None)
        if key is None:
            return []
        scopes, prompt = key
        table, error = None, "It was withdrawn, or could not be computed."
        if finished.reason == "length":
            table, error = (
                self._manager.pin(prompt, scopes, self._scheduler.step),
                "It was evicted before it was pinned.",
            )
        callers, tokens = self._callers.pop(key), len(prompt) // 4
        if table is None:
            return [PublishReply(call_id, tokens, 0, "kv_exhausted", error) for call_id in callers]
        self._pinned[key] = table
        return [PublishReply(call_id, tokens, len(table.blocks)) for call_id in callers]
