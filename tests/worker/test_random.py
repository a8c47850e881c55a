"""The counter-based generator is the published one, and its numbers are uniform."""

from __future__ import annotations

import numpy as np

from chatserve.worker.random import philox4x32, uniforms


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
