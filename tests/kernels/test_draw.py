"""Drawing: every backend, in every instruction set, against the definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from chatserve_kernels.interface import Backend, Draws, draw_options
from torch import Tensor

from tests.kernels.draws import kept_by_definition, random_logits

OFF: dict[str, Any] = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
ALMOST_ONE = 1.0 - 2.0**-53
LOWEST = torch.finfo(torch.float32).min


def draws(options: list[dict[str, Any]]) -> Draws:
    """One draw per entry; ``row`` is 0 and everything is off unless given."""
    full = [{"row": 0, **OFF, **one} for one in options]
    return Draws(
        rows=np.array([one["row"] for one in full], dtype=np.int64).tobytes(),
        options=b"".join(draw_options(**{name: one[name] for name in OFF}) for one in full),
        seeds=b"",
        positions=b"",
        uniform=np.array([one["uniform"] for one in full], dtype=np.float64).tobytes(),
    )


def drawn(backend: Backend, logits: Tensor, uniforms: list[float], **options: Any) -> list[int]:
    """One token of ``logits`` [V] per uniform number."""
    return backend.draw(logits[None], draws([{**options, "uniform": u} for u in uniforms])).tolist()


def check(backend: Backend, logits: Tensor, **options: Any) -> None:
    """Just inside both ends of a token's interval that token is drawn, for up to a hundred tokens, first and last."""
    probabilities = kept_by_definition(logits, **{**OFF, **options})
    ids = probabilities.nonzero()[:, 0]
    ends = probabilities.cumsum(0)
    wide = ids[probabilities[ids] > 1e-5]
    some = wide[:: math.ceil(len(wide) / 100)].tolist()
    uniforms, expected = [0.0, ALMOST_ONE], [int(ids[0]), int(ids[-1])]
    for i in some:
        uniforms += [float(ends[i] - probabilities[i]) + 2e-6, float(ends[i]) - 2e-6]
        expected += [i, i]
    assert drawn(backend, logits, uniforms, **options) == expected, options


@pytest.mark.parametrize("vocab", [1, 40, 320, 2000])
def test_every_token_has_the_interval_of_the_definition(backend: Backend, vocab: int) -> None:
    """All combinations: ties at every cut, narrow and wide nuclei, more tokens asked for than there are."""
    choices = itertools.product([0, 1, 2, 9, 300, 2**31], [1.0, 0.9999, 0.9, 0.3, 1e-6], [0.0, 0.05])
    for seed, (top_k, top_p, min_p) in enumerate(choices):
        logits = random_logits(seed, vocab=vocab, scale=1.0)[0]
        check(backend, logits, temperature=(0.5, 1.0, 2.0)[seed % 3], top_k=top_k, top_p=top_p, min_p=min_p)


def test_flat_rows(backend: Backend) -> None:
    """Equal logits are ordered by id, and the cut falls among them where it must, however many there are."""
    for level in (0.0, -3e4, 1e30, LOWEST):
        logits = torch.full((3001,), level)
        for options, kept in (
            ({}, 3001),
            ({"top_k": 7}, 7),
            ({"top_k": 2000}, 2000),
            ({"top_p": 0.99}, 2971),
            ({"top_p": 5e-324}, 1),
            ({"top_k": 100, "top_p": 0.5}, 50),
            ({"min_p": 1.0}, 3001),
        ):
            uniforms = [0.0, *((i + 0.5) / kept for i in range(0, kept, 97)), ALMOST_ONE]
            assert drawn(backend, logits, uniforms, **options) == [0, *range(0, kept, 97), kept - 1], (level, options)


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 5e-324}, {"top_k": 3, "top_p": 0.5}])
def test_what_has_no_probability_is_never_drawn(backend: Backend, options: dict[str, Any]) -> None:
    """Minus infinity, masks, and tokens that a tiny temperature rules out, at both ends of the distribution."""
    masked = torch.full((1000,), LOWEST)
    masked[300] = 1.0
    impossible = torch.full((1000,), -torch.inf)
    impossible[999] = LOWEST
    peaked = random_logits(1, vocab=1000)[0] * 1e30
    peaked[500] = 1e32
    for logits, only, temperature in ((masked, 300, 2.0), (impossible, 999, 1.0), (peaked, 500, 2.0)):
        for chosen in (temperature, 1e-5):
            assert set(drawn(backend, logits, [0.0, 0.5, ALMOST_ONE], temperature=chosen, **options)) == {only}


def test_best_tokens_only(backend: Backend) -> None:
    """min-p 1 keeps all that equal the best, top-k 1 and a tiny nucleus the first of them."""
    logits = random_logits(2, vocab=1000)[0]
    logits[[100, 700]] = 30.0
    assert drawn(backend, logits, [0.0, 0.49, 0.51, ALMOST_ONE], min_p=1.0) == [100, 100, 700, 700]
    assert drawn(backend, logits, [0.0, ALMOST_ONE], top_k=1) == [100, 100]
    assert drawn(backend, logits, [0.0, ALMOST_ONE], top_p=1e-9) == [100, 100]


def test_draws_do_not_influence_each_other(backend: Backend) -> None:
    """Rows in any order, one of them twice, all options mixed: as each alone; and no rows at all."""
    logits = random_logits(3, rows=5, vocab=700)
    mixed = [
        {
            "row": i * 3 % 5,
            "uniform": i / 40,
            "top_k": i % 7,
            "top_p": (1.0, 0.7)[i % 2],
            "min_p": (0.0, 0.1)[i % 3 // 2],
        }
        for i in range(40)
    ]
    together = backend.draw(logits, draws(mixed)).tolist()
    assert together == [token for one in mixed for token in backend.draw(logits, draws([one])).tolist()]
    assert backend.draw(logits, draws([])).tolist() == []


@pytest.mark.parametrize("largest", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_finite_largest_give_a_token_in_range(backend: Backend, largest: float) -> None:
    """Whatever the options; a row beside them draws as always."""
    logits = torch.stack((torch.full((300,), largest), random_logits(4, vocab=300)[0]))
    for options in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        pair = [{"row": row, "uniform": 0.9, **options} for row in (0, 1)]
        broken, sound = backend.draw(logits, draws(pair)).tolist()
        assert 0 <= broken < 300
        assert [sound] == backend.draw(logits, draws(pair[1:])).tolist()
