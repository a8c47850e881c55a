"""The host tier on the real runner: what was demoted comes back unchanged, and tokens do not differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from chatserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from chatserve.engine.core import EngineCore
from chatserve.engine.protocol import AddRequest
from chatserve.errors import ConfigError
from chatserve.sampling_params import SamplingParams
from chatserve.scope import Scope
from chatserve.worker import model_runner
from chatserve.worker.in_process import load
from tests.model.tiny import write_model

SCOPE = (Scope("tenant", "t"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, "llama")
    return path


def engine(folder: Path, *, num_blocks: int, swap_space_gib: float = 0.0, mode: str = "auto") -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(path=str(folder), dtype="float32", max_model_len=64),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks, swap_space_gib=swap_space_gib, preemption_mode=mode),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        threads=1,
    )
    executor, info = load(config)
    return EngineCore(config, executor, info)


def outputs(core: EngineCore, prompts: list[list[int]], max_tokens: int) -> dict[int, list[int]]:
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        core.add(AddRequest(index, np.array(prompt, np.int32).tobytes(), sampling, SCOPE))
    tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    while core.has_work:
        frame = core.step()
        ids = np.frombuffer(frame.request_ids, np.int64).tolist()
        for request_id, token in zip(ids, np.frombuffer(frame.tokens, np.int32).tolist(), strict=True):
            tokens[request_id].append(token)
    return tokens


def test_swapped_sequences_say_the_same(folder: Path) -> None:
    """Four sequences on a pool for one and a half, with a host tier: the tokens of a pool for all."""
    prompts = [[(7 * i + j) % 60 + 1 for j in range(11)] for i in range(4)]
    undisturbed = outputs(engine(folder, num_blocks=64), prompts, 20)
    core = engine(folder, num_blocks=13, swap_space_gib=0.01)
    assert outputs(core, prompts, 20) == undisturbed
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.demotions > 0
    assert stats.promotions > 0


def test_blocks_come_back_to_the_byte(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happened on both tiers since, a promoted block holds the bytes that were demoted."""
    demoted: dict[int, bytes] = {}
    num_checked = 0
    core = engine(folder, num_blocks=13, swap_space_gib=0.01)
    host = core._executor._runner.host_kv_cache  # type: ignore[attr-defined]
    move = model_runner._move_blocks

    def move_and_check(source: Tensor, destination: Tensor, pairs: bytes) -> None:
        nonlocal num_checked
        moves = np.frombuffer(pairs, np.int32).reshape(-1, 2).tolist()
        move(source, destination, pairs)
        for origin, target in moves:
            if destination is host:
                demoted[target] = source[origin].numpy().tobytes()
            else:
                assert destination[target].numpy().tobytes() == demoted[origin]
                num_checked += 1

    monkeypatch.setattr(model_runner, "_move_blocks", move_and_check)
    outputs(core, [[(7 * i + j) % 60 + 1 for j in range(11)] for i in range(8)], 20)
    assert num_checked > 10
    assert len(set(demoted.values())) > 10


def test_modes(folder: Path) -> None:
    """``recompute`` has no host tier, and ``swap`` without space is refused with the flag's name."""
    assert engine(folder, num_blocks=8, swap_space_gib=0.01, mode="recompute").stats().host_blocks_total == 0
    with pytest.raises(ConfigError, match="swap-space"):
        engine(folder, num_blocks=8, mode="swap")
