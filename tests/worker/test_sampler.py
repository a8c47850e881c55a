"""The sampler draws from the distribution it promises, for every option, and each row on its own."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.interface import Backend, StepLogits
from chatserve_kernels.torch_backend import TorchBackend
from torch import Tensor

from chatserve.sampling_params import SamplingParams
from chatserve.worker.sampler import Int32s, Sampler, Samples
from chatserve.worker.special_row import SpecialRow
from tests.kernels.draws import kept_by_definition, random_logits
from tests.kernels.native import library

VOCAB = 320
EOS = (2,)


@dataclass(frozen=True)
class Row:
    """One sequence to draw a token for."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    vocab: int
    params: SamplingParams


Sample = Callable[[Tensor, Sequence[Row]], Samples]


@pytest.fixture(params=["torch", *supported_isas()])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend that serves."""
    return TorchBackend() if request.param == "torch" else NativeBackend(library(request.param))


@pytest.fixture
def sample(backend: Backend) -> Sample:
    """One token for each row of logits, by a sampler of its own."""

    def sample(logits: Tensor, rows: Sequence[Row]) -> Samples:
        return choose(placed(rows, backend), logits, np.arange(len(rows), dtype=np.int32), backend)

    return sample


def placed(rows: Sequence[Row], backend: Backend) -> Sampler:
    sampler = Sampler(len(rows), EOS, backend)
    for at, row in enumerate(rows):
        sampler.place(at, row.params, np.array([*row.prompt, *row.output], dtype=np.int32), len(row.prompt))
    return sampler


def choose(sampler: Sampler, logits: Tensor, rows: Int32s, backend: Backend) -> Samples:
    samples = sampler.sample(StepLogits(logits, backend.argmax(logits).numpy(), ()), rows.tobytes())
    return samples._replace(tokens=samples.tokens.copy())  # which the next step may overwrite


def row(prompt: tuple[int, ...] = (5, 9), output: tuple[int, ...] = (), vocab: int = VOCAB, **options: Any) -> Row:
    params = SamplingParams(**{"seed": 0, **options})
    params.validate(vocab)
    return Row(prompt, output, vocab, params)


def draw(sample: Sample, logits: Tensor, **options: Any) -> int:
    return int(sample(logits[None], [row(vocab=len(logits), **options)]).tokens[0])


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_draws_follow_the_distribution(sample: Sample, options: dict[str, Any]) -> None:
    """Chi-square over 20,000 seeds against the definition; nothing outside the kept set is ever drawn."""
    logits = random_logits(1, vocab=40)[0]
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    expected = kept_by_definition(logits, **full).numpy() * 20_000
    rows = [row(vocab=40, seed=seed, **options) for seed in range(20_000)]
    tokens = sample(logits.repeat(20_000, 1), rows).tokens
    counts = np.bincount(tokens, minlength=40)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = max(1, common.sum() - 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_the_same_seed_and_position_give_the_same_token(sample: Sample, backend: Backend) -> None:
    """Alone, again, in a batch, and after a resume with the same output so far."""
    logits = random_logits(2, rows=64)
    rows = [row(seed=i % 5, output=(4,) * (i % 7), temperature=1.2, top_p=0.95) for i in range(64)]
    together = sample(logits, rows).tokens.tolist()
    alone = [int(sample(logits[i : i + 1], [rows[i]]).tokens[0]) for i in range(64)]
    assert together == alone
    grown, only = placed([row(seed=3, temperature=1.5)], backend), np.zeros(1, np.int32)
    output: tuple[int, ...] = ()
    for _ in range(4):
        token = int(choose(grown, logits[:1], only, backend).tokens[0])
        assert draw(sample, logits[0], seed=3, output=output, temperature=1.5) == token
        output += (token,)
    assert len({draw(sample, logits[0], seed=seed, temperature=1.5) for seed in range(50)}) > 10


def test_rows_are_what_was_placed_in_them_last(backend: Backend) -> None:
    """Any order of rows; a row's next owner inherits nothing; a row that was freed is not sampled for."""
    logits = random_logits(12, rows=3)
    best = logits.argmax(-1).tolist()
    sampler = placed([row(temperature=0.0, logit_bias=((7, 100.0),)), row(temperature=0.0), row(logprobs=1)], backend)
    samples = choose(sampler, logits, np.array([2, 0, 1], np.int32), backend)
    assert samples.tokens[1:].tolist() == [7, best[2]]
    assert samples.logprobs is not None
    assert [entry is not None for entry in samples.logprobs] == [True, False, False]
    for at in (0, 2):
        sampler.free(at)
    with pytest.raises(RuntimeError, match="row 2, which holds no sequence"):
        choose(sampler, logits[:2], np.array([1, 2], np.int32), backend)
    for at in (2, 0):
        sampler.place(at, SamplingParams(seed=0, temperature=0.0), np.array([1], np.int32), 1)
    again = choose(sampler, logits, np.array([0, 1, 2], np.int32), backend)
    assert (again.tokens.tolist(), again.logprobs) == (best, None)


