"""However a sequence is cut, placed, cached, preempted or batched, its greedy tokens are the same."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from chatserve_kernels.cpu.build import supported_isas
from safetensors.torch import load_file, save_file

from chatserve.sampling_params import SamplingParams
from chatserve.worker.model_runner import ModelRunner
from tests.model.tiny import SIZES, write_model
from tests.worker.driver import GREEDY, Plan, Run, generate, make_runner, sequence, tokens_of

PROMPT = [5, 9, 77, 31, 8, 100, 3, 4, 4, 63, 12, 90, 41]
POISONED_TOKEN = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in which one token's embedding is NaN."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "llama", seed=3)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISONED_TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["torch", *supported_isas()])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(folder: Path, kernels: str) -> ModelRunner:
    return make_runner(folder, kernels)


@pytest.fixture(scope="module")
def expected(folder: Path, kernels: str) -> list[int]:
    return generate(make_runner(folder, kernels), PROMPT, 20)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 12])
def test_chunked_prefill_gives_the_same_tokens(runner: ModelRunner, expected: list[int], chunk: int) -> None:
    """Chunks of any size, aligned to blocks or not."""
    assert generate(runner, PROMPT, 20, chunk=chunk) == expected


def test_any_cached_prefix_gives_the_same_tokens(runner: ModelRunner, expected: list[int]) -> None:
    """Resuming from every possible cached length, on blocks in any order (cases A16)."""
    blocks = random.Random(1).sample(range(64), 10)
    generate(runner, PROMPT, 1, blocks=blocks)
    for cached in range(1, len(PROMPT)):
        assert generate(runner, PROMPT, 20, blocks=blocks, num_computed=cached) == expected


def test_a_resumed_sequence_continues_as_if_undisturbed(runner: ModelRunner, expected: list[int]) -> None:
    """Preempted after k tokens, placed again with its output so far in another row and other blocks."""
    for k in (1, 2, 7, 19):
        first = generate(runner, PROMPT, k, row=1)
        rest = generate(runner, PROMPT + first, 20 - k, row=5, blocks=list(range(40, 60)), num_prompt=len(PROMPT))
        assert first + rest == expected


def test_mixed_batch_equals_each_sequence_alone(folder: Path, kernels: str) -> None:
    """Decodes, whole prompts and chunks in the same steps, rows coming and going: each sequence is its own."""
    rng = random.Random(7)
    prompts = [[rng.randrange(8, SIZES["vocab_size"]) for _ in range(rng.randint(1, 30))] for _ in range(8)]
    alone = [generate(make_runner(folder, kernels), prompt, 10) for prompt in prompts]
    runner = make_runner(folder, kernels, num_blocks=96)
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * 8
    placed: set[int] = set()
    while any(len(t) < len(p) + 10 for t, p in zip(tokens, prompts, strict=True)):
        runs, new = [], []
        for i in rng.sample(range(8), rng.randint(1, 8)):
            if len(tokens[i]) == len(prompts[i]) + 10:
                continue
            if i not in placed:
                placed.add(i)
                new.append(sequence(7 - i, tokens[i], [i * 12, i * 12 + 1]))
            num_new = min(rng.randint(1, 9), len(tokens[i]) - computed[i])
            runs.append(Run(7 - i, tokens[i], computed[i], num_new, computed[i] + num_new == len(tokens[i])))
        if not runs:
            continue
        # Blocks beyond the first two arrive later, as entries that extend the table.
        table = [
            (run.row, index, (7 - run.row) * 12 + index)
            for run in runs
            for index in range(2, (run.num_computed + run.num_new - 1) // 4 + 1)
        ]
        output = runner.execute(Plan(runs, new, table=table).build())
        drawn = iter(tokens_of(output))
        for run in runs:
            computed[7 - run.row] += run.num_new
            if run.samples:
                tokens[7 - run.row].append(next(drawn))
    assert [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)] == alone


def test_a_fork_draws_from_the_prompts_logits_and_diverges_by_copy(runner: ModelRunner) -> None:
    """Children sample in the forking step from the parent's logits; copying the partial block keeps them apart."""
    shared, partial, copy = [0, 1, 2], 3, 9
    params = [SamplingParams(temperature=1.5, seed=seed) for seed in (11, 12)]
    plan = Plan(
        [Run(0, PROMPT, 0, len(PROMPT))],
        [sequence(0, PROMPT, [*shared, partial], params[0]), sequence(1, PROMPT, [*shared, partial], params[1])],
    ).build()
    plan = type(plan)(
        **{field: getattr(plan, field) for field in plan.__struct_fields__}
        | {"sample_sources": np.array([0, 0], "<i4").tobytes(), "sample_rows": np.array([0, 1], "<i4").tobytes()}
    )
    first = tokens_of(runner.execute(plan))
    choices = [[*PROMPT, first[0]], [*PROMPT, first[1]]]
    copies, table = [(partial, copy)], [(1, 3, copy)]
    table += [(row, index, 10 + 5 * row + index) for row in (0, 1) for index in range(4, 8)]
    for _ in range(10):
        runs = [Run(row, choices[row], len(choices[row]) - 1, 1) for row in (0, 1)]
        drawn = tokens_of(runner.execute(Plan(runs, table=table, copies=copies).build()))
        copies, table = [], []
        for choice, token in zip(choices, drawn, strict=True):
            choice.append(token)
    for choice, own in zip(choices, params, strict=True):
        alone = generate(runner, PROMPT, 11, blocks=list(range(30, 50)), params=own)
        assert choice[len(PROMPT) :] == alone
    assert choices[0] != choices[1]


