"""An executor double for tests of process life: counts instead of computing, and misbehaves on request.

The token after ``p`` tokens is ``FIRST_TOKEN + p``, so a lost, doubled or foreign token shows. The first prompt
token chooses a behaviour (see the constants); ``max_model_len`` of the configuration is honoured.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from chatserve.config import EngineConfig
from chatserve.engine.protocol import EngineInfo
from chatserve.errors import ModelLoadError
from chatserve.scheduler.output import ModelRunnerOutput, SchedulerOutput

FIRST_TOKEN = 1000
VOCAB_SIZE = 10_000

GOOD = 10
SLOW = 11
"""Each step that runs such a prompt, or its output, takes 20 ms."""
RAISES = 12
HANGS = 13
EXITS = 14

EXECUTOR = "tests.engine.doubles:create_counting_executor"
UNLOADABLE = "tests.engine.doubles:create_unloadable_executor"
DIES_LOADING = "tests.engine.doubles:create_dying_executor"


class CountingExecutor:
    """Plays a plan without a model; ``token_of(p)`` is the token after ``p`` tokens."""

    def __init__(self, token_of: Callable[[int], int] = lambda p: FIRST_TOKEN + p) -> None:
        self._token_of = token_of
        self._behaviour: dict[int, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for new in plan.new_sequences:
            self._behaviour[new.row] = array("i", new.token_ids)[0]
        rows, computed, new_tokens = (array("i", data) for data in (plan.rows, plan.num_computed, plan.num_new))
        behaviours = {self._behaviour[row] for row in rows}
        if SLOW in behaviours:
            time.sleep(0.02)
        if RAISES in behaviours:
            raise RuntimeError("the device is gone")
        if HANGS in behaviours:
            time.sleep(3600)
        if EXITS in behaviours:
            os._exit(7)
        sources = array("i", plan.sample_sources)
        tokens = array("i", (self._token_of(computed[source] + new_tokens[source]) for source in sources))
        return ModelRunnerOutput(tokens.tobytes())

    def shutdown(self) -> None:
        self._behaviour.clear()


def create_counting_executor(config: EngineConfig) -> tuple[CountingExecutor, EngineInfo]:
    """A factory as `EngineConfig.executor` wants it."""
    num_blocks = config.cache.num_blocks or 256
    block_size = config.cache.block_size
    info = EngineInfo(
        model=config.model.name or "counting",
        weights_revision="counting",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.model.max_model_len or 4096,
        max_tokens_in_pool=num_blocks * block_size,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes_per_token=4,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype="int32",
        device="cpu",
        threads=1,
        pid=os.getpid(),
        eos_token_ids=(),
    )
    return CountingExecutor(), info


def create_letters_executor(config: EngineConfig) -> tuple[CountingExecutor, EngineInfo]:
    """Counts through the alphabet in bytes, for servers whose tokenizer knows bytes only; loads once the model's
    folder has no file named ``hold``.
    """
    while (Path(config.model.path or "") / "hold").exists():
        time.sleep(0.01)
    _, info = create_counting_executor(config)
    return CountingExecutor(lambda p: ord("a") + p % 26), info


def create_unloadable_executor(config: EngineConfig) -> tuple[CountingExecutor, EngineInfo]:
    """A model folder that nobody can load."""
    raise ModelLoadError(f"{config.model.path} has no weights. Pull the model again.")


def create_dying_executor(config: EngineConfig) -> tuple[CountingExecutor, EngineInfo]:
    """An engine that the kernel kills each time it loads."""
    os._exit(9)