def test_who_comes_and_goes_moves_nobodys_draws(backend: Backend) -> None:
    """However the rows of the steps change, a row's n-th token is the one it draws alone after n - 1."""
    logits, rng = random_logits(3, rows=4), random.Random(3)
    options: list[dict[str, Any]] = [{"temperature": 0.0}, *({"temperature": 1.5, "seed": seed} for seed in (7, 8, 9))]
    rows = [row(vocab=logits.shape[1], **one) for one in options]
    sampler, outputs = placed(rows, backend), [0] * 4
    for _ in range(60):
        chosen = np.array(sorted(rng.sample(range(4), rng.randint(1, 4))), np.int32)
        for _ in range(rng.randint(1, 3)):
            tokens = choose(sampler, logits[chosen], chosen, backend).tokens.tolist()
            for at, token in zip(chosen.tolist(), tokens, strict=True):
                again = dataclasses.replace(rows[at], output=(4,) * outputs[at])
                alone = choose(placed([again], backend), logits[at : at + 1], np.zeros(1, np.int32), backend)
                assert token == alone.tokens[0]
                outputs[at] += 1
        if rng.random() < 0.3:  # another sequence in somebody's place
            at = rng.randrange(4)
            outputs[at] = rng.randrange(9)
            known = np.array([*rows[at].prompt, *[4] * outputs[at]], np.int32)
            sampler.free(at)
            sampler.place(at, rows[at].params, known, len(rows[at].prompt))


def test_rows_with_different_options_do_not_influence_each_other(sample: Sample) -> None:
    """A batch of 64 rows, all options different, equals 64 single runs, log-probabilities included (cases F16)."""
    logits = random_logits(3, rows=64)
    rng = np.random.default_rng(0)

    def options(i: int) -> dict[str, Any]:
        return {
            "seed": int(rng.integers(2**62)),
            "temperature": float(rng.choice([0.0, 1e-12, 0.3, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 1, 5, 400])),
            "top_p": float(rng.choice([1.0, 0.9, 1e-9])),
            "min_p": float(rng.choice([0.0, 0.1, 1.0])),
            "presence_penalty": float(rng.choice([0.0, -2.0, 2.0])),
            "frequency_penalty": float(rng.choice([0.0, -2.0, 2.0])),
            "repetition_penalty": float(rng.choice([1.0, 0.01, 100.0])),
            "logit_bias": ((i, 100.0),) if i % 3 == 0 else (),
            "min_tokens": int(rng.choice([0, 5])),
            "logprobs": None if i % 2 else i % 21,
        }

    rows = [row(output=(7, 7, i), **options(i)) for i in range(64)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]]) for i in range(64)]
    assert together.tokens.tolist() == [one.tokens[0] for one in alone]
    assert together.logprobs is not None
    assert [None if entry is None else entry.top_ids for entry in together.logprobs] == [
        None if one.logprobs is None or one.logprobs[0] is None else one.logprobs[0].top_ids for one in alone
    ]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-38, 1e-12, 1e-6])
def test_tiny_temperatures_are_greedy(sample: Sample, temperature: float) -> None:
    """They overflow nothing and pick the best token, the lowest id among equals (cases F4)."""
    for scale in (1e-3, 3.0, 1e4):
        logits = random_logits(4, scale=scale)[0]
        logits[200] = logits.max() + scale / 16
        assert draw(sample, logits, temperature=temperature) == int(logits.argmax())


