"""A model folder becomes an executor whose report is true, sized for the machine, or a clear refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from chatserve_kernels.cpu.build import supported_isas

from chatserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from chatserve.errors import ConfigError, ModelLoadError
from chatserve.worker import machine
from chatserve.worker.in_process import eos_token_ids, load
from tests.kernels.native import compiler
from tests.model.tiny import SIZES, edit_config, write_model
from tests.worker.driver import Plan, Run, sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "qwen3")
    return folder


def config(folder: Path, **cache: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(folder), name="tiny", dtype="float32"),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=3),
        threads=1,
    )


def test_the_report_is_true(folder: Path) -> None:
    """Sizes, limits and end tokens in `EngineInfo` are those of the model, the configuration and the pool."""
    executor, info = load(config(folder, num_blocks=10, block_size=8))
    assert (info.model, info.vocab_size, info.max_model_len) == ("tiny", SIZES["vocab_size"], 256)
    assert (info.num_blocks, info.block_size, info.max_tokens_in_pool) == (10, 8, 81)
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert (info.dtype, info.device, info.threads, info.eos_token_ids) == ("float32", "cpu", 1, (2,))
    assert info.weights_revision
    assert executor.prefill_tokens_per_second > 0


def test_the_pool_is_a_share_of_memory_but_no_more_than_is_useful(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plenty of memory a full batch fits and no more; with little, two fifths of it; with none, a refusal."""
    _, info = load(config(folder))
    assert info.num_blocks == 3 * 256 // 16
    monkeypatch.setattr(machine, "available_memory", lambda: 100 * 16 * info.kv_bytes_per_token)
    assert load(config(folder))[1].num_blocks == 40
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="cannot hold one block"):
        load(config(folder))


def test_settings_the_model_cannot_satisfy_are_refused(folder: Path) -> None:
    """Too long a context and odd block sizes name the setting."""
    too_long = EngineConfig(model=ModelConfig(path=str(folder), max_model_len=257))
    with pytest.raises(ConfigError, match="257 exceeds the 256 positions"):
        load(too_long)
    with pytest.raises(ConfigError, match="power of two"):
        load(config(folder, block_size=12))
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(config(folder / "nowhere"))


def test_dtype_follows_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` takes bfloat16 where the CPU multiplies it natively, or kernels in vectors read half the bytes; torch
    alone and plain C++ would be slower for it, but the invariant mode has no other."""
    compiler()
    auto = EngineConfig(model=ModelConfig(path=str(folder)), cache=CacheConfig(num_blocks=4), threads=1)
    cases = [
        (True, "torch", False, "bfloat16"),
        (False, "torch", False, "float32"),
        (False, "portable", False, "float32"),
        (False, "portable", True, "bfloat16"),
        *((False, isa, False, "bfloat16") for isa in supported_isas()[:-1]),
    ]
    for fast, isa, deterministic, name in cases:
        monkeypatch.setattr(machine, "bfloat16_is_fast", lambda fast=fast: fast)
        kernels = "auto"
        if isa == "torch":
            kernels = "torch"
        else:
            monkeypatch.setenv("CHATSERVE_CPU_ISA", isa)
        configured = msgspec.structs.replace(auto, kernels=kernels, deterministic=deterministic)
        assert load(configured)[1].dtype == name, (fast, isa, deterministic)


def test_the_invariant_mode_needs_the_compiled_kernels(folder: Path) -> None:
    """Any model that they run will do; what torch multiplies depends on the rows beside it, and is refused."""
    compiler()
    auto = EngineConfig(model=ModelConfig(path=str(folder)), cache=CacheConfig(num_blocks=4), threads=1)
    wanted = msgspec.structs.replace(auto, deterministic=True)
    assert load(wanted)[1].kernels.startswith("native-")
    for refused in (
        msgspec.structs.replace(wanted, kernels="torch"),
        msgspec.structs.replace(wanted, model=ModelConfig(path=str(folder), dtype="float32")),
    ):
        with pytest.raises(ConfigError, match="deterministic needs compiled CPU kernels"):
            load(refused)


def test_the_ready_line_says_what_runs(folder: Path) -> None:
    """The kernels are named where they run, float32 runs on torch wholly; the weights by what they are in memory."""
    compiler()
    plain = load(config(folder))[1]
    assert (plain.kernels, plain.weights) == ("torch", "float32")
    auto = EngineConfig(model=ModelConfig(path=str(folder), dtype="bfloat16"), cache=CacheConfig(num_blocks=4))
    wanted = f"native-{supported_isas()[0]}"
    info = load(auto)[1]
    assert (info.kernels, info.weights, info.dtype) == (wanted, "bfloat16", "bfloat16")


def test_end_tokens_from_either_file(folder: Path, tmp_path: Path) -> None:
    """An integer or a list, in the generation config or else in the model's; none is allowed."""
    assert eos_token_ids(folder) == (2,)
    write_model(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert eos_token_ids(tmp_path) == (5, 2)
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(tmp_path) == (2,)
    edit_config(tmp_path, eos_token_id=None)
    assert eos_token_ids(tmp_path) == ()


def test_the_warm_up_leaves_no_trace(folder: Path) -> None:
    """A first request's logits are those of a fresh cache, and after shutdown the executor refuses."""
    executor, _ = load(config(folder, num_blocks=10))
    plan = Plan([Run(0, [5, 6, 7], 0, 3)], [sequence(0, [5, 6, 7], [3])]).build()
    first = executor.execute(plan).tokens
    again = load(config(folder, num_blocks=50))[0].execute(plan).tokens
    assert first == again
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.execute(plan)


def test_the_door_imports_no_torch() -> None:
    """The process settles OpenMP's environment before torch is loaded, so its door must not load torch."""
    code = "import sys, chatserve.worker.executor; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
