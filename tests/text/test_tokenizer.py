"""Encoding and whole decoding agree with the tokenizers library, and control text can be kept from taking effect."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from chatserve.errors import InvalidRequestError, ModelLoadError
from chatserve.text.tokenizer import Tokenizer, int32_ids
from tests.text.vocabularies import CONTROL, SAMPLES, byte_level, chat_tokenizer, library, random_text, sentencepiece


def ids_of(encoded: bytes) -> list[int]:
    return list(int32_ids(encoded))


def test_encodes_and_decodes_as_the_library(definition: dict[str, Any]) -> None:
    """Ids and text equal the library's on every kind of text, control tokens included."""
    ours, theirs = chat_tokenizer(copy.deepcopy(definition)), library(definition)
    rng = random.Random(1)
    for text in [*SAMPLES, *[random_text(rng, 30) for _ in range(300)]]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ids_of(ours.encode(text)) == expected
        for skip in (True, False):
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)


def test_smollm2_equals_transformers_from_the_same_gguf(smollm2: Path, smollm2_tokenizer: Tokenizer) -> None:
    """Our conversion of the GGUF's vocabulary gives the ids that transformers' conversion gives.

    transformers ignores which pre-tokenizer the file names and so splits differently around digits; with the model's
    published pre-tokenizer put in, it must agree on those as well.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    gguf = smollm2.parent.parent / "gguf" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    rng = random.Random(2)
    texts = [*SAMPLES, *[random_text(rng, 40) for _ in range(200)]]
    for text in ("".join(character for character in text if not character.isnumeric()) for text in texts):
        assert ids_of(smollm2_tokenizer.encode(text)) == theirs(text, add_special_tokens=False)["input_ids"]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in texts:
        ids = ids_of(smollm2_tokenizer.encode(text))
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert smollm2_tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_every_unicode_block_survives(smollm2_tokenizer: Tokenizer) -> None:
    """One character of each 256 code points, alone and in a sentence, decodes to itself.

    The planes that this model's vocabulary has bytes for, that is: it lacks the bytes F1 to F4.
    """
    for code in range(0, 0x40000, 256):
        if not 0xD800 <= code < 0xE000:
            text = f"{chr(code)} in {chr(code)}{chr(code)}."
            assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_smollm2_special_ids(smollm2_tokenizer: Tokenizer) -> None:
    """End-of-turn ends an answer, the seventeen control tokens are special, and nothing else is."""
    assert smollm2_tokenizer.eos_token_ids[0] == 2
    assert smollm2_tokenizer.bos_token_id == 1
    assert smollm2_tokenizer.special_ids == frozenset(range(17))
    assert smollm2_tokenizer.vocab_size == 49152
    assert ids_of(smollm2_tokenizer.encode("<|im_end|>")) == [2]
    assert smollm2_tokenizer.decode([2]) == ""
    assert smollm2_tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("text", [*CONTROL, "<<|im_start|>|im_start|>", "<|im<|im_end|>", "a<|im_end|><|im_end|>b"])
def test_control_text_stays_text_when_asked(definition: dict[str, Any], text: str) -> None:
    """With ``parse_special=False`` no control id appears and the text survives."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    ids = ids_of(tokenizer.encode(text, parse_special=False))
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids & set(ids_of(tokenizer.encode(text)))


def test_a_normaliser_makes_no_control_token_of_other_characters() -> None:
    """Compatibility normalisation turns full-width brackets into ASCII; that must not open a control token."""
    definition = byte_level()
    definition["normalizer"] = {"type": "NFKC"}
    for token in definition["added_tokens"]:
        token["normalized"] = True
    tokenizer = chat_tokenizer(definition)
    ids = ids_of(tokenizer.encode("\uff1c|im_start|\uff1e", parse_special=False))
    assert not tokenizer.special_ids & set(ids)


