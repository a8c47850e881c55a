"""The vocabulary inside a GGUF file as ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

Knows GGUF's two tokenizer models (byte-level BPE, and SentencePiece BPE with byte fallback) and which
pre-tokenizer each ``tokenizer.ggml.pre`` stands for. Called by `chatserve.model.gguf_convert` only; knows no tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from chatserve.errors import ModelLoadError

CONTROL, USER_DEFINED = 3, 4
SPACE = "\u2581"

# Texts that end an answer in the supported families, where the vocabulary has them as control tokens: GGUF names
# only one end token, but base and chat variants of a model each end with their own.
END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Name in `tokenizer.ggml.pre` to the patterns that split a text into words, one after another.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "gpt2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
# Families whose vocabulary holds whole words that no chain of merges reaches; their texts begin with a token, too,
# unless the file says otherwise.
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")


class SpecialTokens(msgspec.Struct, frozen=True):
    """Ids that begin and end texts."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class _Metadata(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...

    def need(self, key: str) -> Any: ...


def convert_tokenizer(meta: _Metadata, target: Path) -> SpecialTokens:
    """Write the tokenizer files into ``target``.

    Raises:
        ModelLoadError: the tokenizer model or its pre-tokenizer is not one of those known here.
    """
    tokens: list[str] = meta.need("tokenizer.ggml.tokens")
    types: list[int] = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    kind = meta.need("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = meta.get("tokenizer.ggml.pre", "default")
        tokenizer = byte_level_tokenizer(tokens, meta.need("tokenizer.ggml.merges"), pre)
        add_bos_by_default = pre in _WHOLE_WORDS_FIRST
    elif kind == "llama":
        tokenizer = sentencepiece_tokenizer(
            tokens,
            meta.need("tokenizer.ggml.scores"),
            unknown=tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)],
            add_space_prefix=bool(meta.get("tokenizer.ggml.add_space_prefix", True)),
        )
        add_bos_by_default = True
    else:
        raise ModelLoadError(
            f"GGUF tokenizer model {kind!r} is not supported; use a file with gpt2 (byte-level BPE) or llama "
            "(SentencePiece) tokenizer, or the model's Hugging Face folder."
        )
    added = [
        AddedToken(text, special=token_type == CONTROL, normalized=False)
        for text, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])

    bos = meta.get("tokenizer.ggml.bos_token_id")
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", add_bos_by_default)) and bos is not None
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0",
            pair=f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    tokenizer.save(str(target / "tokenizer.json"))

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    (target / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    template = meta.get("tokenizer.chat_template")
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")

    ends = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends += [index for index, text in enumerate(tokens) if text in END_TEXTS and types[index] == CONTROL]
    return SpecialTokens(bos, tuple(dict.fromkeys(end for end in ends if end is not None)))


def byte_level_tokenizer(tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
    """Byte-level BPE (GPT-2's alphabet) with the word splitter that ``pre`` names."""
    patterns = _PRE_TOKENIZERS.get(pre)
    if patterns is None:
        raise ModelLoadError(
            f"GGUF pre-tokenizer {pre!r} is not known here (known: {', '.join(_PRE_TOKENIZERS)}); "
            "use the model's Hugging Face folder, which holds its own tokenizer.json."
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(tokens)},
            merges=pairs,
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_tokenizer(
    tokens: list[str], scores: list[float], *, unknown: str, add_space_prefix: bool
) -> Tokenizer:
    """SentencePiece BPE with byte fallback. It stores scores instead of merges: a pair of pieces merges if its
    concatenation is a piece, the highest score first."""
    vocab = {text: index for index, text in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], (left, right)))
    ranked.sort(key=lambda entry: entry[:3])
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[pair for *_, pair in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    unspaced: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        unspaced.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(unspaced)
    return tokenizer
