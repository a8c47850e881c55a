"""One GGUF file in, one prepared model folder in Hugging Face layout out.

Runs as its own process (``python -m chatserve.model.gguf_convert SRC DST``), started by `chatserve.model.store`,
and speaks JSON lines on stdout: progress, or one error. Knows GGUF's tensor names, quantised types and metadata;
`gguf_tokenizer` knows its vocabulary. Does not know where folders live or when one counts as complete.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import gguf
import msgspec
import numpy as np
import numpy.typing as npt

from chatserve.errors import ModelLoadError
from chatserve.model.gguf_tokenizer import convert_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROWS_AT_ONCE_BYTES = 64 * 1024 * 1024

Report = Callable[[str, int, int], None]
FloatArray = npt.NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)

_KEPT_FORMATS = ("Q4_0", "Q4_1", "Q8_0")

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_BLOCK_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class Metadata:
    """Typed look-up in a GGUF file's key-value section; ``{arch}`` in a key stands for the architecture."""

    def __init__(self, fields: dict[str, gguf.ReaderField]) -> None:
        self._fields = fields
        self.architecture = str(self.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key.replace("{arch}", getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelLoadError(
                f"The GGUF file lacks the metadata {key.replace('{arch}', self.architecture)}; "
                "convert the model to GGUF again with a current llama.cpp, or use its Hugging Face folder."
            )
        return value


def convert(source: Path, target: Path, report: Report) -> None:
    """Write ``target`` (an existing empty folder): config, weights in bfloat16, tokenizer and chat template.

    Raises:
        ModelLoadError: the file is no readable GGUF, or its architecture, tokenizer or a tensor is not supported.
    """
    try:
        _convert(source, target, report)
    except ModelLoadError:
        raise
    except Exception as error:  # a damaged file leads numpy, gguf and tokenizers into whatever they raise
        raise ModelLoadError(
            f"{source.name} is not a readable GGUF file ({type(error).__name__}: {error}); download it again. "
            "Files that were split into parts must be merged first (llama-gguf-split --merge)."
        ) from error


def _convert(source: Path, target: Path, report: Report) -> None:
    report("read", 0, 1)
    reader = gguf.GGUFReader(str(source))
    meta = Metadata(reader.fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = model_config(meta, tensors)
    report("read", 1, 1)
    write_weights(target / "model.safetensors", tensors, config, meta.architecture, report)
    write_blocks(target / "quantized.safetensors", tensors, config, meta.architecture)
    report("tokenizer", 0, 1)
    special = convert_tokenizer(meta, target)
    config["bos_token_id"] = special.bos_token_id
    config["eos_token_id"] = list(special.eos_token_ids)
    generation = {"bos_token_id": special.bos_token_id, "eos_token_id": list(special.eos_token_ids)}
    (target / "generation_config.json").write_bytes(_pretty(generation))
    (target / "config.json").write_bytes(_pretty(config))
    report("tokenizer", 1, 1)


def model_config(meta: Metadata, tensors: dict[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """GGUF metadata as the keys of a Hugging Face ``config.json``."""
    arch = meta.architecture
    if arch not in ARCHITECTURES:
        raise ModelLoadError(
            f"GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)} "
            "(llama includes Mistral)."
        )
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("The GGUF file has no token embedding (token_embd.weight); is it only a part of a model?")
    hidden = int(meta.need("{arch}.embedding_length"))
    heads = int(meta.need("{arch}.attention.head_count"))
    head_dim = int(meta.get("{arch}.attention.key_length", hidden // heads))
    window = meta.get("{arch}.attention.sliding_window")
    model_type = "mistral" if arch == "llama" and window else arch
    config: dict[str, Any] = {
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type] + "ForCausalLM"
        ],
        "model_type": model_type,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(meta.need("{arch}.feed_forward_length")),
        "num_hidden_layers": int(meta.need("{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("{arch}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta.need("{arch}.context_length")),
        "rms_norm_eps": float(meta.need("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(meta.get("{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16",
    }
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    elif model_type == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if window:
        config["sliding_window"] = int(window)
    scaling = _rope_scaling(meta, tensors.get(_ROPE_FACTORS), head_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(
    meta: Metadata, factors: gguf.ReaderTensor | None, head_dim: int, theta: float
) -> dict[str, Any] | None:
    if factors is not None:
        return llama3_scaling(_dequantise(factors.data, factors.tensor_type).reshape(-1), head_dim, theta)
    kind = meta.get("{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"Rope scaling {kind!r} is not supported; supported are linear, yarn and llama3.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(meta.need("{arch}.rope.scaling.factor"))}
    original = meta.get("{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def llama3_scaling(factors: FloatArray, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3.1's rope scaling, which GGUF keeps only as one divisor per frequency.

    Every published Llama 3.x uses the same band edges (1, 4) and original length (8192), so the largest divisor is
    the factor; the whole curve is recomputed from that and compared, so that another recipe is refused, not guessed.

    Args:
        factors: ``[head_dim / 2]`` divisors of the inverse frequencies.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = round(float(factors.max()), 3)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-2):
        raise ModelLoadError(
            "The GGUF file's rope_freqs follow no known Llama 3 scaling; use the model's Hugging Face folder instead."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def write_weights(
    path: Path, tensors: dict[str, gguf.ReaderTensor], config: dict[str, Any], arch: str, report: Report
) -> None:
    """Write all tensors as one bfloat16 safetensors file, a few rows at a time, so memory stays bounded."""
    named = {_hf_name(name): tensor for name, tensor in tensors.items() if name != _ROPE_FACTORS}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in named.items():
        shape = [int(size) for size in reversed(tensor.shape)]
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    with path.open("wb") as file:
        _write_header(file, header)
        for name, tensor in named.items():
            for rows in _float_rows(name, tensor, config, arch):
                file.write(to_bfloat16(rows).tobytes())
            report("weights", header[name]["data_offsets"][1], offset)
        file.flush()
        os.fsync(file.fileno())


def write_blocks(path: Path, tensors: dict[str, gguf.ReaderTensor], config: dict[str, Any], arch: str) -> None:
    """Keep the matrices whose stored blocks the CPU kernels multiply as they are; no file where there are none.

    One uint8 tensor ``[rows, bytes per row]`` each, called like the matrix with the format's name appended. Blocks
    run along rows, so the reordering of q and k rows is exact.
    """
    named = {
        f"{_hf_name(name)}.{tensor.tensor_type.name.lower()}": tensor
        for name, tensor in tensors.items()
        if tensor.tensor_type.name in _KEPT_FORMATS and tensor.data.ndim == 2
    }
    if not named:
        return
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in named.items():
        header[name] = {
            "dtype": "U8",
            "shape": [int(size) for size in tensor.data.shape],
            "data_offsets": [offset, offset + tensor.data.nbytes],
        }
        offset += tensor.data.nbytes
    with path.open("wb") as file:
        _write_header(file, header)
        for name, tensor in named.items():
            heads = _permuted_heads(name, config, arch)
            rows = np.asarray(tensor.data) if heads is None else unpermute(np.asarray(tensor.data), heads)
            file.write(np.ascontiguousarray(rows).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _write_header(file: IO[bytes], header: dict[str, Any]) -> None:
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 64)
    file.write(struct.pack("<Q", len(encoded)))
    file.write(encoded)


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _BLOCK_PATTERN.fullmatch(name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ModelLoadError(f"The GGUF file holds a tensor this version does not know: {name}.")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def _float_rows(name: str, tensor: gguf.ReaderTensor, config: dict[str, Any], arch: str) -> Iterator[FloatArray]:
    """The tensor as float32 in Hugging Face order: whole if its rows are to be permuted, else in groups of rows."""
    heads = _permuted_heads(name, config, arch)
    if heads is not None:
        yield unpermute(_dequantise(tensor.data, tensor.tensor_type), heads)
    else:
        columns = int(tensor.shape[0])
        step = len(tensor.data) if tensor.data.ndim == 1 else max(1, ROWS_AT_ONCE_BYTES // (4 * columns))
        for start in range(0, len(tensor.data), step):
            yield _dequantise(tensor.data[start : start + step], tensor.tensor_type)


def _permuted_heads(name: str, config: dict[str, Any], arch: str) -> int | None:
    """Heads of a projection whose rows llama.cpp reorders; ``None`` for all other tensors."""
    if arch == "llama" and ".self_attn.q_proj." in name:
        return int(config["num_attention_heads"])
    if arch == "llama" and ".self_attn.k_proj." in name:
        return int(config["num_key_value_heads"])
    return None


def _dequantise(data: npt.NDArray[Any], kind: gguf.GGMLQuantizationType) -> FloatArray:
    try:
        return np.asarray(gguf.quants.dequantize(data, kind), dtype=np.float32)
    except NotImplementedError as error:
        raise ModelLoadError(f"GGUF tensor type {kind.name} cannot be dequantised; choose another file.") from error


def unpermute(weight: npt.NDArray[Number], num_heads: int) -> npt.NDArray[Number]:
    """Undo llama.cpp's reordering of q and k rows: interleaved rotary pairs back to two halves.

    Args:
        weight: ``[num_heads * head_dim, …]``; values or whole blocks of them.
    """
    halves = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, halves, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even; the upper 16 bits of each number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _end_with_parent() -> None:
    """Exit when stdin closes: a converter must not outlive the process that would have used its result."""

    def wait() -> None:
        # os.read, not sys.stdin: a daemon thread inside a buffered reader breaks the interpreter's exit.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Convert ``argv[1]`` into the folder ``argv[2]``; the exit status is 1 after an error line."""
    _end_with_parent()
    source, target = Path(sys.argv[1]), Path(sys.argv[2])

    def emit(line: dict[str, Any]) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        convert(source, target, lambda step, done, total: emit({"step": step, "done": done, "total": total}))
    except ModelLoadError as error:
        emit({"error": error.message})
        sys.exit(1)


if __name__ == "__main__":
    main()
