"""Networks on the compiled kernels: the same model as the plain one, whatever the family and the format."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.cpu.weights import QuantisedRows, dequantise
from chatserve_kernels.interface import Backend
from chatserve_kernels.torch_backend import TorchBackend
from safetensors.torch import load_file

from chatserve.model import store
from chatserve.model.architecture import Architecture
from chatserve.model.gguf_convert import convert
from chatserve.model.native import Quantization
from chatserve.model.transformer import Transformer
from chatserve.model.weights import Checkpoint
from chatserve.text.tokenizer import Tokenizer
from tests.kernels.native import library
from tests.model.tiny import SIZES, VARIANTS, all_logits, error, run_prompts, write_model
from tests.store.tiny_gguf import write_gguf

# English prose, long enough that errors of single tokens do not decide.
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")[:2200]


def run(folder: Path, backend: Backend, dtype: torch.dtype, prompts: list[list[int]], quantization: Quantization):
    architecture = Architecture.from_folder(folder)
    model = Transformer(folder, architecture, backend, dtype, 512, quantization)
    return model, all_logits(model, prompts, dtype)


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return NativeBackend(library(supported_isas()[0]))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "llama-head-dim"])
def test_every_family_gives_the_logits_of_its_quantised_weights(
    tmp_path: Path, native: NativeBackend, variant: str
) -> None:
    """Biases, head norms, windows, rope scalings and tied heads reach the kernels: 8-bit weights leave the logits
    where plain float32 has them, up to rounding."""
    write_model(tmp_path, variant, hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=32)
    prompts = [[3, 17, 99, 4, 55, 21, 8], list(range(20, 60)), [7]]
    _, expected = run(tmp_path, TorchBackend(), torch.float32, prompts, "none")
    model, ours = run(tmp_path, native, torch.bfloat16, prompts, "q8_0")
    assert (model.is_native, model.weight_format) == (True, "q8_0")
    for a, b in zip(expected, ours, strict=True):
        assert (a - b).norm() / a.norm() < 0.06


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_runs_in_bfloat16(tmp_path: Path, native: NativeBackend, variant: str) -> None:
    """Weights that are not quantised, whatever the sizes: within bfloat16's rounding of plain float32 (which is what
    transformers computes), and no further from it than torch's own bfloat16."""
    write_model(tmp_path, variant)
    prompts = [[3, 17, 99, 4, 55, 21, 8], list(range(20, 60)), [7]]
    _, exact = run(tmp_path, TorchBackend(), torch.float32, prompts, "none")
    _, theirs = run(tmp_path, TorchBackend(), torch.bfloat16, prompts, "none")
    for quantization in ("none", "auto"):
        model, ours = run(tmp_path, native, torch.bfloat16, prompts, quantization)
        assert model.is_native
        assert error(ours, exact) < 0.04
        assert error(ours, exact) < error(theirs, exact)


def test_a_token_without_an_embedding_fails_its_sequence_only(tmp_path: Path, native: NativeBackend) -> None:
    """Whatever number arrives as a token: nothing outside the embedding is read, and the neighbours are not touched."""
    write_model(tmp_path, "llama")
    good, neighbour = [3, 17, 99, 4], [7, 8]
    model, (expected, beside) = run(tmp_path, native, torch.bfloat16, [good, neighbour], "none")
    for token in (SIZES["vocab_size"], SIZES["vocab_size"] + 1, 2_000_000_000, -1):
        prompts = [good, [3, token, 5], neighbour]
        result, cache = run_prompts(model, prompts, torch.bfloat16)
        logits, bad, other = result.logits.split([len(prompt) for prompt in prompts])
        assert result.failed == (1,)
        assert torch.isfinite(cache).all()
        assert not bad[1:].any()  # the token itself and what sees it
        assert error([logits, other], [expected, beside]) < 0.02


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return store.pull("smollm2-135m").path


