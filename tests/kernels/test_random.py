"""The counter-based generator is the published one, its numbers are uniform, and every backend draws with them."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from chatserve_kernels.cpu import build
from chatserve_kernels.interface import Backend, Draws, draw_options
from chatserve_kernels.random import philox4x32, uniforms

from tests.kernels.native import compiler


def test_known_answers_of_philox4x32_10() -> None:
    """The test vectors that come with the Random123 library."""

    def words(*values: int) -> tuple[np.ndarray, ...]:
        return tuple(np.array([value], dtype=np.uint64) for value in values)

    ones = 0xFFFFFFFF
    for counter, key, answer in [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]:
        assert tuple(int(word[0]) for word in philox4x32(words(*counter), words(*key))) == answer


def test_numbers_depend_on_seed_and_position_only() -> None:
    """Batching, order and repetition change nothing; neighbours in either argument are unrelated."""
    seeds, positions = np.arange(50).repeat(40), np.tile(np.arange(40), 50)
    together = uniforms(seeds, positions)
    alone = [float(uniforms([s], [p])[0]) for s, p in zip(seeds[::37], positions[::37], strict=True)]
    assert together[::37].tolist() == alone
    assert len(np.unique(together)) == 2000


def test_numbers_are_uniform_along_seeds_and_along_positions() -> None:
    """Chi-square over 64 bins, 63 degrees of freedom: mean 63, standard deviation 11; below 63 + 5 sd."""
    for draw in (uniforms(np.arange(64000), np.zeros(64000)), uniforms(np.full(64000, 2**62), np.arange(64000))):
        counts = np.histogram(draw, bins=64, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 63 + 5 * 11.3
        assert draw.min() >= 0
        assert draw.max() < 1


def many_pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeds and positions: one word of Philox or two, both ends of both arguments, and ``count`` random ones."""
    edges = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    pairs = np.array([*itertools.product(edges, edges)], dtype=np.uint64)
    more = np.random.default_rng(0).integers(2**64, size=(count, 2), dtype=np.uint64)
    seeds, positions = np.concatenate((pairs, more)).T.copy()
    return seeds, positions


@pytest.mark.parametrize("isa", build.supported_isas())
def test_the_generator_in_cpp_gives_the_same_bits(tmp_path: Path, isa: str) -> None:
    """With the flags of every instruction set; a kernel has no place where all of them show."""
    source, binary = tmp_path / "numbers.cpp", tmp_path / "numbers.so"
    source.write_text(
        '#include "philox.h"\n'
        'extern "C" void numbers(int64_t count, const uint64_t* seeds, const uint64_t* positions, double* out) {\n'
        "  for (int64_t i = 0; i < count; ++i) out[i] = cs::uniform(seeds[i], positions[i]);\n"
        "}\n"
    )
    flags = [*build._FLAGS, "-fvisibility=default", *build._ISA_FLAGS[isa], "-shared", f"-I{build.SOURCES}"]
    subprocess.run([compiler(), *flags, "-o", str(binary), str(source)], check=True)
    seeds, positions = many_pairs(5000)
    out = np.empty(len(seeds))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (seeds, positions, out)]
    ctypes.CDLL(str(binary)).numbers(ctypes.c_int64(len(seeds)), *pointers)
    assert out.tobytes() == uniforms(seeds, positions).tobytes()


def test_draws_take_the_number_of_their_seed_and_position(backend: Backend) -> None:
    """Of 2**16 equal tokens the one that the first 16 bits say is drawn, however the position is said."""
    seeds, positions = many_pairs(100)
    count = len(seeds)
    options = draw_options(temperature=0.7, min_p=0.0, top_k=0, top_p=1.0) * count
    rows = np.zeros(count, dtype=np.int64).tobytes()
    expected = (uniforms(seeds, positions) * 2**16).astype(int).tolist()
    for steps in (0, 1, 1000):
        earlier = (positions - np.uint64(steps)).tobytes()
        draws = Draws(rows, options, seeds.tobytes(), earlier, steps)
        assert backend.draw(torch.zeros(1, 2**16), draws).tolist() == expected
