"""What does one streamed token cost the API process, without any model?

An engine process whose executor only keeps a pace sends one frame per step with a token for each of 64 streams; a third
process reads the streams, over SSE and over WebSocket. Printed is the API process's own CPU time (user and system, all
threads) per token in the steady state, the median over rounds.
Run: ``scripts/bench streaming [--json]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._local_server import free_port, is_ready
from benchmarks._paced_engine import STEP_SECONDS
from benchmarks._paced_server import write_folder

ROOT = Path(__file__).parents[1]
STREAMS, STEP_MS, SECONDS, ROUNDS = 64, 10.0, 1.5, 5
"""The pace matters: the longer the pause between two steps, the colder caches and clocks are when a frame comes."""

GOAL_US = 15.0
TRANSPORTS = ("sse", "ws")


def measure(
    *,
    streams: int = STREAMS,
    step_ms: float = STEP_MS,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    transports: tuple[str, ...] = TRANSPORTS,
) -> dict[str, Any]:
    """CPU microseconds of the API process per streamed token.

    Args:
        step_ms: the engine's pace; 0 is as fast as the API process reads.
        seconds: length of a round; the result is the median over ``rounds``.

    Returns:
        ``us_per_token`` and ``tokens_per_s`` by transport, and ``python_loop_us``: how long ``sum(range(1000))`` took
        just now, which tells a slow moment from slow code.
    """
    result: dict[str, Any] = {"us_per_token": {}, "rounds_us": {}, "tokens_per_s": {}}
    loop = _python_loop_us()
    with _server(step_ms) as (port, pid):
        for transport in transports:
            seen = _read(port, pid, transport, streams, seconds, rounds)
            result["us_per_token"][transport] = round(statistics.median(seen["us_per_token"]), 2)
            result["rounds_us"][transport] = [round(value, 2) for value in seen["us_per_token"]]
            result["tokens_per_s"][transport] = round(seen["tokens_per_s"])
            if transport == "sse":
                result["most_tokens_per_event"] = seen["most_tokens_per_event"]
    result["python_loop_us"] = round((loop + _python_loop_us()) / 2, 2)
    return result | {"streams": streams, "step_ms": step_ms, "load_average": os.getloadavg()[0]}


def _python_loop_us() -> float:
    return statistics.median(timeit.repeat("sum(range(1000))", number=200, repeat=21)) / 200 * 1e6


@contextlib.contextmanager
def _server(step_ms: float) -> Iterator[tuple[int, int]]:
    """Port and process id of an API process over a paced engine."""
    port = free_port()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "CHATSERVE_TEST": "1", STEP_SECONDS: str(step_ms / 1000)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks._paced_server", str(write_folder(Path(folder))), str(port)]
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
        try:
            deadline = time.monotonic() + 60.0
            while not is_ready(f"http://127.0.0.1:{port}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(60)


def _read(port: int, pid: int, transport: str, streams: int, seconds: float, rounds: int) -> dict[str, Any]:
    arguments = [str(value) for value in (port, pid, transport, streams, seconds, rounds)]
    command = [sys.executable, "-m", "benchmarks._paced_readers", *arguments]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    seen: dict[str, Any] = json.loads(output)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help="pace of the engine (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--transport", choices=TRANSPORTS, help="only this one")
    arguments = parser.parse_args()
    result = measure(
        streams=arguments.streams,
        step_ms=arguments.step_ms,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        transports=(arguments.transport,) if arguments.transport else TRANSPORTS,
    )
    if arguments.json:
        print(json.dumps(result))
        return
    for transport, value in result["us_per_token"].items():
        print(
            f"{transport:<4} {value:>6.1f} us of API process per token, {arguments.streams} streams, "
            f"{result['tokens_per_s'][transport]} tokens/s   goal <= {GOAL_US:g}"
        )
    print(f"in this run sum(range(1000)) took {result['python_loop_us']:.1f} us")


if __name__ == "__main__":
    main()
