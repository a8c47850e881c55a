"""An executor that computes nothing: every step sleeps and then says random tokens.

Loaded by name in a real engine process, so that the API process can be measured with everything around the model
real. Its facts are those of the model folder, its tokens ordinary ones of that vocabulary.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

from chatserve.config import EngineConfig
from chatserve.engine.protocol import EngineInfo
from chatserve.scheduler.output import ModelRunnerOutput, SchedulerOutput

FACTORY = "benchmarks._fake_executor:create_executor"
STEP_SECONDS = 0.02
_FIRST, _LAST = 1000, 20000


class FakeExecutor:
    """Answers every plan after `STEP_SECONDS`."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """One random token for each row that samples."""
        time.sleep(STEP_SECONDS)
        count = len(plan.sample_rows) // 4
        return ModelRunnerOutput(self._rng.integers(_FIRST, _LAST, count, dtype=np.int32).tobytes())

    def shutdown(self) -> None:
        """Nothing to release."""


def create_executor(config: EngineConfig) -> tuple[FakeExecutor, EngineInfo]:
    """Executor factory."""
    vocab_size = int(json.loads((Path(config.model.path) / "config.json").read_text())["vocab_size"])
    num_blocks = config.cache.num_blocks or 65536
    info = EngineInfo(
        model=config.model.name,
        weights_revision="none",
        vocab_size=vocab_size,
        max_model_len=8192,
        max_tokens_in_pool=num_blocks * config.cache.block_size,
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
        kv_bytes_per_token=1,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype="none",
        device="none",
        threads=1,
        pid=os.getpid(),
        prefill_tokens_per_second=1e6,
    )
    return FakeExecutor(), info