def test_stored_blocks_are_used_and_the_model_reads_text_as_well(smollm2: Path, native: NativeBackend) -> None:
    """Perplexity of a fixed text within 1 % of the dequantised model's in float32, in one chunk (tiles) and token by
    token (dot products); nine of ten greedy choices are the same. (0.0 to 0.3 % are seen, by instruction set.)"""
    ids = torch.frombuffer(bytearray(Tokenizer.from_folder(smollm2).encode(TEXT)), dtype=torch.int32).tolist()
    _, (expected,) = run(smollm2, TorchBackend(), torch.float32, [ids], "none")
    exact = perplexity(expected, ids)
    model, (ours,) = run(smollm2, native, torch.bfloat16, [ids], "auto")
    assert (model.is_native, model.weight_format) == (True, "q4_1")
    assert abs(perplexity(ours, ids) / exact - 1) < 0.01
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
    native.library.tile_threshold, before = 1 << 30, native.library.tile_threshold
    try:
        (dots,) = all_logits(model, [ids], torch.bfloat16)
    finally:
        native.library.tile_threshold = before
    assert abs(perplexity(dots, ids) / exact - 1) < 0.01


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_kept_blocks_are_the_converted_weights(tmp_path: Path, native: NativeBackend, kind: str) -> None:
    """What the converter keeps of a GGUF file means, matrix by matrix and row by row (q and k reordered), the
    bfloat16 weights beside it; and the kernels then give the logits of those."""
    source, folder = tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(source, "llama", tied=False, kind=gguf.GGMLQuantizationType[kind])
    folder.mkdir()
    convert(source, folder, lambda step, done, total: None)
    weights = load_file(folder / "model.safetensors")
    with Checkpoint(folder) as checkpoint:
        for name, weight in weights.items():
            if weight.dim() == 2:
                found = checkpoint.blocks(name, (weight.shape[0], weight.shape[1]))
                assert found is not None
                assert torch.equal(dequantise(QuantisedRows(*found)).bfloat16(), weight), name
    prompts = [[3, 17, 99, 4, 55], list(range(20, 50))]
    _, expected = run(folder, TorchBackend(), torch.float32, prompts, "none")
    model, ours = run(folder, native, torch.bfloat16, prompts, "auto")
    assert model.is_native
    for a, b in zip(expected, ours, strict=True):
        assert (a - b).norm() / a.norm() < 0.06


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    chosen = logits[:-1].double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return math.exp(-float(chosen.mean()))


@pytest.mark.parametrize(("inner", "is_native"), [(80, True), (72, False)])
def test_sizes_that_do_not_fit_blocks_are_not_quantised(
    tmp_path: Path, native: NativeBackend, inner: int, is_native: bool
) -> None:
    """Rows that are no whole number of blocks stay bfloat16, and run on torch where gate and up cannot be interleaved:
    such a model is served plainly, not refused."""
    write_model(tmp_path, "llama-head-dim", intermediate_size=inner)
    prompts = [[3, 17, 99, 4], [5]]
    _, expected = run(tmp_path, TorchBackend(), torch.float32, prompts, "none")
    model, ours = run(tmp_path, native, torch.bfloat16, prompts, "q8_0")
    assert model.is_native == is_native
    assert error(ours, expected) < 0.1


def test_a_gguf_model_runs_in_bfloat16_when_asked(tmp_path: Path, native: NativeBackend) -> None:
    """``none`` leaves kept blocks alone: the converted bfloat16 weights are multiplied, as they are."""
    source, folder = tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(source, "llama", tied=True, kind=gguf.GGMLQuantizationType.Q4_0)
    folder.mkdir()
    convert(source, folder, lambda step, done, total: None)
    prompts = [[3, 17, 99, 4, 55], list(range(20, 50))]
    _, expected = run(folder, TorchBackend(), torch.float32, prompts, "none")
    model, ours = run(folder, native, torch.bfloat16, prompts, "none")
    assert model.is_native
    assert error(ours, expected) < 0.02
