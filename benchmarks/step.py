"""How much of a decode step is Python, and how much of it are the compiled kernels?

Steps of the engine core with the executor that serves, in this process: whole steps are timed, and within them the
calls into the kernels; what remains is Python (scheduling, the worker's bookkeeping, sampling, the frame). Prompts are
random and end anywhere in a block. Rows take the best token, draw theirs, draw under all three penalties, or draw and
want log-probabilities of five alternatives. Cases take turns, so that all see the machine's slow moments. Run:
``scripts/bench step [--json]``; about two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from chatserve_kernels.cpu.library import Library

from benchmarks._engine import Load, Loader
from chatserve.engine.protocol import AddRequest
from chatserve.sampling_params import SamplingParams
from chatserve.scope import Scope

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.7, "logprobs": 5},
}
PROMPT_TOKENS, BLOCK_SIZE = 64, 16
STEPS_PER_TURN = 40
GOAL_MS = 0.3


class Kernels:
    """Seconds spent in calls into the compiled kernels, while `watched`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        calls = {name: getattr(Library, name) for name in ("run", "draw", "call")}
        for name, call in calls.items():
            setattr(Library, name, self._timed(call))
        try:
            yield
        finally:
            for name, call in calls.items():
                setattr(Library, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def decoding(loader: Loader, rows: int, kind: str, turns: int) -> Load:
    """An engine whose ``rows`` sequences are past their prompts and will not end within the turns."""
    output = turns * STEPS_PER_TURN + rows + 100
    blocks = -(-(PROMPT_TOKENS + BLOCK_SIZE + output) // BLOCK_SIZE) + 1
    load = loader.load(num_blocks=rows * blocks, max_num_seqs=rows)
    if not load.info.kernels.startswith("native"):
        raise RuntimeError("The compiled kernels do not run here: there is nothing to tell apart.")
    for number in range(rows):
        options = SamplingParams(max_tokens=output, seed=number, ignore_eos=True, **KINDS[kind])
        prompt = load.fresh_prompt(PROMPT_TOKENS + number % BLOCK_SIZE)
        load.core.add(AddRequest(number + 1, prompt.tobytes(), options, (Scope("tenant", "a"),), tenant="a"))
    for _ in range(output):  # after which the first would have ended
        if len(load.core.step().tokens) == 4 * rows:
            return load
    raise RuntimeError(f"{rows} rows never decode together here.")


def measure(loader: Loader, turns: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Over all steps of each kind of row, in batches of these sizes."""
    cases = tuple((rows, kind) for kind in KINDS for rows in sizes)
    loads = {case: decoding(loader, *case, turns) for case in cases}
    python: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    steps: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    kernels = Kernels()
    gc.collect()
    gc.freeze()  # as the engine process does
    with kernels.watched():
        for _ in range(turns):
            for case, load in loads.items():
                for _ in range(STEPS_PER_TURN):
                    kernels.seconds = 0.0
                    began = time.perf_counter()
                    frame = load.core.step()
                    seconds = time.perf_counter() - began
                    if len(frame.tokens) != 4 * case[0]:
                        raise RuntimeError(f"{len(frame.tokens) // 4} tokens in a step of {case[0]} rows")
                    steps[case].append(seconds * 1e3)
                    python[case].append((seconds - kernels.seconds) * 1e3)
    return {
        f"{rows} {kind}": {
            "python_ms": round(statistics.median(python[rows, kind]), 3),
            "python_p95_ms": round(float(np.percentile(python[rows, kind], 95)), 3),
            "step_ms": round(statistics.median(steps[rows, kind]), 2),
            "python_share": round(float(np.sum(python[rows, kind]) / np.sum(steps[rows, kind])), 3),
        }
        for rows, kind in cases
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--turns", type=int, default=6, help=f"of {STEPS_PER_TURN} steps of each case")
    parser.add_argument("--rows", default="1,16,64", help="sizes of the batches (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    loop = statistics.median(timeit.repeat("sum(range(1000))", number=200, repeat=21)) / 200 * 1e6
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    cases = measure(Loader(arguments.model, arguments.threads), arguments.turns, sizes)
    if arguments.json:
        result = {"rows": cases, "goal_python_ms": GOAL_MS, "python_loop_us": round(loop, 2)}
        print(json.dumps(result | {"load_average": os.getloadavg()[0]}))
        return
    for name, values in cases.items():
        print(
            f"{name:>12} rows: Python {values['python_ms']:.3f} (p95 {values['python_p95_ms']:.3f}) of "
            f"{values['step_ms']:.2f} ms   goal <= {GOAL_MS}"
        )
    print(f"in this run sum(range(1000)) took {loop:.1f} us")


if __name__ == "__main__":
    main()
