"""What crosses the socket between the API process and the engine process.

msgspec msgpack, arrays tagged by a short word, one length-prefixed frame per message; from the engine one
`StepFrame` per engine step carries every stream's news. Token ids travel as int32 bytes, never as lists. Knows
no sockets: `engine.transport` frames these, `engine.client` and `engine.process` speak them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import Finished as Finished
from chatserve.scheduler.output import FinishReason as FinishReason
from chatserve.scheduler.output import SampleLogprobs as SampleLogprobs
from chatserve.scheduler.output import Started as Started
from chatserve.scope import Scope


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Enqueue one request of ``sampling.n`` choices.

    Attributes:
        request_id: chosen by the API process, unique for its life, never the client's.
        prompt: int32 token ids, at least one.
        scopes: scopes it may see, widest first; the last one is where it publishes.
        priority: lower runs first, within the class.
        priority_class: from the tenant; lower runs first.
        tenant: who is served and charged.
    """

    request_id: int
    prompt: bytes
    sampling: SamplingParams
    scopes: tuple[Scope, ...]
    priority: int = 0
    priority_class: int = 0
    tenant: str = ""


class SetTenant(msgspec.Struct, frozen=True, array_like=True, tag="tenant"):
    """Weight and KV shares of a tenant; without it a tenant has weight 1 and no floor or cap.

    Attributes:
        weight: service and KV share relative to the others.
        kv_floor: fraction of the pool below which its cached blocks are evicted only if nothing else can be.
        kv_cap: fraction of the pool above which its cached blocks are evicted first.
    """

    tenant: str
    weight: float = 1.0
    kv_floor: float = 0.0
    kv_cap: float = 1.0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End requests now, wherever they are. Unknown ids are ignored: they have just finished."""

    request_ids: tuple[int, ...]


class GetState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Ask for an `EngineState`."""

    call_id: int


class Publish(msgspec.Struct, frozen=True, array_like=True, tag="publish"):
    """Compute a prefix into a wide scope and pin it, or withdraw one. Answered by a `PublishReply`.

    Attributes:
        prompt: int32 token ids of the prefix.
        scopes: scopes its computation may see; the last one is where it is published.
    """

    call_id: int
    prompt: bytes
    scopes: tuple[Scope, ...]
    withdraw: bool = False


class Purge(msgspec.Struct, frozen=True, array_like=True, tag="purge"):
    """Forget everything cached in a tenant's private scopes on both tiers, and zero it. A `PurgeReply` answers."""

    call_id: int
    tenant: str


class Explain(msgspec.Struct, frozen=True, array_like=True, tag="explain"):
    """What of a prompt is cached, without touching anything. An `ExplainReply` answers."""

    call_id: int
    prompt: bytes
    scopes: tuple[Scope, ...]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Finish the current step and exit 0."""


ToEngine = AddRequest | Abort | SetTenant | GetState | Publish | Purge | Explain | Shutdown


class EngineInfo(msgspec.Struct, frozen=True):
    """Facts fixed when the engine is ready.

    Attributes:
        max_model_len: tokens of prompt and output a sequence may have by the model and by configuration.
        max_tokens_in_pool: tokens of prompt and output an empty KV pool can hold for one sequence.
        weights_revision: identity of the loaded weights (part of every cache scope).
        num_host_blocks: size of the host tier.
        prefill_tokens_per_second: measured at start; an input to the scheduler, so that a run can be replayed.
        eos_token_ids: the model's own end tokens, from its generation config.
        kernels: which kernels run, as in ``native-avx512`` or ``torch``.
        dtype: of the cache.
        weights: what most weights are in, as in ``q4_1`` or ``bfloat16``.
    """

    model: str
    weights_revision: str
    vocab_size: int
    max_model_len: int
    max_tokens_in_pool: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    threads: int
    pid: int
    eos_token_ids: tuple[int, ...] = ()
    num_host_blocks: int = 0
    prefill_tokens_per_second: float = 0.0
    kernels: str = ""
    weights: str = ""


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """First message of an engine that has loaded its model."""

    info: EngineInfo


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and monotone counters; the truth of `/metrics`.

    Attributes:
        blocks_leaked: blocks that are held while no request is open and that no publication pins. Always 0; anything
            else is a fault that is logged and shown, and never a reason to stop a healthy server.
    """

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_held: int = 0
    blocks_leaked: int = 0
    steps: int = 0
    preemptions: int = 0
    copies: int = 0
    evictions: int = 0
    demotions: int = 0
    promotions: int = 0
    host_drops: int = 0
    host_blocks_total: int = 0
    host_blocks_free: int = 0
    partial_hits: int = 0
    aborts: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    busy_seconds: float = 0.0


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All news of one engine step.

    Attributes:
        request_ids: int64 [m]; choices: int32 [m]; tokens: int32 [m]: one new token each.
        logprobs: aligned with ``tokens`` where any stream asked for them.
        stats: present a few times per second and whenever the engine falls idle.
        tenants: beside ``stats``: every tenant whose state has changed since it was last told, so that sums over
            tenants equal the counters in ``stats``.
    """

    step: int
    request_ids: bytes = b""
    choices: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[SampleLogprobs | None, ...] | None = None
    started: tuple[Started, ...] = ()
    finished: tuple[Finished, ...] = ()
    stats: EngineStats | None = None
    tenants: tuple[TenantState, ...] = ()


class TenantState(msgspec.Struct, frozen=True, array_like=True):
    """What one tenant was given since the engine started, and what it holds now.

    Attributes:
        computed_tokens: prompt tokens that ran, and tokens that ran again after a preemption.
        device_blocks, host_blocks: cached blocks charged to it, now.
        virtual_tokens: its fairness counter.
    """

    tenant: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    device_blocks: int
    host_blocks: int
    virtual_tokens: float


class EngineState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Reply to `GetState`: the counters, and the pool's counts recomputed from its holders."""

    call_id: int
    stats: EngineStats
    recounted_held: int
    recounted_cached: int
    live_requests: int
    tenants: tuple[TenantState, ...] = ()


class PublishReply(msgspec.Struct, frozen=True, array_like=True, tag="published"):
    """The prefix is pinned (or withdrawn), or why not."""

    call_id: int
    num_tokens: int
    num_blocks: int
    error_code: str | None = None
    error_message: str | None = None


class PurgeReply(msgspec.Struct, frozen=True, array_like=True, tag="purged"):
    """Cached blocks of the tenant that were forgotten, per tier."""

    call_id: int
    device_blocks: int
    host_blocks: int


class ExplainReply(msgspec.Struct, frozen=True, array_like=True, tag="explained"):
    """What a request with this prompt would find.

    Attributes:
        device_tokens, host_tokens: cached, on either tier; the device part comes first.
        miss: why it ends there: ``complete`` (all but the last token, which is always computed), ``differs`` (something
            is cached beyond, with other tokens), ``evicted`` or ``never_seen``. Other tenants' caches do not count.
        steps_ago: engine steps since what was evicted was last used.
    """

    call_id: int
    num_tokens: int
    device_tokens: int
    host_tokens: int
    miss: Literal["complete", "differs", "evicted", "never_seen"]
    steps_ago: int | None = None


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Last words of an engine that cannot go on."""

    code: str
    message: str


Reply = EngineState | PublishReply | PurgeReply | ExplainReply
"""Answers to one call; ``call_id`` says to which."""

FromEngine = EngineReady | StepFrame | EngineState | PublishReply | PurgeReply | ExplainReply | EngineFailed
