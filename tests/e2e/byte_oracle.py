"""The oracle model with one token per byte, for servers over the byte-level test tokenizer.

Its answers are noise (often no valid UTF-8), which is what token-exact history has to survive. Loaded by name in a real
engine process; `expected_tokens` is the same model without one.
"""

from __future__ import annotations

import time

import numpy as np

from chatserve.config import EngineConfig
from chatserve.engine.protocol import EngineInfo
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tests.oracle import EOS, OracleExecutor, chain, next_token, oracle_info

NUM_BYTES = 256
KV_BYTES = 12
"""Per token, as `oracle_info` says."""

FACTORY = "tests.e2e.byte_oracle:create_executor"


class ByteOracle(OracleExecutor):
    """Takes its time for answers that ignore the end token, so that they can be stopped on the way: 20 ms a step."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(plan)
        if any(row.sampling.ignore_eos for row in self.rows.values()):
            time.sleep(0.02)
        return output


def create_executor(config: EngineConfig) -> tuple[OracleExecutor, EngineInfo]:
    """Executor factory; ``swap_space_gib`` sizes the host tier, as with real models."""
    num_host_blocks = int(config.cache.swap_space_gib * 2**30) // (KV_BYTES * config.cache.block_size)
    info = oracle_info(config, num_host_blocks=num_host_blocks)
    executor = ByteOracle(info.num_blocks, info.block_size, num_host_blocks=num_host_blocks, vocab_size=NUM_BYTES)
    return executor, info


def swap_space(num_host_blocks: int, block_size: int) -> float:
    """``swap_space_gib`` for so many host blocks."""
    return (num_host_blocks + 0.5) * KV_BYTES * block_size / 2**30


def expected_tokens(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """What a fresh server answers, without the token that ends it."""
    contents = chain(0, 0, np.array(prompt, np.int32))
    output: list[int] = []
    while len(output) < (sampling.max_tokens or 0):
        token = next_token(contents, sampling, NUM_BYTES)
        if token == EOS and not sampling.ignore_eos:
            break
        output.append(token)
        fresh = chain(int(contents[-1]), len(contents), np.array([token], np.int32))
        contents = np.concatenate((contents, fresh))
    return output
