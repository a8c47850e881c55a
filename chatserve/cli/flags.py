"""The flags of ``chatserve serve`` as two tables: what can be set, and what is known but not there yet.

Spellings are vLLM's where it has the flag. Knows names, help and where a value goes in `Config`; reading values
from files and the environment, and judging them, is `chatserve.cli.settings`' part. A known flag that does nothing
here yet is in the second table, so that it is refused by name instead of ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import click
import msgspec

Kind = Literal["text", "size", "list", "switch"]


class Setting(msgspec.Struct, frozen=True):
    """One value of `Config` that a flag and an environment variable can set.

    Attributes:
        path: dotted path in `Config`.
        flag: long option; a switch gets its ``--no-`` form as well.
        kind: ``size`` takes suffixes as vLLM does: k, m, g, t decimal and K, M, G, T binary; ``list`` may be repeated.
        variables: environment variables of other servers that are honoured too, after our own.
        spellings: other servers' words for a value.
    """

    path: str
    flag: str
    help: str
    kind: Kind = "text"
    aliases: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    spellings: dict[str, str] = {}

    @property
    def key(self) -> str:
        """The keyword under which click passes the flag's value."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        return variable(self.flag)


class Unsupported(msgspec.Struct, frozen=True):
    """A flag that vLLM (or a later chatserve) has and this version does not.

    Attributes:
        harmless: values that ask for what happens anyway; they are accepted.
        why: what to do instead.
    """

    flag: str
    why: str
    harmless: tuple[str, ...] = ()
    switch: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def variable(flag: str) -> str:
    """The environment variable of a flag: ``--max-model-len`` is ``CHATSERVE_MAX_MODEL_LEN``."""
    return "CHATSERVE_" + flag.removeprefix("--").replace("-", "_").upper()


_LOG_LEVELS = {"trace": "debug", "warn": "warning", "critical": "error"}

SETTINGS = (
    Setting("server.host", "--host", "Address to listen on. Anything but loopback needs --api-key."),
    Setting("server.port", "--port", "Port to listen on; 0 takes a free one."),
    Setting("server.uds", "--uds", "Listen on this Unix socket instead."),
    Setting(
        "server.api_keys",
        "--api-key",
        "A key that clients must send. Repeatable. Better in CHATSERVE_API_KEY: flags show in the process list.",
        kind="list",
        variables=("VLLM_API_KEY",),
    ),
    Setting("server.allowed_hosts", "--allowed-hosts", "A further Host name to answer to. Repeatable.", kind="list"),
    Setting(
        "server.allowed_origins",
        "--allowed-origins",
        "A web origin whose pages may talk to this server. Repeatable.",
        kind="list",
    ),
    Setting(
        "server.trusted_proxies",
        "--trusted-proxies",
        "Address or network of a proxy whose X-Forwarded-For is believed; unix for --uds. Repeatable.",
        kind="list",
    ),
    Setting("server.ui", "--ui", "Serve the chat page at /.", kind="switch"),
    Setting("server.max_body_bytes", "--max-body-bytes", "Longest request body.", kind="size"),
    Setting("server.heartbeat_interval", "--sse-ping-interval", "Seconds between comments on a quiet event stream."),
    Setting("server.receive_timeout", "--receive-timeout", "Seconds a client has to deliver its request."),
    Setting("server.send_timeout", "--send-timeout", "Seconds after which a client that does not read is dropped."),
    Setting("server.drain_timeout", "--shutdown-timeout", "Seconds that running answers get after SIGTERM."),
    Setting("server.max_websocket_connections", "--max-websocket-connections", "WebSockets open at once."),
    Setting(
        "server.log_level",
        "--log-level",
        "debug, info, warning or error.",
        aliases=("--uvicorn-log-level",),
        variables=("VLLM_LOGGING_LEVEL",),
        spellings=_LOG_LEVELS,
    ),
    Setting("server.log_format", "--log-format", "console or json."),
    Setting(
        "tenancy.database",
        "--tenants-db",
        "Database of tenants, made if need be; default: the one in the data folder, if there is one.",
    ),
    Setting("tenancy.file", "--tenants-file", "TOML file that declares tenants, for machines without state."),
    Setting(
        "tenancy.admin_api_key",
        "--admin-api-key",
        "Opens /admin/*, which does not exist without it, and /metrics. Better in CHATSERVE_ADMIN_API_KEY.",
    ),
    Setting("engine.model.name", "--served-model-name", "The model's name for clients."),
    Setting(
        "engine.model.dtype",
        "--dtype",
        "auto, bfloat16, float16 or float32, for weights and KV cache.",
        spellings={"half": "float16", "float": "float32"},
    ),
    Setting("engine.model.max_model_len", "--max-model-len", "Tokens of prompt and output together.", kind="size"),
    Setting("engine.cache.block_size", "--block-size", "Tokens per KV block, a power of two from 2 on."),
    Setting("engine.cache.num_blocks", "--num-gpu-blocks-override", "Exact number of KV blocks."),
    Setting("engine.cache.kv_cache_memory_bytes", "--kv-cache-memory-bytes", "Size of the KV cache.", kind="size"),
    Setting("engine.cache.swap_space_gib", "--swap-space", "GiB of host memory that blocks are demoted to; 0 is none."),
    Setting("engine.cache.preemption_mode", "--preemption-mode", "auto, swap or recompute."),
    Setting("engine.scheduler.max_num_seqs", "--max-num-seqs", "Sequences that run at once."),
    Setting(
        "engine.scheduler.max_num_batched_tokens", "--max-num-batched-tokens", "Tokens run in one step.", kind="size"
    ),
    Setting(
        "engine.scheduler.long_prefill_token_threshold",
        "--long-prefill-token-threshold",
        "Prompt tokens run in one step while others wait for their next token; 0 chooses.",
        kind="size",
    ),
    Setting("engine.scheduler.max_num_queued_reqs", "--max-num-queued-reqs", "Waiting requests before 429."),
    Setting(
        "engine.model.quantization",
        "--quantization",
        "auto (the blocks a GGUF file stores), none (bfloat16), q4_1 or q8_0: how CPU kernels hold the weights.",
    ),
    Setting("engine.kernels", "--kernels", "auto (compiled once, on this machine) or torch."),
    Setting(
        "engine.deterministic",
        "--deterministic",
        "Tokens do not depend on what else is in the batch; slower, CPU kernels only.",
        kind="switch",
    ),
    Setting("engine.threads", "--threads", "Compute threads; default: the cores this process may use."),
)

