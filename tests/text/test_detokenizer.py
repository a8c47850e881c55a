"""Streamed text equals whole decoding: no split characters, no false U+FFFD, nothing lost or doubled."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from chatserve.errors import GenerationFailedError
from chatserve.text.detokenizer import IncrementalDetokenizer
from chatserve.text.tokenizer import Tokenizer, int32_ids
from tests.text.vocabularies import SAMPLES, byte_level, chat_tokenizer, library, random_text, sentencepiece

NUM_SEQUENCES = 10_000


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    """What each token adds, and what is left at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*[detokenizer.push(index) for index in ids], detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token per byte."""
    single: dict[bytes, int] = {}
    for index in reversed(range(tokenizer.vocab_size)):
        if index not in tokenizer.special_ids:
            single[tokenizer.token_bytes(index)] = index
    return [single[bytes([byte])] for byte in raw]


def test_random_ids_stream_to_the_whole_text(definition: dict[str, Any]) -> None:
    """For 10^4 random sequences of any ids, the deltas concatenated are the decoded whole."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    rng = random.Random(3)
    for number in range(NUM_SEQUENCES):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 24))]
        skip = number % 3 > 0
        assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_byte_level_decoding_is_the_librarys_for_any_ids() -> None:
    """On byte-level BPE, whole decoding of random ids, valid UTF-8 or not, equals the library's."""
    definition = byte_level()
    tokenizer, theirs = chat_tokenizer(copy.deepcopy(definition)), library(definition)
    rng = random.Random(4)
    for number in range(NUM_SEQUENCES):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 24))]
        skip = number % 2 > 0
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_real_text_streams_exactly(definition: dict[str, Any]) -> None:
    """Encoded text, streamed, is the library's decoding, and U+FFFD appears nowhere that the text has none."""
    tokenizer, theirs = chat_tokenizer(copy.deepcopy(definition)), library(definition)
    rng = random.Random(5)
    for text in [*SAMPLES, *[random_text(rng, 30) for _ in range(1000)]]:
        ids = list(int32_ids(tokenizer.encode(text)))
        deltas = stream(tokenizer, ids, skip=False)
        assert "".join(deltas) == theirs.decode(ids, skip_special_tokens=False)
        assert any("\ufffd" in delta for delta in deltas) == ("\ufffd" in text)


def test_smollm2_streams_random_ids(smollm2_tokenizer: Tokenizer) -> None:
    """The same on the real vocabulary."""
    rng = random.Random(6)
    for _ in range(2000):
        ids = [rng.randrange(smollm2_tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))]
        assert "".join(stream(smollm2_tokenizer, ids)) == smollm2_tokenizer.decode(ids)


def test_an_emoji_in_four_tokens_is_one_delta(definition: dict[str, Any]) -> None:
    """F0 9F 98 8A, one byte per token, comes out once and whole."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    assert stream(tokenizer, byte_ids(tokenizer, b"\xf0\x9f\x98\x8a")) == ["", "", "", "😊", ""]


def test_incomplete_bytes_then_a_space(definition: dict[str, Any]) -> None:
    """An unfinished character followed by a token that starts with a space: one U+FFFD, then the space."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    first = list(int32_ids(tokenizer.encode("a")))
    ids = [*first, *byte_ids(tokenizer, b"\xf0\x9f"), *int32_ids(tokenizer.encode(" user", continues=True))]
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == "a\ufffd user"
    assert "".join(deltas[: len(first) + 2]) == "a"


MALFORMED = "C080 EDA080 F4908080 FF C3 F888808080 8061E282 E28262 E0809F F08F8080 EFBFBE C3A9C3"


@pytest.mark.parametrize("raw", [bytes.fromhex(form) for form in MALFORMED.split()])
def test_malformed_utf8_is_what_a_strict_decoder_gives(definition: dict[str, Any], raw: bytes) -> None:
    """Overlong, surrogate and out-of-range forms, and truncated ones, split over tokens."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    ids = byte_ids(tokenizer, b"x" + raw)
    assert "".join(stream(tokenizer, ids)) == "x" + raw.decode("utf-8", "replace")


def test_replacement_characters_appear_only_where_final(definition: dict[str, Any]) -> None:
    """A stream that ends inside a character says so at the end, not before."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    assert stream(tokenizer, byte_ids(tokenizer, b"ab\xe4\xbd")) == ["a", "b", "", "", "\ufffd"]


def test_special_tokens_are_hidden_or_shown_as_asked() -> None:
    """Hidden control tokens do not even complete a pending character; shown ones do."""
    tokenizer = chat_tokenizer(byte_level())
    (end,) = int32_ids(tokenizer.encode("<|im_end|>"))
    first, second = byte_ids(tokenizer, "é".encode())
    assert stream(tokenizer, [first, end, second]) == ["", "", "é", ""]
    assert stream(tokenizer, [first, end], skip=False) == ["", "\ufffd<|im_end|>", ""]


def test_leading_space_of_an_answer_and_of_a_continuation() -> None:
    """SentencePiece's space before a text is taken off once, unless the stream continues a text."""
    tokenizer = chat_tokenizer(sentencepiece())
    ids = list(int32_ids(tokenizer.encode("Hello world")))
    assert "".join(stream(tokenizer, ids)) == "Hello world"
    going_on = IncrementalDetokenizer(tokenizer, continues_text=True)
    assert "".join(going_on.push(index) for index in ids) == " Hello world"


@pytest.mark.parametrize("bad", [-1, 2**31 - 1])
def test_an_impossible_id_ends_only_its_own_stream(bad: int) -> None:
    """An id that the tokenizer lacks is a typed error; a second stream goes on undisturbed."""
    tokenizer = chat_tokenizer(byte_level())
    broken, healthy = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    ids = byte_ids(tokenizer, "é".encode())
    assert healthy.push(ids[0]) == ""
    with pytest.raises(GenerationFailedError, match=str(bad)):
        broken.push(bad)
    with pytest.raises(GenerationFailedError):
        IncrementalDetokenizer(tokenizer).push(tokenizer.vocab_size)
    assert healthy.push(ids[1]) == "é"
