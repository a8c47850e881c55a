"""What the API process costs per streamed token: its own CPU time, with everything real but the model.

The server is a process with its engine process, whose executor computes nothing; the client is this process, so
neither counts. CPU time is read from the kernel's clock of the API process between two moments in which all streams
run, so connections and prompts do not count either.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._fake_executor import FACTORY, STEP_SECONDS
from benchmarks._load import Summary, run_load
from benchmarks._workload import Prompts
from benchmarks.peers import ours
from benchmarks.peers.process import Model, Need, Server

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64, 300


@dataclass(frozen=True)
class ApiCost:
    """One measurement."""

    us_per_token: float
    tokens_per_second: float


def measure_api_cost(model: Model, prompts: Prompts, port: int) -> ApiCost:
    """Start a server over the fake engine, stream to `STREAMS` clients, stop it.

    Raises:
        ServerError: it did not start.
        LoadError: a stream failed.
    """
    with tempfile.TemporaryDirectory(prefix="race-api-") as folder:
        preset = Path(folder, "fake.toml")
        preset.write_text(f'[engine]\nexecutor = "{FACTORY}"\n')
        launch = ours.launch(model, Need(streams=STREAMS), port, threads=1)
        launch = dataclasses.replace(
            launch, command=[*launch.command, "--config", str(preset)], environment={"CHATSERVE_TEST": "1"}
        )
        server = Server("ours, fake engine", launch)
        try:
            return _measure(server, prompts)
        finally:
            server.stop()


def _measure(server: Server, prompts: Prompts) -> ApiCost:
    def work(output_tokens: int) -> Summary:
        conversations = prompts.conversations(STREAMS, prompt_tokens=PROMPT_TOKENS, output_tokens=output_tokens)
        marks.clear()
        return Summary(run_load(server.target, conversations, watch=watch))

    async def watch() -> None:
        # All streams run from a few steps after the start to the last one: the middle third is looked at.
        for _ in range(2):
            await asyncio.sleep(OUTPUT_TOKENS * STEP_SECONDS / 3)
            marks.append((time.perf_counter(), process_cpu_seconds(server.process.pid)))

    marks: list[tuple[float, float]] = []
    work(8)
    summary = work(OUTPUT_TOKENS)
    (begin, cpu_before), (end, cpu_after) = marks
    tokens = summary.tokens_between(begin, end)
    return ApiCost((cpu_after - cpu_before) / tokens * 1e6, tokens / (end - begin))


def process_cpu_seconds(pid: int) -> float:
    """CPU time of one process, all threads, in the resolution of the scheduler's clock.

    Linux derives the id of a process's CPU clock from its pid (``clock_getcpuclockid``): the complement of the pid in
    all bits but the lowest three, which say "scheduler's clock, whole process".
    """
    return time.clock_gettime((~pid << 3) | 2)
