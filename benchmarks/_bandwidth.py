"""How fast can this machine read memory just now? The denominator of every byte floor.

The floor of a step is the bytes that it must read, over the highest bandwidth that any read loop reached in the
same run. The loops: a compiled sum (where there is a C compiler) and numpy's, on one thread and on all, over a
buffer like the model's weights and over one that fits no cache.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
ReadLoop = Callable[[Words], object]

BUFFER_BYTES = (96 * 2**20, 2**30)
_PASSES = 4

_SOURCE = """
#include <stddef.h>
#include <stdint.h>
uint64_t sum_words(const uint64_t *words, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) sum += words[i];
    return sum;
}
"""


def read_loops() -> dict[str, ReadLoop]:
    """Loops by name; each reads every word once and releases the GIL."""
    loops: dict[str, ReadLoop] = {"numpy": np.add.reduce}
    compiled = _compiled_sum()
    if compiled is not None:
        loops["C"] = compiled
    return loops


def _compiled_sum() -> ReadLoop | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "sum.c"), Path(folder, "sum.so")
        source.write_text(_SOURCE)
        flags = ["-O3", "-march=native", "-funroll-loops", "-shared", "-fPIC"]
        done = subprocess.run([compiler, *flags, str(source), "-o", str(library)], capture_output=True)
        if done.returncode != 0:
            return None
        function = ctypes.CDLL(str(library)).sum_words  # stays mapped when the file is gone
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint64

    def sum_words(words: Words) -> object:
        return function(words.ctypes.data, words.size)

    return sum_words


def measure(loops: dict[str, ReadLoop], threads: int) -> dict[str, float]:
    """Bytes per second by loop, threads and buffer; the best of a few passes each."""
    speeds: dict[str, float] = {}
    with ThreadPoolExecutor(threads) as pool:
        for num_bytes in BUFFER_BYTES:
            memory = mmap.mmap(-1, num_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            words = np.frombuffer(memory, np.uint64)
            words[:] = 1
            for name, loop in loops.items():
                for count in sorted({1, threads}):
                    parts = np.array_split(words, count)
                    best = 0.0
                    for _ in range(_PASSES):
                        began = time.perf_counter()
                        list(pool.map(loop, parts))
                        best = max(best, num_bytes / (time.perf_counter() - began))
                    speeds[f"{name}, {count} threads, {num_bytes >> 20} MiB"] = best
            del words, parts
            memory.close()
    return speeds