def test_a_row_that_is_not_finite_is_reported_and_isolated(runner: ModelRunner, expected: list[int]) -> None:
    """NaN in one row (cases F5): it is in ``failed``, the others' tokens are untouched, and no NaN stays in the
    cache for whoever gets its blocks next."""
    bad = [5, POISONED_TOKEN, 9]
    plan = Plan(
        [Run(0, bad, 0, 3), Run(1, PROMPT, 0, len(PROMPT))],
        [sequence(0, bad, [40]), sequence(1, PROMPT, list(range(10)))],
    )
    output = runner.execute(plan.build())
    assert output.failed == (0,)
    assert tokens_of(output)[1] == expected[0]
    assert torch.isfinite(runner.kv_cache).all()
    assert generate(runner, PROMPT, 20, blocks=[40, *range(41, 60)]) == expected


def test_a_poisoned_chunk_fails_even_if_its_last_token_does_not(runner: ModelRunner) -> None:
    """A chunk that samples nothing, with NaN in its middle, must not be published: it fails too."""
    bad = [5, POISONED_TOKEN, 9, 9]
    output = runner.execute(Plan([Run(0, bad, 0, 3, samples=False)], [sequence(0, bad, [0])]).build())
    assert output.failed == (0,)
    assert output.tokens == b""


def test_logits_that_are_not_finite_fail_their_rows_only(folder: Path, kernels: str, tmp_path: Path) -> None:
    """An infinity in the head (cases F5): rows that sample are in ``failed``, with some token of the vocabulary; one
    that asks for no logits is not."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][50] = torch.inf
    save_file(weights, tmp_path / "model.safetensors")
    runner = make_runner(tmp_path, kernels)
    plan = Plan(
        [Run(0, PROMPT, 0, 5, samples=False), Run(1, PROMPT, 0, len(PROMPT)), Run(2, PROMPT, 0, len(PROMPT))],
        [
            sequence(0, PROMPT, list(range(10))),
            sequence(1, PROMPT, list(range(10, 20))),
            sequence(2, PROMPT, list(range(20, 30)), SamplingParams(temperature=1.0, seed=1, logprobs=2)),
        ],
    )
    output = runner.execute(plan.build())
    assert output.failed == (1, 2)
    assert all(0 <= token < SIZES["vocab_size"] for token in tokens_of(output))


def test_a_freed_row_is_forgotten(runner: ModelRunner) -> None:
    """A plan that samples for a row without a sequence is a fault of the plan and says so."""
    runner.execute(Plan([Run(0, PROMPT, 0, 13)], [sequence(0, PROMPT, list(range(8)), GREEDY)]).build())
    with pytest.raises(RuntimeError, match="row 0, which holds no sequence"):
        runner.execute(Plan([Run(0, [*PROMPT, 5], 13, 1)], freed=[0]).build())
