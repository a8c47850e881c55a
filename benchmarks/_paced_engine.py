"""An executor that computes nothing, at a fixed pace: what `benchmarks.streaming` puts behind the engine's socket.

Every sampled row gets a word of `benchmarks._paced_server`'s vocabulary, so the API process sees exactly what a model
on that pace would send it: one frame per step with one token per stream.
"""

from __future__ import annotations

import os
import time

import numpy as np

from chatserve.config import EngineConfig
from chatserve.engine.protocol import EngineInfo
from chatserve.scheduler.output import ModelRunnerOutput, SchedulerOutput

FACTORY = "benchmarks._paced_engine:create_executor"
STEP_SECONDS = "CHATSERVE_BENCH_STEP_SECONDS"
"""Environment variable that holds the pace; 0 for as fast as the API process reads."""

NUM_CONTROL, NUM_WORDS = 256, 4096
"""Ids below the first are bytes; the words follow."""


class PacedExecutor:
    """One step every ``step_seconds``, measured from start to start."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._due = 0.0
        self._rng = np.random.default_rng(11)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        now = time.perf_counter()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(now, self._due) + self._step_seconds
        count = len(plan.sample_sources) // 4
        return ModelRunnerOutput(self._rng.integers(NUM_CONTROL, NUM_CONTROL + NUM_WORDS, count, np.int32).tobytes())

    def shutdown(self) -> None:
        """Nothing to free."""


def create_executor(config: EngineConfig) -> tuple[PacedExecutor, EngineInfo]:
    """Factory, as `EngineConfig.executor` wants it."""
    blocks, block_size = 65_536, config.cache.block_size
    info = EngineInfo(
        model="paced",
        weights_revision="paced",
        vocab_size=NUM_CONTROL + NUM_WORDS + 3,
        max_model_len=8192,
        max_tokens_in_pool=blocks * block_size,
        block_size=block_size,
        num_blocks=blocks,
        kv_bytes_per_token=1,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype="none",
        device="none",
        threads=1,
        pid=os.getpid(),
    )
    return PacedExecutor(float(os.environ[STEP_SECONDS])), info
