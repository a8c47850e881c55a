"""Small real tokenizers for the text tests: byte-level BPE, and two SentencePiece-like ones with byte fallback."""

from __future__ import annotations

import json
import random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from chatserve.model.gguf_tokenizer import byte_level_tokenizer, sentencepiece_tokenizer
from chatserve.text.tokenizer import Tokenizer as ChatTokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im", "[INST]", "[/INST]")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps for 12345 hours.",
    "def main():\n    return {'a': 1}\n\n\n    # done",
    "Größe, façade, naïve, Ελληνικά, русский текст, 你好世界, こんにちは, 한국어, 🙂👍🏽 emoji",
    "user system assistant im_start im_end |> <| hello Hello HELLO  double  spaces",
]
SAMPLES = [
    "",
    "Hello, world!",
    "  two  spaces and a tail  ",
    "line\nline\n\n\n  indented\ttab\r\n",
    "12345 678,90 ½ ² Ⅳ ١٢٣",
    "don't I'LL we've they'd IT'S",
    "é e\u0301 ñ n\u0303 Å Å",
    "你好，世界。こんにちは 안녕하세요",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪",
    "שלום עולם مرحبا بالعالم हिन्दी ไทย",
    "\u200b\u00a0\u3000\ufeff\u2028 zero width",
    "\x00\x01\x7f control",
    "a" * 200 + "!" * 50 + " " * 40 + "x",
    "<|im_start|>user\nhi<|im_end|>",
    "\U0010fffd\ue000 private",
]


def random_text(rng: random.Random, length: int) -> str:
    """Text over all of Unicode except surrogates, mixed with ordinary words and control tokens' texts."""
    parts: list[str] = []
    for _ in range(length):
        kind = rng.random()
        if kind < 0.5:
            parts.append(rng.choice(["the", " cat", "\n", "  ", "ing", " 42", "é", "你好", "🙂"]))
        elif kind < 0.65:
            text = rng.choice(CONTROL)
            start = rng.randrange(len(text))
            parts.append(text if rng.random() < 0.6 else text[start : rng.randint(start, len(text))])
        else:
            code = rng.choice(
                [rng.randrange(0x80), rng.randrange(0x800), rng.randrange(0x10000), rng.randrange(0x110000)]
            )
            parts.append("?" if 0xD800 <= code < 0xE000 else chr(code))
    return "".join(parts)


def byte_level() -> dict[str, Any]:
    """A byte-level BPE of a few hundred merges with ChatML's control tokens and one that contains another."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokenizer = byte_level_tokenizer(tokens, [" ".join(pair) for pair in model["merges"]], "smollm")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return _definition(tokenizer)


def sentencepiece(*, add_space_prefix: bool = True) -> dict[str, Any]:
    """SentencePiece BPE in the form that Llama 2 has: a space is put before a text, and taken off when decoding."""
    words = ["the", "quick", "brown", "fox", "Hello", "world", "user", "im", "INST", "_start", "é", "你好"]
    pieces = ["\u2581", *sorted({character for text in CORPUS + words for character in text if character != " "})]
    for word in words:
        for end in range(2, len(word) + 1):
            pieces.append(word[:end])
        pieces += ["\u2581" + word[:end] for end in range(1, len(word) + 1)]
    pieces += ["\u2581\u2581", "\u2581\u2581\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *dict.fromkeys(pieces)]
    tokenizer = sentencepiece_tokenizer(
        tokens, [-float(index) for index in range(len(tokens))], unknown="<unk>", add_space_prefix=add_space_prefix
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *CONTROL])
    return _definition(tokenizer)


def metaspace() -> dict[str, Any]:
    """The newer form of the same: Metaspace as pre-tokenizer and decoder."""
    definition = sentencepiece()
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _definition(tokenizer)


def chat_tokenizer(definition: dict[str, Any]) -> ChatTokenizer:
    """Our tokenizer over a definition, with ChatML's named tokens."""
    return ChatTokenizer(definition, named_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})


def library(definition: dict[str, Any]) -> Tokenizer:
    """The tokenizers library over the same definition: what ours is compared with."""
    return Tokenizer.from_str(json.dumps(definition))


def _definition(tokenizer: Tokenizer) -> dict[str, Any]:
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return definition
