"""Log-probabilities: every backend, in every instruction set, against the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from chatserve_kernels.interface import Backend
from torch import Tensor

from tests.kernels.draws import random_logits

LOWEST = torch.finfo(torch.float32).min


def check(backend: Backend, logits: Tensor, rows: list[int], tokens: list[int], k: int) -> None:
    """The chosen tokens' numbers, and all alternatives in their order: by logit, equal ones by id."""
    before = logits.clone()
    found = backend.logprobs(logits, np.array(rows, np.int64), np.array(tokens, np.int32), k)
    assert torch.equal(logits, before)
    expected = logits[rows].double().log_softmax(-1).numpy()
    np.testing.assert_allclose(found.chosen, expected[np.arange(len(rows)), tokens], rtol=1e-6, atol=1e-5)
    for row, ids, top, values in zip(rows, found.top_ids.tolist(), found.top, expected, strict=True):
        score = logits[row].tolist()
        assert ids == sorted(range(len(score)), key=lambda i: (-score[i], i))[:k]
        np.testing.assert_allclose(top, values[ids], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 40, 320, 5000])
def test_they_are_those_of_the_definition(backend: Backend, vocab: int) -> None:
    """Ties at every cut, more alternatives than blocks of the row, all of them, and none."""
    for seed, k in itertools.product(range(3), (0, 1, 2, 5, 20, 50, vocab)):
        logits = random_logits(seed, rows=5, vocab=vocab, scale=(0.1, 1.0, 5.0)[seed])
        check(backend, logits, [4, 0, 3], [0, vocab - 1, vocab // 2], min(k, vocab))


def test_many_rows_are_told_apart(backend: Backend) -> None:
    """More rows than threads, some of them twice, with different tokens."""
    rows = [(7 * i) % 40 for i in range(100)]
    check(backend, random_logits(3, rows=40, vocab=700), rows, [(31 * i) % 700 for i in range(100)], 4)


def test_extreme_logits_keep_their_order(backend: Backend) -> None:
    """Alternatives without weight in float32 are told all the same, and nothing overflows."""
    logits = torch.zeros(4, 600)
    logits[0, 17] = 500.0
    logits[1] = torch.linspace(-3e4, 3e4, 600)
    logits[2, ::2] = LOWEST
    logits[3, 599] = 1e30
    check(backend, logits, [0, 1, 2, 3], [3, 0, 1, 599], 20)


def test_no_more_alternatives_than_tokens(backend: Backend) -> None:
    """Asking for more than the vocabulary gives it all."""
    found = backend.logprobs(random_logits(1, vocab=6), np.zeros(1, np.int64), np.zeros(1, np.int32), 20)
    assert found.top_ids.shape == found.top.shape == (1, 6)
