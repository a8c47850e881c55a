"""Uniform numbers that are a function of (seed, position), with no state.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3): the
request's seed is the key, the output position the counter. So a request draws the same numbers alone, in any batch,
and after a preemption. `chatserve.worker.sampler` is the caller.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
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
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
