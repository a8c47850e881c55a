"""Every setting of chatserve, as frozen, composed data.

Values here are what the user asked for; ``None`` means "choose from the machine", and the part that can know
(the engine process for memory and threads) chooses and reports what it chose in `EngineInfo`. Nothing completes
a config by side effect. `chatserve.cli.settings` builds one from flags, environment and TOML.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0)]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which network to serve.

    Attributes:
        path: prepared model folder (Hugging Face layout, see `chatserve.model.store`).
        name: the name clients use.
        revision: identity of weights and tokenizer; part of every cache scope.
        dtype: of weights and KV cache; ``auto`` is bfloat16 where that is fast, else float32. Compiled CPU kernels take
            bfloat16 only.
        max_model_len: tokens of prompt and output; ``None`` takes the model's own limit.
        quantization: format in which compiled CPU kernels hold weights. ``auto`` uses the blocks that the model was
            published with, if any, else bfloat16; ``none`` is bfloat16.
    """

    path: str = ""
    name: str = ""
    revision: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Positive | None = None
    quantization: Literal["auto", "none", "q4_1", "q8_0"] = "auto"
    trust_remote_code: bool = False


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV memory.

    Attributes:
        block_size: tokens per block, a power of two from 2 on.
        num_blocks: exact pool size; wins over ``kv_cache_memory_bytes``.
        kv_cache_memory_bytes: pool size in bytes; ``None`` takes a share of the memory that is free.
        swap_space_gib: size of the host tier, to which blocks are demoted when the pool is full. On a CPU both
            tiers are the same memory, so it serves tests and measurements of what a GPU would do.
        preemption_mode: ``auto`` swaps where there is a host tier and recomputes what is not on it; ``recompute``
            has no host tier; ``swap`` insists on one.
    """

    block_size: Positive = 16
    num_blocks: Positive | None = None
    kv_cache_memory_bytes: Positive | None = None
    swap_space_gib: Annotated[float, Meta(ge=0.0)] = 0.0
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Continuous batching.

    Attributes:
        max_num_seqs: sequences in the batch at once.
        max_num_batched_tokens: tokens run in one step at most.
        long_prefill_token_threshold: prompt tokens run in one step while other sequences decode, so that
            their inter-token time stays bounded; 0 chooses from the measured prefill speed.
        ageing_steps: steps of waiting that lift a request by one priority level.
        max_overtakes: admissions that may pass a request that does not fit before it holds the door.
        max_num_queued_reqs: waiting requests beyond which new ones are refused with 429, save those of tenants that
            have not had their equal part of the queue.
    """

    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    long_prefill_token_threshold: Natural = 0
    ageing_steps: Positive = 1024
    max_overtakes: Natural = 16
    max_num_queued_reqs: Positive = 1024


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the engine process is started with.

    Attributes:
        threads: compute threads; ``None`` takes the cores this process may use (cgroup limits included).
        kernels: ``auto`` compiles CPU kernels once and uses them, and torch where that fails; ``torch`` never does.
        deterministic: what a sequence gets does not depend on what else is in the batch, nor on how its prompt was cut
            into chunks: no choice of kernels by row count, no splitting of long pasts, no shared-prefix attention.
            Needs compiled kernels, and thus a dtype of bfloat16 or auto.
        executor: ``torch``, or ``package.module:factory`` for a test double; a factory takes this config
            and returns ``(Executor, EngineInfo)``.
    """

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    threads: Positive | None = None
    kernels: Literal["auto", "torch"] = "auto"
    deterministic: bool = False
    executor: str = "torch"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network edge.

    Attributes:
        api_keys: bearer keys; without any, only loopback addresses may be bound.
        allowed_hosts: further Host names to answer to, beside the bound address and loopback names.
        allowed_origins: web origins, beside the server's own, whose pages may talk to it.
        trusted_proxies: addresses and networks of reverse proxies (``unix``: whoever connects to ``uds``) whose
            X-Forwarded-For and X-Forwarded-Proto say where a request comes from. They must set or append to them.
        receive_timeout: seconds a client has to deliver headers and body.
        send_timeout: seconds without progress after which a reader that does not read is dropped.
        heartbeat_interval: seconds between SSE comments while nothing else is sent.
        drain_timeout: seconds running streams get after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    ui: bool = True
    max_body_bytes: Positive = 4 * 1024 * 1024
    max_nesting_depth: Positive = 64
    max_messages: Positive = 4096
    max_stop_strings: Positive = 16
    receive_timeout: Seconds = 20.0
    send_timeout: Seconds = 30.0
    heartbeat_interval: Seconds = 10.0
    drain_timeout: Seconds = 30.0
    max_websocket_connections: Positive = 1024
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A system prompt that the operator publishes; ``group`` empty means to everybody."""

    text: str
    group: str = ""


class TenancyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where tenants come from.

    Attributes:
        database: SQLite file that ``chatserve tenants`` manages; ``None`` takes the one in the data folder if it is
            there, and keeps no state otherwise.
        file: TOML file that declares tenants.
        prefixes: system prompts that tenants share, computed at start.
        admin_api_key: opens ``/admin/*``, which does not exist without it, and ``/metrics``.
    """

    database: str | None = None
    file: str | None = None
    prefixes: tuple[Prefix, ...] = ()
    admin_api_key: str | None = None


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole program."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    tenancy: TenancyConfig = TenancyConfig()
