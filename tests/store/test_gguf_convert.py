"""A GGUF file becomes the same model: weights, configuration, tokenizer."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as LibraryTokenizer

from chatserve.errors import ModelLoadError
from chatserve.model.gguf_convert import convert, llama3_scaling, to_bfloat16, write_weights
from chatserve.model.gguf_tokenizer import byte_level_tokenizer, convert_tokenizer
from chatserve.text.chat_template import ChatMessage, ChatTemplate
from chatserve.text.tokenizer import Tokenizer
from tests.store.tiny_gguf import byte_level_vocabulary, sentencepiece_metadata, write_gguf
from tests.text.vocabularies import SAMPLES

TYPES_TO_WRITE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def prepare(source: Path, target: Path) -> Path:
    target.mkdir()
    convert(source, target, lambda step, done, total: None)
    return target


@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_weights_and_logits_equal_transformers_loading(tmp_path: Path, arch: str, tied: bool) -> None:
    """transformers, given the GGUF itself, arrives at our weights (rounded to bfloat16) and at our logits."""
    from transformers import AutoModelForCausalLM

    source = tmp_path / "model.gguf"
    write_gguf(source, arch, tied=tied, kind=gguf.GGMLQuantizationType.Q8_0)
    folder = prepare(source, tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=source.name, dtype=torch.float32)
    expected = {name: weight.bfloat16().float() for name, weight in theirs.state_dict().items()}
    assert expected.keys() == ours.state_dict().keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    theirs.load_state_dict(expected)
    ids = torch.tensor([[5, 9, 300, 42, 7]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TYPES_TO_WRITE)
def test_every_writable_type_is_dequantised(tmp_path: Path, name: str) -> None:
    """Row order, block layout and shape survive for each type, down to the bfloat16 bit."""
    source = tmp_path / "model.gguf"
    stored = write_gguf(source, "qwen3", tied=False, kind=gguf.GGMLQuantizationType[name])
    weights = load_file(prepare(source, tmp_path / "out") / "model.safetensors")
    assert len(weights) == len(stored)
    for ours, theirs in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
    ]:
        assert torch.equal(weights[ours], torch.from_numpy(stored[theirs]).bfloat16())


def test_types_that_can_only_be_read(tmp_path: Path) -> None:
    """K-quants, I-quants and the rest: any bytes of the right size convert to what the package's own reader says."""
    only_read = []
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in TYPES_TO_WRITE:
            continue
        raw = np.random.default_rng(1).integers(0, 64, (4, size * (512 // block)), dtype=np.uint8)
        try:
            expected = gguf.quants.dequantize(raw, kind)
        except (NotImplementedError, ValueError):
            continue
        only_read.append(kind.name)
        source = tmp_path / f"{kind.name}.gguf"
        writer = gguf.GGUFWriter(str(source), "llama")
        writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        reader = gguf.GGUFReader(str(source))
        target = tmp_path / f"{kind.name}.safetensors"
        write_weights(target, {t.name: t for t in reader.tensors}, {}, "llama", lambda step, done, total: None)
        got = load_file(target)["model.layers.0.mlp.up_proj.weight"].float().numpy()
        wanted = torch.from_numpy(np.ascontiguousarray(expected, dtype=np.float32)).bfloat16().float().numpy()
        np.testing.assert_array_equal(got, wanted)
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4"} <= set(only_read)


def test_rounding_to_bfloat16_is_torchs() -> None:
    """Ties, denormals, infinities and NaN round as torch rounds them."""
    bits = np.random.default_rng(2).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    special = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1, 0x7F800001], dtype=np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    ours = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16).float()
    torch.testing.assert_close(ours, torch.from_numpy(values).bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_large_tensors_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded memory changes nothing in the file."""
    source = tmp_path / "model.gguf"
    write_gguf(source, kind=gguf.GGMLQuantizationType.Q8_0)
    whole = (prepare(source, tmp_path / "whole") / "model.safetensors").read_bytes()
    monkeypatch.setattr("chatserve.model.gguf_convert.ROWS_AT_ONCE_BYTES", 1000)
    assert (prepare(source, tmp_path / "parts") / "model.safetensors").read_bytes() == whole


def test_configuration_of_the_variants(tmp_path: Path) -> None:
    """A window makes a llama a mistral; a missing output layer means tied embeddings; rope scaling is carried over."""
    source = tmp_path / "model.gguf"
    extra = {
        "llama.attention.sliding_window": 32,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    write_gguf(source, tied=False, extra=extra)
    config = msgspec.json.decode((prepare(source, tmp_path / "out") / "config.json").read_bytes())
    assert config["model_type"] == "mistral"
    assert config["sliding_window"] == 32
    assert config["tie_word_embeddings"] is False
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert (config["head_dim"], config["num_key_value_heads"]) == (16, 2)
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_llama3_scaling_is_recovered_from_its_factors() -> None:
    """The divisors that GGUF stores lead back to the scaling that transformers computes them from."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    config = LlamaConfig(
        hidden_size=2048, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=scaling
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    factors = (plain / scaled).numpy()
    recovered = llama3_scaling(factors, 64, 500000.0)
    assert recovered == {key: value for key, value in scaling.items() if key != "rope_theta"}
    factors[5] = 3.0
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        llama3_scaling(factors, 64, 500000.0)


def test_prepared_folder_is_complete_for_the_text_room(tmp_path: Path) -> None:
    """Tokenizer, end tokens and chat template load from the folder, and tokenise as the vocabulary says."""
    source = tmp_path / "model.gguf"
    write_gguf(source)
    folder = prepare(source, tmp_path / "out")
    tokenizer = Tokenizer.from_folder(folder)
    tokens, merges, _ = byte_level_vocabulary()
    end, start = tokens.index("<|im_end|>"), tokens.index("<|im_start|>")
    assert tokenizer.eos_token_ids == (end, tokens.index("<|endoftext|>"))
    assert tokenizer.bos_token_id == start
    plain = byte_level_tokenizer(tokens, merges, "smollm")
    for text in SAMPLES:
        if "<|" not in text:
            assert list(np.frombuffer(tokenizer.encode(text), np.int32)) == plain.encode(text).ids
    prompt = ChatTemplate.from_folder(folder, tokenizer).render([ChatMessage("user", "Hello")])
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    assert config["eos_token_id"] == list(tokenizer.eos_token_ids)


class Fields(dict[str, Any]):
    """GGUF metadata without a file."""

    def need(self, key: str) -> Any:
        return self[key]


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    """Scores become merges; a beginning token is added when asked; bytes fall back; the text survives."""
    special = convert_tokenizer(Fields(sentencepiece_metadata()), tmp_path)
    assert special.bos_token_id == 1
    assert special.eos_token_ids[0] == 2
    tokenizer = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("Hello world").tokens == ["<s>", "\u2581Hello", "\u2581world"]
    assert tokenizer.encode("\U0001f9ff", add_special_tokens=False).tokens[-4:] == [
        "<0xF0>",
        "<0x9F>",
        "<0xA7>",
        "<0xBF>",
    ]
    for text in SAMPLES:
        if "<|" not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


PRE_TOKENIZED = {
    "gpt-2": ["It", "'s", " 12345", " caf\u00e9", " (", "x", ")?", "  ", " y", "\n", "\n", "z"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " caf\u00e9", " (", "x", ")?", "  ", " y", "\n", "\n", "z"],
    "llama-bpe": ["It", "'s", " ", "123", "45", " caf\u00e9", " (", "x", ")?", "  ", " y", "\n\n", "z"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " caf\u00e9", " (", "x", ")?", "  ", " y", "\n\n", "z"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "5", " caf\u00e9", " (", "x", ")?", "  ", " y", "\n\n", "z"],
    "default": ["It", "'", "s", " ", "123", "45", " caf\u00e9", " ", "(", "x", ")?", "  ", " y", "\n", "\n", "z"],
}


@pytest.mark.parametrize("pre", PRE_TOKENIZED)
def test_words_of_each_pre_tokenizer(pre: str) -> None:
    """Contractions, digits, punctuation, spaces and newlines are split as the named family splits them."""
    tokens, merges, _ = byte_level_vocabulary()
    tokenizer = byte_level_tokenizer(tokens, merges, pre)
    text = "It's 12345 caf\u00e9 (x)?   y\n\nz"
    words = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert words == PRE_TOKENIZED[pre]


@pytest.mark.parametrize(
    ("arch", "extra", "words"),
    [
        ("gemma", {}, "gemma"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}, "ffn_gate_exps"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, arch: str, extra: dict[str, Any], words: str) -> None:
    """An unknown family, scaling or tensor is refused by name instead of being dropped."""
    source = tmp_path / "model.gguf"
    write_gguf(source, arch, extra=extra)
    with pytest.raises(ModelLoadError, match=words):
        prepare(source, tmp_path / "out")


def test_unknown_pre_tokenizer_is_named() -> None:
    """A vocabulary whose word splitter is unknown would tokenise wrongly in silence."""
    with pytest.raises(ModelLoadError, match="viking"):
        byte_level_tokenizer(["a"], [], "viking")


@pytest.mark.parametrize("damage", ["empty", "text", "truncated header", "truncated weights"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    """Whatever is wrong with the file, the answer is one typed error."""
    source = tmp_path / "model.gguf"
    write_gguf(source)
    content = source.read_bytes()
    source.write_bytes(
        {
            "empty": b"",
            "text": b"<html>not found</html>" * 100,
            "truncated header": content[:3000],
            "truncated weights": content[:-4096],
        }[damage]
    )
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        prepare(source, tmp_path / "out")


def test_random_damage_is_one_typed_error(tmp_path: Path) -> None:
    """Changed bytes anywhere in a file lead to a model or to a typed error, never to a traceback."""
    source = tmp_path / "model.gguf"
    write_gguf(source)
    content = source.read_bytes()
    rng = random.Random(13)
    refused = 0
    for number in range(60):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(rng.choice([100, 2000, 30_000]))] = rng.randrange(256)
        source.write_bytes(damaged)
        try:
            with warnings.catch_warnings(action="ignore"):
                prepare(source, tmp_path / str(number))
        except ModelLoadError:
            refused += 1
    assert 20 < refused <= 60


@pytest.mark.parametrize(
    ("pre", "stated", "expected"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False)]
)
def test_who_begins_texts_with_a_token(tmp_path: Path, pre: str, stated: bool | None, expected: bool) -> None:
    """Llama 3 begins every plain text with its beginning token even where the file does not say so; others do not."""
    tokens, merges, types = byte_level_vocabulary()
    start = tokens.index("<|im_start|>")
    fields = Fields(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": start,
        }
    )
    if stated is not None:
        fields["tokenizer.ggml.add_bos_token"] = stated
    convert_tokenizer(fields, tmp_path)
    encoded = Tokenizer.from_folder(tmp_path).encode("Hello", add_special_tokens=True)
    assert (np.frombuffer(encoded, np.int32)[0] == start) == expected
