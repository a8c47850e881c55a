"""``chatserve serve``: settle the settings, start the engine process, then become the API process.

The engine is started before the server is imported, so that both load at the same time. Knows what to tell the
person at the terminal; serving is `chatserve.server.run`'s part and the engine's life is `EngineClient`'s. Never
imports torch: only the engine process does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import click
import msgspec

from chatserve.cli import flags, settings
from chatserve.config import Config

if TYPE_CHECKING:
    from chatserve.engine.client import EngineClient
    from chatserve.engine.launch import EngineChild
    from chatserve.tenancy.registry import TenantRegistry

MAX_TENANTS_NAMED = 8
DEFAULT_MODEL = "smollm2-135m"


@click.command()
@click.argument("model", required=False)
@flags.options
def serve(model: str | None, config: str | None, **given: object) -> None:
    """Serve MODEL: a name (smollm2-135m, the default), a .gguf file, a Hugging Face folder or a hub id.

    Every flag can also be set as CHATSERVE_<FLAG>, or in the TOML file that --config names.
    """
    loaded = settings.load(given, os.environ, config)
    for warning in loaded.warnings:
        click.echo(f"Warning: {warning}", err=True)

    from chatserve.server.origin import check_bind
    from chatserve.tenancy.registry import open_tenants

    tenants = open_tenants(loaded.config, os.environ)
    check_bind(loaded.config.server, has_tenants=tenants.keys_required)
    if known := tenants.tenants():
        names = [tenant.name for tenant in known[:MAX_TENANTS_NAMED]]
        more = len(known) - len(names)
        click.echo(f"Tenants: {', '.join(names)}{f' and {more} more' if more else ''}", err=True)
    ready_config = _with_model(loaded.config, model or loaded.model or DEFAULT_MODEL)

    from chatserve.engine.launch import EngineChild

    child = EngineChild(ready_config.engine)

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(ready_config, child, tenants))


def _with_model(config: Config, model: str) -> Config:
    """The configuration with the prepared folder of ``model`` in it; fetches and converts it if need be."""
    from chatserve.cli.models import ConsoleProgress
    from chatserve.model.store import resolve

    progress = ConsoleProgress()
    try:
        prepared = resolve(model, progress)
    finally:
        progress.close()
    click.echo(f"Model {prepared.name} from {prepared.source}", err=True)
    named = msgspec.structs.replace(
        config.engine.model,
        path=str(prepared.path),
        name=config.engine.model.name or prepared.name,
        revision=prepared.revision,
    )
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, model=named))


async def _run(config: Config, child: EngineChild, tenants: TenantRegistry) -> None:
    """Serve until a signal ends it, or until the engine is given up: then drain and raise the reason."""
    from chatserve.engine.client import EngineClient

    engine = EngineClient(config.engine, child)
    engine.on_ready_change(lambda ready: _announce(engine, ready))
    await engine.start()
    try:
        from chatserve.server import run

        serving = asyncio.create_task(run.serve(config, engine, tenants=tenants, on_listening=_announce_url))
        watching = asyncio.create_task(engine.wait_failed())
        await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if engine.failure is not None:
            await _end(serving)
            raise engine.failure
        await serving
    finally:
        await engine.close()


async def _end(serving: asyncio.Task[None]) -> None:
    """The engine is given up: end the server the way an operator would, so that open connections end in order."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        serving.cancel()  # it does not serve yet
    else:
        signal.raise_signal(signal.SIGTERM)
    await asyncio.wait((serving,))


def _announce_url(url: str) -> None:
    click.echo(f"Listening on {url}", err=True)


def _announce(engine: EngineClient, ready: bool) -> None:
    if not ready:
        return  # the supervisor logs why
    info = engine.info
    kv_bytes = info.num_blocks * info.block_size * info.kv_bytes_per_token
    kernels = f"{info.kernels} kernels, " if info.kernels else ""
    weights = f"{info.weights} weights " if info.weights else ""
    click.echo(
        f"Engine ready: {info.model}, {weights}on {info.device}, {kernels}{info.threads} threads, "
        f"up to {info.max_model_len} tokens per sequence\n"
        f"KV cache: {info.num_blocks} blocks of {info.block_size} tokens, {info.dtype}, {kv_bytes / 2**20:.0f} MiB "
        f"({info.num_blocks * info.block_size} tokens)",
        err=True,
    )
