"""Text to token ids and back, for one model folder.

Wraps the tokenizers library for encoding and `token_bytes` for decoding, and knows which ids are special, which end
an answer, and how to keep control tokens' text from becoming control tokens. Does not know messages
(`chat_template`) or streams (`detokenizer`). Encoding releases the GIL; a long text belongs in a thread.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from chatserve.errors import InvalidRequestError, ModelLoadError
from chatserve.text.token_bytes import token_bytes_rule

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SEARCH_WINDOW = 64 * 1024


class Tokenizer:
    """A model's vocabulary.

    Attributes:
        vocab_size: ids lie in ``[0, vocab_size)``; never less than the model's own output size.
        special_ids: control tokens, hidden when decoding unless asked for.
        special_texts: their texts, longest first.
        eos_token_ids: ids that end an answer.
        bos_token_id: the id that begins a text, if the model has one.
        named_tokens: ``bos_token``, ``eos_token`` … as texts, for chat templates.
        revision: hash of the tokenizer and the chat template.
        leading_spaces: spaces that decoding takes off the start of a text.
        whole_texts: by id, the text of a token that consists of whole characters, and ``None`` for one that has a
            part of one; raises `InvalidRequestError` like `token_bytes`.
    """

    def __init__(
        self,
        definition: dict[str, Any],
        *,
        named_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int = 0,
        revision: str = "",
    ) -> None:
        """
        Args:
            definition: the content of a ``tokenizer.json``.
            eos_token_ids: from the generation configuration; the tokenizer's own ``eos_token`` is added.
            vocab_size: the model's output size, which may exceed the vocabulary.
        """
        for token in definition.get("added_tokens") or []:
            if token["special"]:
                # Looked for in the raw text only: a normaliser must not make a control token out of other characters.
                token["normalized"] = False
        self._encoder = _load(definition)
        self._continuing = self._encoder
        if _drop_prefix_space(definition):
            self._continuing = _load(definition)
        added = self._encoder.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        texts = {token.content for token in added.values() if token.special and token.content}
        self.special_texts = tuple(sorted(texts, key=lambda text: (-len(text), text)))
        self._special_pattern = re.compile("|".join(map(re.escape, self.special_texts))) if texts else None
        vocabulary = self._encoder.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab_size, max(vocabulary.values(), default=-1) + 1)
        self.named_tokens = dict(named_tokens or {})
        bos, eos = (self.named_tokens.get(name) for name in ("bos_token", "eos_token"))
        self.bos_token_id = None if bos is None else self._encoder.token_to_id(bos)
        ends = [*eos_token_ids, *([] if eos is None else [self._encoder.token_to_id(eos)])]
        self.eos_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        self.revision = revision
        rule = token_bytes_rule(definition.get("decoder"))
        self._bytes_of, self.leading_spaces = rule.of, rule.leading_spaces
        self._token_bytes: list[bytes | None] = [None] * self.vocab_size
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(self.token_bytes)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Load from a prepared model folder.

        Raises:
            ModelLoadError: ``tokenizer.json`` is missing, broken, or of an unsupported kind.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelLoadError(f"{path} has no tokenizer.json; resolve the model through `chatserve.model.store`.")
        digest = hashlib.sha256()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"):
            digest.update(name.encode())
            if (path / name).is_file():
                digest.update((path / name).read_bytes())
        try:
            sections = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
            # The vocabulary, nearly all of the file, is only passed on to the library: left unparsed here.
            definition = {
                name: section if name == "model" else msgspec.json.decode(section) for name, section in sections.items()
            }
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"{file} cannot be read ({error}); fetch the model again.") from error
        config = read_json(path / "config.json")
        generation = read_json(path / "generation_config.json")
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            definition,
            named_tokens=_named_tokens(path),
            eos_token_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
            vocab_size=int(config.get("vocab_size") or 0),
            revision=digest.hexdigest()[:16],
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True, continues: bool = False
    ) -> bytes:
        """Token ids of ``text`` as little-endian int32.

        Args:
            add_special_tokens: also what the tokenizer puts around every text, such as a beginning token.
            parse_special: control tokens' text becomes control tokens; otherwise it stays ordinary text.
            continues: the text follows other tokens, so that no space is put before it.

        Raises:
            InvalidRequestError: the text holds a lone surrogate, which is no Unicode text.
        """
        if not parse_special:
            pieces = self.split_control_text(text)
            first = self.encode(pieces[0], add_special_tokens=add_special_tokens, continues=continues)
            return first + b"".join(self.encode(piece, continues=True) for piece in pieces[1:])
        try:
            if continues and self._continuing is not self._encoder:
                # A space goes before what follows a control token, but not before a piece that continues a text.
                cut, _ = next(self.control_text(text), (len(text), 0))
                ids = _encode(self._continuing, text[:cut], add_special_tokens=False)
                if cut < len(text):
                    ids += _encode(self._encoder, text[cut:], add_special_tokens=False)
            else:
                ids = _encode(self._encoder, text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(
                "The text holds a lone surrogate (half of a UTF-16 pair); send valid Unicode."
            ) from error
        return array("i", ids).tobytes()

    def decode(self, ids: bytes | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` (little-endian int32, or integers); bytes that are no UTF-8 become U+FFFD.

        Raises:
            InvalidRequestError: an id outside ``[0, vocab_size)``.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(index) for index in int32_ids(ids) if index not in hidden])
        for _ in range(self.leading_spaces):
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text: UTF-8, or a part of it; empty for an id that stands for nothing.

        Raises:
            InvalidRequestError: an id outside ``[0, vocab_size)``.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"Token id {token_id} is outside the vocabulary [0, {self.vocab_size}).")
        known = self._token_bytes[token_id]
        if known is None:
            text = self._encoder.id_to_token(token_id)
            known = self._token_bytes[token_id] = b"" if text is None else self._bytes_of(text)
        return known

    def token_text(self, token_id: int) -> str:
        """A token on its own, readable: its text, or ``bytes:\\xf0\\x9f`` where it is a part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def control_text(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of every control token's text inside ``text``, overlapping ones too, in order of start."""
        if self._special_pattern is None:
            return
        position = 0
        while position < len(text):
            # By windows: one search holds the GIL to its end, and there are texts on which that takes seconds.
            limit = position + _SEARCH_WINDOW
            match = self._special_pattern.search(text, position, limit + len(self.special_texts[0]) - 1)
            if match is None or match.start() >= limit:
                position = limit
            else:
                yield match.start(), match.end()
                position = match.start() + 1

    def split_control_text(self, text: str) -> list[str]:
        """``text`` cut inside every control token's text, so that no piece contains one.

        A control token of a single character cannot be cut; no model family served here has one.
        """
        cuts = [start + 1 for start, _ in self.control_text(text)]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class _WholeTexts(dict[int, str | None]):
    """Filled as tokens are met, so that a known one costs a look-up."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def int32_ids(ids: bytes | Sequence[int]) -> Sequence[int]:
    """Ids as integers, from little-endian int32 bytes or unchanged.

    Raises:
        InvalidRequestError: the number of bytes is no multiple of four.
    """
    if not isinstance(ids, bytes | bytearray | memoryview):
        return ids
    if len(ids) % 4:
        raise InvalidRequestError("Token ids must be whole int32 numbers of four bytes each.")
    numbers = array("i")
    numbers.frombytes(ids)
    return numbers


def read_json(file: Path) -> dict[str, Any]:
    """The object in an optional JSON file of a model folder; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file} cannot be read ({error}); fetch the model again.") from error


def _encode(encoder: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # A batch of one: of the library's calls only those for batches release the GIL, and the fast one tracks no offsets.
    ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _named_tokens(path: Path) -> dict[str, str]:
    config = read_json(path / "special_tokens_map.json") | read_json(path / "tokenizer_config.json")
    named = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named


def _load(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        encoder = tokenizers.Tokenizer.from_str(msgspec.json.encode(definition).decode())
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"tokenizer.json cannot be used ({error}); fetch the model again.") from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _drop_prefix_space(definition: dict[str, Any]) -> bool:
    """Remove every rule that puts a space before a text; whether there was one."""
    changed = False
    for section in ("normalizer", "pre_tokenizer"):
        for step in _nested(definition.get(section)):
            if step["type"] == "Prepend" and step["prepend"]:
                # An empty sequence is the identity.
                step.clear()
                step.update({"type": "Sequence", "normalizers": []})
                changed = True
            elif step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                step["prepend_scheme"] = "never"
                changed = True
            elif step["type"] == "ByteLevel" and step["add_prefix_space"]:
                step["add_prefix_space"] = False
                changed = True
    return changed


def _nested(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in (step.get("normalizers") or []) + (step.get("pretokenizers") or []):
            yield from _nested(inner)
    else:
        yield step
