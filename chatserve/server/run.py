"""Runs the HTTP server: binds, listens before the engine is ready, serves, drains, stops.

Builds the `ServerContext` and owns the order of events at both ends of a server's life. Does not spawn or stop the
engine: whoever calls `serve` has started the `EngineClient` and closes it afterwards. Called by
`chatserve.cli.serve`, and by tests.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import structlog
import uvicorn

from chatserve.config import Config, ServerConfig
from chatserve.engine.client import EngineClient
from chatserve.errors import ConfigError, DrainingError
from chatserve.server.app import create_app
from chatserve.server.auth import Authenticator
from chatserve.server.auth_address import heed_proxies
from chatserve.server.auth_guard import UNGUESSABLE_CHARS, is_guessable
from chatserve.server.context import Lifecycle, ServerContext
from chatserve.server.generation_service import GenerationService
from chatserve.server.http_protocol import guarded_protocol
from chatserve.server.log_setup import configure_logging
from chatserve.server.metrics import ServerMetrics
from chatserve.server.origin import OriginPolicy, check_bind
from chatserve.server.prefixes import PrefixRegistry
from chatserve.server.sampling_defaults import sampling_defaults
from chatserve.server.tenant_sync import TenantSync
from chatserve.server.ws_transport import WebSocketProtocol
from chatserve.tenancy.registry import TenantRegistry, open_registry, open_tenants
from chatserve.text.answer_memory import AnswerMemory
from chatserve.text.chat_template import ChatTemplate
from chatserve.text.tokenizer import Tokenizer

BACKLOG = 2048
SEND_BUFFER_BYTES = 128 * 1024
"""Of the kernel, per connection: what a reader that does not read can make us hold, beside uvicorn's 64 KiB."""

MAX_WEBSOCKET_FRAME = 256 * 1024
GOODBYE_SECONDS = 5
"""After the drain: how long the last bytes of running responses get to leave."""


async def serve(
    config: Config,
    engine: EngineClient,
    *,
    tenants: TenantRegistry | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; returns when everything has ended.

    Args:
        engine: started, ready or not; `/readyz` tells.
        tenants: closed at the end; opened as the configuration says where not given.
        on_listening: called with the server's URL once connections are accepted.

    Raises:
        ConfigError: an address that may not or cannot be bound, or a database or file of tenants that cannot be used.
        ModelLoadError: the model folder has no usable tokenizer or chat template.
    """
    tenants = tenants or open_tenants(config, os.environ)
    check_bind(config.server, has_tenants=tenants.keys_required)
    configure_logging(config.server)
    listener = bind(config.server)
    try:
        folder = Path(config.engine.model.path)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
        template = await asyncio.to_thread(ChatTemplate.from_folder, folder, tokenizer)
        context = build_context(config, engine, tokenizer, template, tenants)
        server = DrainingServer(context)
        if on_listening is not None:
            on_listening(url_of(listener))
        # What is there now lives as long as the process: the collector need not walk it again between two tokens.
        gc.collect()
        gc.freeze()
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def build_context(
    config: Config,
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    tenants: TenantRegistry | None = None,
) -> ServerContext:
    """All parts of one server; without ``tenants`` it keeps no state and knows the configured API keys only."""
    metrics, lifecycle = ServerMetrics(), Lifecycle()
    tenants = tenants or open_registry(api_keys=config.server.api_keys)
    engine.on_ready_change(lambda _: metrics.observe_engine(engine.stats, engine.restarts))
    answers = AnswerMemory()
    tenant_sync = TenantSync(engine, tenants, answers)
    service = GenerationService(
        engine, tokenizer, template, answers, config, tenants, metrics=metrics, lifecycle=lifecycle
    )
    return ServerContext(
        config=config,
        engine=engine,
        service=service,
        prefixes=PrefixRegistry(engine, service, config.tenancy.prefixes),
        sampling_defaults=sampling_defaults(Path(config.engine.model.path)),
        tenants=tenants,
        tenant_sync=tenant_sync,
        origins=OriginPolicy(config.server),
        auth=Authenticator(tenants, config.tenancy.admin_api_key),
        metrics=metrics,
        lifecycle=lifecycle,
        created=int(time.time()),
    )


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket; connections queue in the kernel until the server accepts them."""
    try:
        if config.uds is not None:
            return _bind_unix(Path(config.uds))
        info = socket.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = info[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise ConfigError(
            f"Cannot listen on {where}: {error.strerror or error}. Choose another --host or --port."
        ) from None


def url_of(listener: socket.socket) -> str:
    """The address a listener was given, as a URL."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


def _bind_unix(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # whoever may open it needs no key
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a drain before its shutdown.

    First signal: readiness false, new work refused, running generations go on for ``drain_timeout`` seconds and
    then end with an explicit error. Second signal: that error now.
    """

    def __init__(self, context: ServerContext) -> None:
        config = context.config.server
        super().__init__(
            uvicorn.Config(
                heed_proxies(create_app(context), config.trusted_proxies),
                proxy_headers=False,  # on by default, for loopback peers and those of an environment variable
                http=guarded_protocol(config.receive_timeout),
                ws=WebSocketProtocol,
                ws_per_message_deflate=False,
                ws_max_size=MAX_WEBSOCKET_FRAME,
                ws_ping_interval=20,
                ws_ping_timeout=20,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=65,
                timeout_graceful_shutdown=GOODBYE_SECONDS,
            )
        )
        self._context = context
        self._drain_until: float | None = None
        self._log = structlog.get_logger("chatserve.server")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Follow the tenants from the first request on."""
        self._warn_of_short_keys()
        await self._context.tenants.start()
        await super().startup(sockets)

    def _warn_of_short_keys(self) -> None:
        config = self._context.config
        keys = (*config.server.api_keys, config.tenancy.admin_api_key)
        short = sum(key is not None and is_guessable(key) for key in keys)
        if short:
            self._log.warning(
                "short_keys",
                count=short,
                effect="refused while wrong keys come from the same address",
                advice=f"use keys of {UNGUESSABLE_CHARS} or more random characters: openssl rand -hex 32",
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Every stream has ended when this returns, and its use is in the books."""
        await super().shutdown(sockets)
        await self._context.tenants.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler. Unlike uvicorn's it does not raise the signal again at the end: a drain exits with 0."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._context.config.server.drain_timeout
        else:
            self._drain_until = 0.0

    def drain(self) -> None:
        """What the first SIGTERM does, for callers without signals."""
        self.handle_exit(signal.SIGTERM, None)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second; true ends the serving."""
        if self._drain_until is not None and not self.should_exit:
            self._drain_step(self._drain_until)
        return await super().on_tick(counter)

    def _drain_step(self, until: float) -> None:
        service, lifecycle = self._context.service, self._context.lifecycle
        if not lifecycle.draining:
            self._log.info("draining", running=service.num_running)
            lifecycle.start_draining()
        if service.num_running and time.monotonic() >= until:
            self._log.warning("drain_timeout", failed=service.num_running)
            service.fail_all(DrainingError("The server is shutting down; this answer was cut. Send it again."))
        if not service.num_running:
            self.should_exit = True
