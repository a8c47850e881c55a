"""A server process over the fake engine, for tests that send it real signals.

Run as ``python -m tests.server.draining_server FOLDER DRAIN_TIMEOUT``: prints its URL, serves 40-token answers, and
exits as the product would. Each answer stops after its fifth token, prints a line, and goes on after SIGUSR1.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from chatserve.config import ServerConfig
from chatserve.server import run
from tests.fakes import FakeEngineClient, Script, make_config


class HeldEngine(FakeEngineClient):
    """Holds every answer in the middle until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__(Script([120] * 40))
        self.go_on = asyncio.Event()

    async def before_step(self, position: int) -> None:
        if position == 5:
            print("holding", flush=True)
            await self.go_on.wait()


async def main(folder: Path, drain_timeout: float) -> None:
    engine = HeldEngine()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.go_on.set)
    config = make_config(folder, server=ServerConfig(port=0, drain_timeout=drain_timeout, log_format="json"))
    run.GOODBYE_SECONDS = 3600  # no test gets its end from this
    try:
        await run.serve(config, engine, on_listening=lambda url: print(url, flush=True))  # type: ignore[arg-type]
    finally:
        await engine.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(sys.argv[1]), float(sys.argv[2])))
