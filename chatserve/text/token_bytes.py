"""What each token contributes to the text, as bytes.

Reads the decoder section of a ``tokenizer.json`` and turns it into one rule per token, so that a text is simply the
concatenation of its tokens' bytes, decoded as UTF-8. That makes incremental and whole decoding the same thing.
Called by `chatserve.text.tokenizer`; knows no ids and no streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from chatserve.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(msgspec.Struct, frozen=True):
    """The decoding rule of one tokenizer.

    Attributes:
        of: a token's bytes, from the text it has in the vocabulary.
        leading_spaces: spaces that decoding removes from the start of a text (SentencePiece adds one when encoding).
    """

    of: Callable[[str], bytes]
    leading_spaces: int


def token_bytes_rule(decoder: dict[str, Any] | None) -> TokenBytes:
    """The rule behind the ``decoder`` of a ``tokenizer.json``.

    Differs from the tokenizers library in two points. A run of byte-fallback tokens that is not valid UTF-8 becomes
    U+FFFD as a strict decoder prescribes, where the library replaces every byte of the run, valid ones too, which
    cannot be done without taking back text that was already streamed. And its Metaspace decoder drops every space of
    the first token, where only the one that encoding put there goes here.

    Raises:
        ModelLoadError: a decoder that is not byte-level and not SentencePiece-like.
    """
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(_byte_level, 0)
    space, byte_fallback, leading = "", False, 0
    for position, step in enumerate(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": " "}:
                space = str(pattern)
            case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme}:
                space, leading = str(replacement), 0 if scheme == "never" else 1
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if "Fuse" in kinds[:position]:
                leading = int(start)
            case _:
                raise _unsupported(kinds)
    if not space:
        raise _unsupported(kinds)
    return TokenBytes(_pieces(space, byte_fallback), leading)


def _unsupported(kinds: list[str]) -> ModelLoadError:
    return ModelLoadError(
        f"The tokenizer's decoder ({', '.join(kinds) or 'none'}) is not supported; supported are byte-level BPE "
        "and SentencePiece tokenizers."
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [inner for step in decoder["decoders"] for inner in _steps(step)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one character per byte: printable Latin-1 stands for itself, the rest for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        # An added token that is plain text, not spelt in the byte alphabet.
        return token.encode()


def _pieces(space: str, byte_fallback: bool) -> Callable[[str], bytes]:
    def of(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(space, " ").encode()

    return of
