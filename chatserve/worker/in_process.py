"""Runs plans in the engine process itself: one rank, on the CPU.

Knows how to size a model for this machine (dtype, threads, KV pool), load it and warm it up. Knows no requests.
`chatserve.worker.executor` calls `load`; the engine then uses only the `Executor` protocol.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.interface import Backend
from chatserve_kernels.torch_backend import TorchBackend

from chatserve.config import EngineConfig
from chatserve.engine.protocol import EngineInfo
from chatserve.errors import ConfigError, ModelLoadError
from chatserve.model.architecture import Architecture
from chatserve.model.kernels import load_kernels
from chatserve.model.native import is_quantised
from chatserve.model.transformer import Transformer
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import ModelRunnerOutput, NewSequence, SchedulerOutput
from chatserve.worker import machine
from chatserve.worker.model_runner import ModelRunner

# The pool may take this share of the memory that is free, so that the rest of the machine keeps breathing.
_KV_MEMORY_SHARE = 0.4

# Long enough that the second run is a fair estimate of prefill speed, short enough not to delay the start.
_WARM_UP_TOKENS = 128

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InProcessExecutor:
    """`Executor` that calls its model runner directly.

    Attributes:
        prefill_tokens_per_second: measured while warming up, with one prompt of moderate length.
    """

    def __init__(self, runner: ModelRunner, prefill_tokens_per_second: float) -> None:
        self._runner: ModelRunner | None = runner
        self.prefill_tokens_per_second = prefill_tokens_per_second

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if self._runner is None:
            raise RuntimeError("The executor was shut down.")
        return self._runner.execute(plan)

    def shutdown(self) -> None:
        self._runner = None


def load(config: EngineConfig) -> tuple[InProcessExecutor, EngineInfo]:
    """The configured model, warmed up and ready for its first plan.

    Raises:
        ModelLoadError: the folder holds no model we can run.
        ConfigError: settings that this model or machine cannot satisfy.
    """
    folder = Path(config.model.path)
    architecture = Architecture.from_folder(folder)
    max_model_len = _max_model_len(config, architecture)
    threads = config.threads or machine.usable_cores()
    torch.set_num_threads(threads)

    backend = _backend(config, threads)
    dtype = _dtype(config, backend, folder)
    model = Transformer(folder, architecture, backend, dtype, max_model_len, config.model.quantization)
    kv_bytes_per_token = architecture.kv_elements_per_token * dtype.itemsize
    block_size = config.cache.block_size
    blocks_per_sequence = -(-max_model_len // block_size)
    num_blocks = _num_blocks(config, kv_bytes_per_token, blocks_per_sequence)
    num_host_blocks = _num_host_blocks(config, block_size * kv_bytes_per_token)
    end_tokens = eos_token_ids(folder)
    if config.deterministic and not model.is_native:
        raise ConfigError(
            "deterministic needs compiled CPU kernels and dtype bfloat16 or auto: see kernels and dtype.",
            param="deterministic",
        )
    runner = ModelRunner(
        model,
        backend,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_blocks=blocks_per_sequence,
        eos_token_ids=end_tokens,
        dtype=dtype,
    )
    speed = _warm_up(runner, min(_WARM_UP_TOKENS, num_blocks * block_size, max_model_len), block_size)
    info = EngineInfo(
        model=config.model.name or folder.name,
        weights_revision=config.model.revision or _fingerprint(folder),
        vocab_size=architecture.vocab_size,
        max_model_len=max_model_len,
        # The last token of a sequence is never written to the cache.
        max_tokens_in_pool=num_blocks * block_size + 1,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes_per_token=kv_bytes_per_token,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype=str(dtype).removeprefix("torch."),
        device="cpu",
        threads=threads,
        pid=os.getpid(),
        eos_token_ids=end_tokens,
        num_host_blocks=num_host_blocks,
        prefill_tokens_per_second=speed,
        kernels=_kernels_in_use(backend, model, dtype),
        weights=model.weight_format,
    )
    return InProcessExecutor(runner, speed), info


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The model's own end tokens, from ``generation_config.json`` or else ``config.json``; may be empty."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{path} cannot be read as a JSON object: {error}.") from error
        if isinstance(ids, int):
            return (ids,)
        if ids:
            return tuple(ids)
    return ()


def _max_model_len(config: EngineConfig, architecture: Architecture) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return architecture.max_positions
    if wanted > architecture.max_positions:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the {architecture.max_positions} positions this model was made for.",
            param="max_model_len",
        )
    return wanted


def _backend(config: EngineConfig, threads: int) -> Backend:
    """Compiled kernels where they are wanted and can be had, else torch."""
    library = None
    if config.kernels == "auto":
        library = load_kernels(threads, _notice, config.deterministic)
    return TorchBackend() if library is None else NativeBackend(library)


def _kernels_in_use(backend: Backend, model: Transformer, dtype: torch.dtype) -> str:
    """What runs, for people: the backend's name, unless less of it is used than that would say."""
    if model.is_native or not isinstance(backend, NativeBackend):
        return backend.name
    return f"{backend.name} attention, torch linears" if dtype == torch.bfloat16 else "torch"