_LATER = "This version does not have it."
_CHAT_TEMPLATE = "The model's own chat template is used."
_PROXY = "Put a reverse proxy in front."
_GENERATION = "Send sampling parameters with each request."
_ALWAYS_CORS = "Origins that --allowed-origins names may use every method and header."

UNSUPPORTED = (
    Unsupported("--tensor-parallel-size", "One process computes.", ("1",), aliases=("-tp",)),
    Unsupported("--pipeline-parallel-size", "One process computes.", ("1",), aliases=("-pp",)),
    Unsupported("--data-parallel-size", "One engine per server.", ("1",), aliases=("-dp",)),
    Unsupported("--kv-cache-dtype", "The KV cache has the dtype of the model (--dtype).", ("auto",)),
    Unsupported("--kv-offloading-size", "Use --swap-space.", ("0",)),
    Unsupported("--gpu-memory-utilization", "Use --kv-cache-memory-bytes or --num-gpu-blocks-override."),
    Unsupported("--enable-prefix-caching", "The prefix cache is always on.", ("true",), switch=True),
    Unsupported("--enable-chunked-prefill", "Prefill is always chunked.", ("true",), switch=True),
    Unsupported("--enable-prompt-tokens-details", "Usage always has them.", ("true",), switch=True),
    Unsupported("--prefix-caching-hash-algo", "Tokens are compared, whatever the hash."),
    Unsupported("--max-num-partial-prefills", "Use --long-prefill-token-threshold."),
    Unsupported("--scheduling-policy", "Priority with ageing is the only policy.", ("priority",)),
    Unsupported("--max-num-queued-tokens", "Use --max-num-queued-reqs."),
    Unsupported("--stream-interval", "Every token is sent at once.", ("1",)),
    Unsupported("--enforce-eager", "There is no graph capture to switch off.", ("true", "false"), switch=True),
    Unsupported("--speculative-config", _LATER),
    Unsupported("--seed", _GENERATION),
    Unsupported("--generation-config", _GENERATION, ("auto",)),
    Unsupported("--override-generation-config", _GENERATION),
    Unsupported("--max-logprobs", "It is 20.", ("20",)),
    Unsupported("--tokenizer", "The tokenizer in the model's folder is used."),
    Unsupported("--revision", "Name it in MODEL: owner/name@revision."),
    Unsupported("--trust-remote-code", "Code from model folders is never run.", ("false",), switch=True),
    Unsupported("--chat-template", _CHAT_TEMPLATE),
    Unsupported("--chat-template-content-format", _CHAT_TEMPLATE, ("auto", "string")),
    Unsupported("--enable-auto-tool-choice", _LATER, ("false",), switch=True),
    Unsupported("--tool-call-parser", _LATER),
    Unsupported("--reasoning-parser", _LATER),
    Unsupported("--enable-force-include-usage", "Clients ask with stream_options.", ("false",), switch=True),
    Unsupported("--enable-request-id-headers", _LATER, ("false",), switch=True),
    Unsupported("--enable-log-requests", "Prompts are never logged.", ("false",), switch=True),
    Unsupported("--disable-log-stats", "Counters are at /metrics.", ("false",), switch=True),
    Unsupported("--kv-events-config", _LATER),
    Unsupported("--otlp-traces-endpoint", _LATER),
    Unsupported("--root-path", _PROXY),
    Unsupported("--ssl-keyfile", _PROXY),
    Unsupported("--ssl-certfile", _PROXY),
    Unsupported("--allowed-methods", _ALWAYS_CORS),
    Unsupported("--allowed-headers", _ALWAYS_CORS),
    Unsupported("--cache-scope-default", "Every tenant has a scope of its own.", ("tenant",)),
)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a click command with ``--config`` and every flag of both tables; values stay text here."""
    for unsupported in reversed(UNSUPPORTED):
        names = _names(unsupported.flag, unsupported.switch, unsupported.aliases)
        command = click.option(*names, unsupported.key, default=None, hidden=True)(command)
    for setting in reversed(SETTINGS):
        names = _names(setting.flag, setting.kind == "switch", setting.aliases)
        command = click.option(
            *names,
            setting.key,
            default=None,
            multiple=setting.kind == "list",
            metavar=None if setting.kind == "switch" else "VALUE",
            help=setting.help,
        )(command)
    return click.option(
        "--config", metavar="FILE", default=None, help="A TOML file, or the name of a preset (see configs/)."
    )(command)


def _names(flag: str, switch: bool, aliases: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{flag}/--no-{flag.removeprefix('--')}" if switch else flag, *aliases)
