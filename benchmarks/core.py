"""What does the engine's bookkeeping cost, without any model?

Two questions. *step*: schedule + update + msgpack encoding of the plan while 64 sequences decode (random block
phases), 1,000 wait and the first of them does not fit. *match + insert*: looking a prompt of 2,048 tokens up in
the tree and inserting it, cold (nothing known) and cached (all known); tokens are given as int32 bytes.
Run: ``scripts/bench core [--json]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
import timeit

import msgspec
import numpy as np

from chatserve.cache.kv_cache_manager import KVCacheManager, xxh3_hash
from chatserve.config import SchedulerConfig
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import ModelRunnerOutput
from chatserve.scheduler.request import Request
from chatserve.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
RUNNING, WAITING, STEPS = 64, 1000, 400
PROMPT_TOKENS = 2048
SCOPES = (0,)


def bench_step(rng: random.Random) -> dict[str, float]:
    """Microseconds per step in the steady state, median and p95 over `STEPS` steps."""
    blocks = RUNNING * 64
    manager = KVCacheManager(blocks, BLOCK_SIZE, xxh3_hash(1))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2 * RUNNING, max_num_batched_tokens=65536, max_overtakes=0),
        manager,
        max_model_len=65_536,
        vocab_size=50_000,
        eos_token_ids=(2,),
    )
    encoder = msgspec.msgpack.Encoder()
    sampling = SamplingParams(temperature=0.0, seed=0, ignore_eos=True, max_tokens=700)

    def request(request_id: int, length: int, output: int) -> Request:
        tokens = np.random.default_rng(request_id).integers(3, 50_000, length, dtype=np.int32)
        return Request(request_id, tokens.tobytes(), msgspec.structs.replace(sampling, max_tokens=output), SCOPES)

    def run_step() -> float:
        started = time.perf_counter()
        plan = scheduler.schedule()
        if plan is None:
            raise RuntimeError("nothing to run")
        encoder.encode(plan)
        elapsed = time.perf_counter() - started
        count = len(plan.sample_rows) // 4
        output = ModelRunnerOutput(rng_tokens.integers(3, 50_000, count, dtype=np.int32).tobytes())
        started = time.perf_counter()
        scheduler.update(output)
        return elapsed + time.perf_counter() - started

    rng_tokens = np.random.default_rng(0)
    for i in range(RUNNING):
        scheduler.add(request(i, rng.randint(64, 256), 700))
    for _ in range(8):
        run_step()
    # The head of the queue needs more than is left and lets nobody pass; all others would fit.
    scheduler.add(request(10_000, 60_000, 700))
    for i in range(WAITING - 1):
        scheduler.add(request(20_000 + i, 64, 64))
    times = [run_step() for _ in range(STEPS)]
    if len(scheduler.batch) != RUNNING or len(scheduler.waiting) < WAITING:
        raise RuntimeError("not the state this benchmark is about")
    return {
        "median": statistics.median(times) * 1e6,
        "p95": statistics.quantiles(times, n=20)[-1] * 1e6,
    }


def bench_match_insert() -> dict[str, float]:
    """Microseconds to match a prompt and insert it, medians over 300 prompts."""
    manager = KVCacheManager(64 * PROMPT_TOKENS // BLOCK_SIZE, BLOCK_SIZE, xxh3_hash(1))
    generator = np.random.default_rng(5)
    cold: list[float] = []
    cached: list[float] = []

    def once(prompt: bytes, now: int) -> float:
        tokens = np.frombuffer(prompt, np.int32)
        started = time.perf_counter()
        match = manager.match(prompt, SCOPES, now)
        admission = manager.admit(match, SCOPES, len(tokens), len(tokens) + 1)
        if admission is None:
            raise RuntimeError("the pool is too small for this benchmark")
        manager.publish(admission.table, tokens, len(tokens), now)
        elapsed = time.perf_counter() - started
        manager.take_copies()
        manager.finish_step()
        manager.release(admission.table, tokens, len(tokens), now)
        return elapsed

    for i in range(300):
        prompt = generator.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32).tobytes()
        cold.append(once(prompt, 2 * i + 1))
        cached.append(once(prompt, 2 * i + 2))
    return {"cold": statistics.median(cold) * 1e6, "cached": statistics.median(cached) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()
    # Machines drift: how fast plain Python ran just now tells a slow moment from slow code.
    loop = statistics.median(timeit.repeat("sum(range(1000))", number=200, repeat=21)) / 200 * 1e6
    step = bench_step(random.Random(1))
    match_insert = bench_match_insert()
    result = {
        "step_us": round(step["median"], 1),
        "step_us_p95": round(step["p95"], 1),
        "match_insert_us": {key: round(value, 1) for key, value in match_insert.items()},
        "python_loop_us": round(loop, 2),
        "running": RUNNING,
        "waiting": WAITING,
        "prompt_tokens": PROMPT_TOKENS,
        "block_size": BLOCK_SIZE,
        "load_average": os.getloadavg()[0],
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"step ({RUNNING} running, {WAITING} waiting)  {result['step_us']:>7} us   goal <= 100")
    print(f"match + insert {PROMPT_TOKENS} tokens, cold  {match_insert['cold']:>7.1f} us   goal <= 150")
    print(f"match + insert {PROMPT_TOKENS} tokens, cached{match_insert['cached']:>7.1f} us   goal <= 60")
    print(f"in this run sum(range(1000)) took {loop:.1f} us")


if __name__ == "__main__":
    main()