def _notice(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _dtype(config: EngineConfig, backend: Backend, folder: Path) -> torch.dtype:
    if config.model.dtype != "auto":
        return _DTYPES[config.model.dtype]
    if machine.bfloat16_is_fast():
        return torch.bfloat16
    # Compiled kernels only store weights, keys and values in bfloat16; without instructions for it they compute in
    # float32, from half the bytes that torch would read. Plain C++ is too slow for that to be worth it.
    native = isinstance(backend, NativeBackend) and (
        backend.library.isa != "portable" or config.deterministic or is_quantised(folder, config.model.quantization)
    )
    return torch.bfloat16 if native else torch.float32


def _num_blocks(config: EngineConfig, kv_bytes_per_token: int, blocks_per_sequence: int) -> int:
    """Blocks of the pool: as configured, else a share of free memory but no more than a full batch can use."""
    block_size = config.cache.block_size
    if block_size < 2 or block_size & (block_size - 1):
        raise ConfigError(f"block_size must be a power of two from 2 on; got {block_size}.", param="block_size")
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    block_bytes = block_size * kv_bytes_per_token
    budget = config.cache.kv_cache_memory_bytes
    if budget is None:
        useful = config.scheduler.max_num_seqs * blocks_per_sequence * block_bytes
        budget = min(int(machine.available_memory() * _KV_MEMORY_SHARE), useful)
    if budget < block_bytes:
        raise ConfigError(
            f"A KV pool of {budget} bytes cannot hold one block of {block_bytes} bytes; "
            "set kv_cache_memory_bytes or free some memory.",
            param="kv_cache_memory_bytes",
        )
    return budget // block_bytes


def _num_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks of the host tier; none unless asked for, because on a CPU both tiers are the same memory."""
    count = int(config.cache.swap_space_gib * 2**30) // block_bytes
    if config.cache.preemption_mode == "recompute":
        return 0
    if config.cache.preemption_mode == "swap" and not count:
        raise ConfigError("preemption_mode 'swap' needs --swap-space GIB for the blocks to go to.", param="swap_space")
    return count


def _warm_up(runner: ModelRunner, num_tokens: int, block_size: int) -> float:
    """Run a prompt twice, so that no user pays for first-use set-up; returns tokens per second of the second run.

    Uses row 0 and the first blocks, and leaves only finite numbers there, which nothing will read.
    """
    tokens = np.zeros(num_tokens, dtype=np.int32)
    blocks = np.arange(-(-num_tokens // block_size), dtype=np.int32)
    row = np.zeros(1, dtype=np.int32).tobytes()
    plan = SchedulerOutput(
        step=0,
        freed_rows=b"",
        new_sequences=(NewSequence(0, tokens.tobytes(), num_tokens, blocks.tobytes(), SamplingParams(seed=0)),),
        table_rows=b"",
        table_indices=b"",
        table_blocks=b"",
        clears=b"",
        host_clears=b"",
        demotions=b"",
        promotions=b"",
        copies=b"",
        rows=row,
        num_computed=row,
        num_new=np.array([num_tokens], dtype=np.int32).tobytes(),
        token_ids=tokens.tobytes(),
        sample_sources=row,
        sample_rows=row,
    )
    runner.execute(plan)
    started = time.perf_counter()
    runner.execute(plan)
    seconds = time.perf_counter() - started
    runner.execute(msgspec.structs.replace(plan, freed_rows=row, new_sequences=(), rows=b""))
    return num_tokens / seconds


def _fingerprint(folder: Path) -> str:
    """Identity of the weights from names, sizes and times of the files: cheap, and changes when they do."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns};".encode())
    return digest.hexdigest()[:16]
