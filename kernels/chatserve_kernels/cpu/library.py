"""The compiled kernels as typed functions on addresses.

Knows the C interface (`src/api.cpp`) and its structures; checks nothing but statuses. ctypes releases the GIL during
every call. `backend`, `weights` and `decoder` are the callers; they keep the memory alive that addresses point to.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import ClassVar

from chatserve_kernels.cpu.build import BuildError
from chatserve_kernels.interface import Draws, SharedRuns, StepBatch

ABI_VERSION = 10


class LinearStruct(Structure):
    """One packed matrix: see ``src/linear.h``."""

    _fields_: ClassVar = [
        ("kind", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("units", c_void_p),
        ("bias", c_void_p),
    ]


class PagedStruct(Structure):
    """The cache and one step's sequences: see ``src/attention.h``."""

    _fields_: ClassVar = [
        ("cache", c_void_p),
        ("num_layers", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("num_sequences", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("table_rows", c_void_p),
        ("num_runs", c_int64),
        ("run_blocks", c_char_p),
        ("run_start", c_char_p),
        ("run_members", c_char_p),
    ]

    def share(self, runs: SharedRuns | None) -> None:
        """Say which blocks several sequences begin with."""
        self.num_runs = 0
        if runs is not None:
            self.num_runs = len(runs.num_blocks) // 4
            self.run_blocks, self.run_start, self.run_members = runs.num_blocks, runs.starts, runs.members


class LayerStruct(Structure):
    """One layer's weights: see ``src/decoder.h``."""

    _fields_: ClassVar = [
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int64),
    ]


class NetworkStruct(Structure):
    """A whole decoder: see ``src/decoder.h``."""

    _fields_: ClassVar = [
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_double),
        ("layers", POINTER(LayerStruct)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
    ]


class StepMemoryStruct(Structure):
    """Where a step's cache is and its results go: see ``src/decoder.h``."""

    _fields_: ClassVar = [
        ("paged", PagedStruct),
        ("finite", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
    ]


_STATUS_FUNCTIONS: dict[str, list[type]] = {
    "cs_pack": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p],
    "cs_project": [
        *(c_void_p, POINTER(LinearStruct), c_void_p, c_int64, c_void_p, c_double, c_int, c_void_p, c_int64),
    ],
    "cs_write_cache": [c_void_p, POINTER(PagedStruct), c_int64, c_int64, c_void_p, c_void_p],
    "cs_attend": [c_void_p, POINTER(PagedStruct), c_int64, c_int64, c_void_p, c_double, c_int64, c_void_p],
    "cs_argmax": [c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "cs_logprobs": [
        *(c_void_p, c_void_p, c_int64, c_int64, c_char_p, c_char_p, c_int64),
        *(c_void_p, c_void_p, c_void_p),
    ],
}


class Library:
    """One loaded library with compute threads of its own. Calls from several threads run one after another.

    Args:
        threads: compute threads, the calling one included.
        deterministic: what a token gives does not depend on what else is in its step.

    Raises:
        BuildError: the file cannot be loaded.
    """

    def __init__(self, path: Path, isa: str, threads: int, deterministic: bool = False) -> None:
        self.isa = isa
        try:
            self._functions = ctypes.CDLL(str(path))
            version = self._functions.cs_abi_version()
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded ({error}); delete it to have it compiled again") from error
        if version != ABI_VERSION:
            raise BuildError(f"{path} has interface version {version}, expected {ABI_VERSION}; delete it")
        functions = self._functions
        for name, types in _STATUS_FUNCTIONS.items():
            getattr(functions, name).argtypes = types
        functions.cs_run.argtypes = [
            *(c_void_p, c_void_p, c_void_p),
            *(c_int64, c_char_p, c_char_p, c_char_p),
            *(c_int64, c_char_p, c_int64, c_char_p),
        ]
        functions.cs_run.restype = c_int64
        functions.cs_draw.argtypes = [
            *(c_void_p, c_void_p, c_int64, c_int64),
            *(c_char_p, c_char_p, c_char_p, c_char_p, c_uint64, c_char_p, c_void_p),
        ]
        functions.cs_create.argtypes = [c_int, c_int]
        functions.cs_create.restype = c_void_p
        functions.cs_destroy.argtypes = [c_void_p]
        functions.cs_packed_bytes.argtypes = [c_int64, c_int64, c_int64]
        functions.cs_packed_bytes.restype = c_int64
        self._context = functions.cs_create(threads, int(deterministic))
        if not self._context:
            raise BuildError("the kernels' compute threads could not be started")
        self._lock = threading.Lock()
        weakref.finalize(self, functions.cs_destroy, self._context)

    @property
    def tile_threshold(self) -> int:
        """Rows up to which integer dot products are used although there are tiles."""
        return int(self._functions.cs_tile_threshold())

    @tile_threshold.setter
    def tile_threshold(self, rows: int) -> None:
        self._functions.cs_set_tile_threshold(rows)

    @property
    def share_threshold(self) -> int:
        """Tokens that attending to a shared part of the past together must save each sequence reading, on average."""
        return int(self._functions.cs_share_threshold())

    @share_threshold.setter
    def share_threshold(self, tokens: int) -> None:
        self._functions.cs_set_share_threshold(tokens)

    def packed_bytes(self, kind: int, outputs: int, inputs: int) -> int:
        """Size of a matrix in the kernels' layout."""
        return int(self._functions.cs_packed_bytes(kind, outputs, inputs))

    def run(self, network: int, memory: int, batch: StepBatch, num_samples: int) -> int:
        """Run one step; the number of sequences that were not finite.

        Args:
            network, memory: addresses of a `NetworkStruct` and a `StepMemoryStruct`.

        Raises:
            MemoryError: scratch memory could not be had.
        """
        rows, tokens = batch.rows, batch.token_ids
        with self._lock:
            failed: int = self._functions.cs_run(
                *(self._context, network, memory, len(rows) // 4, rows, batch.num_computed, batch.num_new),
                *(len(tokens) // 4, tokens, num_samples, batch.sources),
            )
        if failed < 0:
            raise MemoryError("cs_run: no memory for scratch buffers")
        return failed

    def draw(self, logits: int | None, columns: int, draws: Draws, tokens: int) -> None:
        """Draw tokens.

        Args:
            logits: address of float32 [s, columns].
            tokens: address of int32 [d], where they go.

        Raises:
            MemoryError: scratch memory could not be had.
        """
        rows, options, seeds, positions, steps, uniform = draws
        with self._lock:
            status = self._functions.cs_draw(
                *(self._context, logits, columns, len(rows) // 8),
                *(rows, options, seeds, positions, steps, uniform, tokens),
            )
        if status != 0:
            raise MemoryError("cs_draw: no memory for scratch buffers")

    def call(self, name: str, *arguments: object) -> None:
        """Run one of the functions that take the context and answer with a status.

        Raises:
            MemoryError: scratch memory could not be had.
        """
        with self._lock:
            status = getattr(self._functions, name)(self._context, *arguments)
        if status != 0:
            raise MemoryError(f"{name}: no memory for scratch buffers")