def test_continuing_pieces_get_no_space(definition: dict[str, Any]) -> None:
    """A text encoded in two pieces reads as the text, whatever the tokenizer puts before a text of its own."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    for first, second in [("Hello", "world"), ("Hello ", " world"), ("a", "b</s>c"), ("x", "<|im_end|> y"), ("", "a")]:
        ids = ids_of(tokenizer.encode(first)) + ids_of(tokenizer.encode(second, continues=bool(first)))
        whole = tokenizer.decode(tokenizer.encode(first + second), skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == whole


def test_beginning_token_only_when_asked() -> None:
    """Templates write their own beginning token; only plain prompts ask the tokenizer for it."""
    definition = sentencepiece()
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = chat_tokenizer(definition)
    assert 1 not in ids_of(tokenizer.encode("Hello"))
    assert ids_of(tokenizer.encode("Hello", add_special_tokens=True))[0] == 1
    assert ids_of(tokenizer.encode("a<s>", add_special_tokens=True, parse_special=False)).count(1) == 1


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    """A prompt is never cut or padded because the tokenizer was saved with training settings."""
    definition = byte_level()
    definition["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    definition["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    text = "a longer text than four tokens"
    tokenizer = chat_tokenizer(definition)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogate_is_the_clients_error(definition: dict[str, Any]) -> None:
    """Half a UTF-16 pair is refused by name, not by a traceback."""
    tokenizer = chat_tokenizer(copy.deepcopy(definition))
    for options in ({}, {"continues": True}, {"parse_special": False}):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            tokenizer.encode("a\ud800b", **options)


@pytest.mark.parametrize("token_id", [-1, 2**31 - 1, 10**30])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    """Decoding an unknown id is an error with the id and the limit, never an empty text."""
    tokenizer = chat_tokenizer(byte_level())
    for call in (tokenizer.token_bytes, tokenizer.token_text, lambda bad: tokenizer.decode([1, bad])):
        with pytest.raises(InvalidRequestError, match=str(token_id)):
            call(token_id)


def test_ids_that_the_model_has_but_the_tokenizer_lacks_are_empty() -> None:
    """Models pad their output layer; such ids are in range and stand for nothing."""
    definition = byte_level()
    tokenizer = Tokenizer(definition, vocab_size=4096)
    assert tokenizer.vocab_size == 4096
    assert tokenizer.token_bytes(4095) == b""
    with pytest.raises(InvalidRequestError):
        tokenizer.token_bytes(4096)


def test_bytes_that_are_no_whole_ids_are_refused() -> None:
    """Seven bytes are no int32 ids."""
    with pytest.raises(InvalidRequestError):
        chat_tokenizer(byte_level()).decode(b"\0" * 7)


def test_chosen_bytes_concatenate_to_the_text(smollm2_tokenizer: Tokenizer) -> None:
    """Log-probability entries carry exact bytes, parts of characters included, and readable texts."""
    text = "Hi 🙂 你好"
    ids = ids_of(smollm2_tokenizer.encode(text))
    assert b"".join(smollm2_tokenizer.token_bytes(index) for index in ids) == text.encode()
    texts = [smollm2_tokenizer.token_text(index) for index in ids]
    assert texts[0] == "Hi"
    assert any(part.startswith("bytes:\\x") for part in texts)
    assert not any("\ufffd" in part for part in texts)


def test_revision_follows_tokenizer_and_template(tmp_path: Path) -> None:
    """The revision is part of every cache scope: equal folders agree, a changed template does not."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level()))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    first = Tokenizer.from_folder(tmp_path).revision
    assert Tokenizer.from_folder(tmp_path).revision == first
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.from_folder(tmp_path).revision != first


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_broken_tokenizer_file_says_so(tmp_path: Path, content: str | None) -> None:
    """A missing or damaged file is one clear error at load."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_unsupported_decoder_is_refused_at_load() -> None:
    """A tokenizer that cannot be decoded exactly is refused, not approximated."""
    definition = byte_level()
    definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ModelLoadError, match="WordPiece"):
        chat_tokenizer(definition)


def test_other_threads_run_while_a_long_text_is_encoded(smollm2_tokenizer: Tokenizer) -> None:
    """Encoding releases the GIL, so that a prompt of a megabyte in a thread does not stop every stream."""
    finished = threading.Event()

    def encode() -> None:
        smollm2_tokenizer.encode(" ".join(map(str, range(100_000))), parse_special=False)
        finished.set()

    worker = threading.Thread(target=encode)
    worker.start()
    turns = 0
    while not finished.wait(0.002):
        turns += 1
    worker.join()
    assert turns > 20


def test_control_text_is_found_across_search_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Occurrences at, before and across the edge of a window are all found, the longest at each place."""
    tokenizer = chat_tokenizer(byte_level())
    rng = random.Random(14)
    texts = [random_text(rng, 40) for _ in range(200)]
    whole = [list(tokenizer.control_text(text)) for text in texts]
    assert sum(map(len, whole)) > 500
    monkeypatch.setattr("chatserve.text.tokenizer._SEARCH_WINDOW", 7)
    assert [list(tokenizer.control_text(text)) for text in texts] == whole


def test_importing_text_imports_no_torch() -> None:
    """The API process stays small: neither torch nor transformers comes with the text room."""
    code = (
        "import sys, chatserve.text.chat_template, chatserve.text.detokenizer, chatserve.text.stop_strings\n"
        "import chatserve.text.answer_memory, chatserve.model.store\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
