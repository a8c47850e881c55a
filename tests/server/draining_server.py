"""A server process over the fake engine, for tests that send it real signals.

Run as ``python -m tests.server.draining_server FOLDER DRAIN_TIMEOUT DELAY``: prints its URL, serves 40-token answers
with ``DELAY`` seconds per token, and exits as the product would.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from chatserve.config import ServerConfig
from chatserve.server.run import serve
from tests.fakes import FakeEngineClient, Script, make_config


async def main(folder: Path, drain_timeout: float, delay: float) -> None:
    engine = FakeEngineClient(Script([120] * 40, delay=delay))
    config = make_config(folder, server=ServerConfig(port=0, drain_timeout=drain_timeout, log_format="json"))
    try:
        await serve(config, engine, on_listening=lambda url: print(url, flush=True))  # type: ignore[arg-type]
    finally:
        await engine.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
