"""One run of the race: takes rows one after another and servers in turn, and keeps what the rows have in common.

Rows 1 to 7 are data (`_race_rows`); row 8 starts servers, row 9 measures our API process alone (`streaming`).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from typing import Any

from benchmarks import _bandwidth, streaming
from benchmarks._fleet import Fleet, load_average, say
from benchmarks._load import LoadError, Summary, run_load
from benchmarks._race_rows import PEERS, Figures, LoadRow, Metric, Work, compare, line_of, load_rows, significant
from benchmarks._workload import Prompts
from benchmarks.peers import ours
from benchmarks.peers.process import Need, Server, ServerError

ROWS = (*load_rows(), "8", "9")

WARM_UP = 4
"""Conversations that each server gets before a row's first round."""

START_NEED = Need(streams=16, context=1024)
"""What servers are started with in row 8: memory for ordinary use."""

SLOW_START = 15.0
"""Seconds beyond which row 8 takes one start of a server instead of one for each round."""


class Race:
    """Servers, prompts and the bandwidth seen so far.

    Attributes:
        loads: load average after each round and each row.
        speeds: the best of each read loop so far, bytes per second.
        client_us: microseconds of this process's CPU per token, for each measurement.
        failures: what went wrong, by row and server; the row goes on without that server.
    """

    def __init__(self, fleet: Fleet, rounds: int, seed: int) -> None:
        self.fleet = fleet
        self.rounds = rounds
        self.loads: list[float] = []
        self.speeds: dict[str, float] = {}
        self.client_us: list[float] = []
        self.failures: dict[str, str] = {}
        self._prompts = Prompts(fleet.model.vocab_size, seed)
        self._loops = _bandwidth.read_loops()

    def run(self, number: str) -> Any:
        """One row; what it returns is for `lines`."""
        say(f"row {number}")
        if number == "8":
            result: Any = self._start_row()
        elif number == "9":
            result = self._api_row()
        else:
            result = self._load_row(load_rows()[number])
        self.loads.append(load_average())
        return result

    def lines(self, results: dict[str, Any]) -> dict[str, Any]:
        """Every row's part of the JSON object; the byte floor is that of the whole run, so it is known only now."""
        rows = load_rows()
        lines = {}
        for number, result in results.items():
            if number in rows:
                row = rows[number]
                floor = row.floor(self.fleet.model, max(self.speeds.values())) if row.floor is not None else None
                lines[number] = line_of(row, result, floor)
            else:
                lines[number] = result
        return lines

    def measure_bandwidth(self) -> None:
        """Once more; every loop keeps its best."""
        for name, speed in _bandwidth.measure(self._loops, self.fleet.threads).items():
            self.speeds[name] = max(speed, self.speeds.get(name, 0.0))

    def round(self, row: LoadRow, samples: dict[str, list[Figures]], number: int) -> None:
        """The same fresh work for every server, in an order that rotates."""
        self.measure_bandwidth()
        work = row.make(self._prompts)
        names = list(samples)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            figures = self._try_once(row, name, work)
            if figures is None:
                del samples[name]
                continue
            samples[name].append(figures)
            main = row.metrics[0]
            say(f"row {row.number}, round {number + 1}: {name:>5} {figures[main.name]:9.4g} {main.unit}")
        self.loads.append(load_average())

    def warm_up(self, row: LoadRow, name: str) -> bool:
        """A little work of the row's kind that does not count: whatever is made ready on first use, is.

        Returns:
            Whether the server could do it.
        """
        work = row.make(self._prompts)
        return self._try_once(row, name, Work(work.timed[:WARM_UP], work.before)) is not None

    def _load_row(self, row: LoadRow) -> dict[str, list[Figures]]:
        names = [name for name in self.fleet.names if name == "ours" or name in row.peers]
        samples: dict[str, list[Figures]] = {name: [] for name in names if self.warm_up(row, name)}
        for number in range(self.rounds):
            if samples:
                self.round(row, samples, number)
        return samples

    def _try_once(self, row: LoadRow, name: str, work: Work) -> Figures | None:
        """`_run_once`, or ``None`` with the failure noted and the server stopped, for it may be in any state."""
        try:
            return self._run_once(row, name, work)
        except (LoadError, OSError, ServerError) as error:
            self.failures[f"{row.number}, {name}"] = str(error)
            say(f"row {row.number} goes on without {name}: {error}")
            self.fleet.stop(name)
            return None

    def _run_once(self, row: LoadRow, name: str, work: Work) -> Figures:
        target = self.fleet.get(name, row.need).target
        if work.before:
            run_load(target, work.before, concurrency=1)
        with self.fleet.alone(name):
            outcome = run_load(target, work.timed, concurrency=1 if work.one_by_one else None, starts=work.starts)
        summary = Summary(outcome)
        self.client_us.append(summary.client_cpu / summary.output_tokens * 1e6)
        return row.read(summary)

    def _start_row(self) -> dict[str, Any]:
        fleet = self.fleet
        samples: dict[str, list[Figures]] = {}
        for name in fleet.names:
            fleet.stop(name)
            samples[name] = [{"seconds": self._warm_start(name)}]
        cold = statistics.median(self._cold_start() for _ in range(self.rounds)) if "ours" in fleet.names else None
        return {
            "title": "start to ready",
            "goal": "warm ≤5 s, beside the peers'",
            "metric": "seconds",
            **compare(Metric("seconds", "s", False), samples),
            "floor": None,
            "floor_share": None,
            "cold": {"unit": "s", "ours": None if cold is None else significant(cold)},
        }

    def _warm_start(self, name: str) -> float:
        """Median seconds of as many starts as there are rounds, or of a single one if that is slow.

        The first start of a run may read or compile what later ones find, so it does not count.
        """
        fleet = self.fleet
        seconds: list[float] = []
        has_been_started = name in fleet.start_seconds
        while len(seconds) < self.rounds and not (seconds and seconds[0] > SLOW_START):
            server = fleet.start(name, fleet.launch(name, START_NEED))
            server.stop()
            if has_been_started:
                seconds.append(server.start_seconds)
            has_been_started = True
        return statistics.median(seconds)

    def _cold_start(self) -> float:
        """Seconds with an empty cache folder: the GGUF file is converted and the kernels are compiled."""
        fleet = self.fleet
        with tempfile.TemporaryDirectory(prefix="race-cold-") as home:
            port = fleet.launch("ours", START_NEED).port
            cold = ours.launch(fleet.model, START_NEED, port, fleet.threads, source=str(fleet.model.gguf))
            server = Server("ours, cold", dataclasses.replace(cold, environment={"CHATSERVE_HOME": home}))
            server.stop()
            say(f"ours, cold, is ready after {server.start_seconds:.2f} s")
            return server.start_seconds

    def _api_row(self) -> dict[str, Any]:
        # At the slower pace the caches are cold when a frame comes, which is most of the difference.
        paces = {ms: streaming.measure(step_ms=ms, rounds=self.rounds, transports=("sse",)) for ms in (10.0, 20.0)}
        costs = {ms: paces[ms]["us_per_token"]["sse"] for ms in paces}
        return {
            "title": f"API process CPU per streamed token, {streaming.STREAMS} streams, a frame per 10 ms, fake engine",
            "goal": f"≤{streaming.GOAL_US:g} µs",
            "metric": "us_per_token",
            "unit": "µs",
            "ours": costs[10.0],
            **{key: None for name in PEERS for key in (name, f"over_{name}")},
            "floor": None,
            "floor_share": None,
            "us_per_token": costs[10.0],
            "us_per_token_at_20_ms": costs[20.0],
            "tokens_per_second": paces[10.0]["tokens_per_s"]["sse"],
            "rounds": {"ours": [{"us_per_token": value} for value in paces[10.0]["rounds_us"]["sse"]]},
        }