def test_extreme_values_give_a_valid_token(sample: Sample) -> None:
    """Every pair of edge values, on ordinary, huge and constant logits: a token in range, from finite logits."""
    edges: dict[str, list[Any]] = {
        "temperature": [0.0, 1e-5, 2.0],
        "top_k": [1, 2**31 - 1],
        "top_p": [5e-324, 1.0],
        "min_p": [1.0, 5e-324],
        "presence_penalty": [-2.0, 2.0],
        "frequency_penalty": [-2.0, 2.0],
        "repetition_penalty": [0.01, 100.0],
        "logit_bias": [((5, -100.0), (5, -100.0)), tuple((i, 100.0) for i in range(VOCAB))],
        "stop_token_ids": [tuple(range(128))],
        "min_tokens": [10],
    }
    singles = [{name: value} for name, values in edges.items() for value in values]
    pairs = [a | b for a, b in itertools.combinations(singles, 2) if not a.keys() & b.keys()]
    for logits in (random_logits(5)[0], torch.full((VOCAB,), 3e4), torch.zeros(VOCAB), random_logits(6)[0] * 1e30):
        rows = [row(output=(5, 5, 6), **options) for options in pairs]
        result = sample(logits.repeat(len(rows), 1), rows)
        assert all(0 <= token < VOCAB for token in result.tokens)


def test_penalties_by_their_formulas() -> None:
    """Repetition scales what prompt or output holds; presence and frequency subtract for the output only."""
    logits = random_logits(7)[0]
    for prompt, output, repetition in (([5, 9], [9, 30, 30], 2.0), ([5, 9], [], 2.0), ([5, 9], [9, 30, 30], 1.0)):
        params = SamplingParams(repetition_penalty=repetition, presence_penalty=0.5, frequency_penalty=0.25)
        state = SpecialRow(params, np.array([*prompt, *output], np.int32), len(prompt), EOS)
        for token in (31, *range(100, 300), 31):
            state.append(token)
            output = [*output, token]
        got, expected = logits.clone(), logits.clone()
        state.adjust(got.numpy())
        for token in {*prompt, *output}:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        for token in set(output):
            expected[token] -= 0.5 + 0.25 * output.count(token)
        torch.testing.assert_close(got, expected)


def test_logit_bias_forces_and_forbids(sample: Sample) -> None:
    """+100 makes a token certain, -100 impossible; the last id of the vocabulary works (cases F1)."""
    logits = random_logits(8)[0]
    best = int(logits.argmax())
    assert all(draw(sample, logits, seed=s, logit_bias=((VOCAB - 1, 100.0),)) == VOCAB - 1 for s in range(20))
    assert all(draw(sample, logits, seed=s, logit_bias=((best, -100.0),)) != best for s in range(50))


def test_stop_tokens_wait_for_min_tokens(sample: Sample, backend: Backend) -> None:
    """Until then neither the model's end token nor a requested one is drawn; a bias cannot undo it."""
    logits = random_logits(9)[0]
    logits[2], logits[50] = 30.0, 29.0
    wishes: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (50,)}
    for bias in ((), ((2, 100.0),)):
        options = {**wishes, "logit_bias": bias}
        sampler, only = placed([row(**options)], backend), np.zeros(1, np.int32)
        drawn = [int(choose(sampler, logits[None], only, backend).tokens[0]) for _ in range(4)]
        assert drawn[2:] == [2, 2]
        assert not {2, 50} & set(drawn[:2])
        assert draw(sample, logits, **options, output=tuple(drawn[:1])) == drawn[1]
        assert draw(sample, logits, **options, output=tuple(drawn[:2])) == 2
        assert draw(sample, logits, **{**options, "ignore_eos": True}) == 2


def test_logprobs_are_those_of_the_unmodified_distribution(sample: Sample) -> None:
    """Neither temperature nor penalties nor truncation shows in them; alternatives are sorted, ties by id."""
    logits = random_logits(10)
    expected = logits[0].double().log_softmax(-1)
    asks = row(temperature=0.3, top_k=2, repetition_penalty=3.0, logit_bias=((77, 50.0),), logprobs=20)
    result = sample(logits, [asks])
    entry = entry_of(result)
    assert result.tokens[0] == 77
    assert entry.chosen == pytest.approx(float(expected[77]), abs=1e-5)
    ids = np.frombuffer(entry.top_ids, "<i4").tolist()
    assert ids == sorted(range(VOCAB), key=lambda i: (-float(logits[0, i]), i))[:20]
    assert np.frombuffer(entry.top_logprobs, "<f4") == pytest.approx(expected[ids].numpy(), abs=1e-5)
    assert entry_of(sample(logits, [row(logprobs=0)])).top_ids == b""
    assert sample(logits, [row()]).logprobs is None


def entry_of(samples: Samples) -> Any:
    assert samples.logprobs is not None
    [entry] = samples.logprobs
    return entry
