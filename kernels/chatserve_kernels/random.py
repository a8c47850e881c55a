"""Uniform numbers that are a function of (seed, position), with no state.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3): the
request's seed is the key, the output position the counter. So a request draws the same numbers alone, in any batch,
and after a preemption. `interface.Draws` is the caller; the compiled kernels have the same in C++ (`cpu/src/philox.h`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_UInt64 = npt.NDArray[np.uint64]

# Columns, beside which stand arrays [2, n].
_MULTIPLIERS: _UInt64 = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL: _UInt64 = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS: _UInt64 = np.arange(10, dtype=np.uint64)[:, None, None]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), in steps of 2**-53.

    Args:
        seeds: [n] integers in [0, 2**64).
        positions: [n] integers in [0, 2**64).
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32((position & _LOW, position >> _SHIFT, zero, zero), (seed & _LOW, seed >> _SHIFT))
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def philox4x32(
    counter: tuple[_UInt64, _UInt64, _UInt64, _UInt64], key: tuple[_UInt64, _UInt64]
) -> tuple[_UInt64, _UInt64, _UInt64, _UInt64]:
    """The bijection itself: four 32-bit words per element, held in uint64 arrays."""
    # Every word is multiplied in one of two ways, so two arrays hold the four: half as many calls of numpy.
    even, odd = np.stack((counter[0], counter[2])), np.stack((counter[1], counter[3]))
    for round_key in (np.stack(key) + _ROUNDS * _WEYL) & _LOW:
        product = even * _MULTIPLIERS
        even = (product >> _SHIFT)[::-1] ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
    return even[0], odd[0], even[1], odd[1]
