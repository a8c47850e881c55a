"""Token ids of one stream to text, as they come.

A text is the concatenation of its tokens' bytes (`token_bytes`), so an incremental UTF-8 decoder is all it takes:
no character is ever split, and the parts concatenated equal the whole decoded at once. Between two characters a token
of whole characters costs a look-up. Used per choice by the server; does not know stop strings.
"""

from __future__ import annotations

import codecs

from chatserve.errors import GenerationFailedError, InvalidRequestError
from chatserve.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Decodes one stream of ids. Invalid bytes become U+FFFD once they can no longer become anything else."""

    __slots__ = ("_between_characters", "_decoder", "_hidden", "_leading_spaces", "_token_bytes", "_whole_texts")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False) -> None:
        """
        Args:
            continues_text: the stream goes on from a text (a completion, not a chat answer), so a space at its start
                is a real one.
        """
        self._token_bytes = tokenizer.token_bytes
        self._whole_texts = tokenizer.whole_texts
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = _new_utf8_decoder("replace")
        self._leading_spaces = 0 if continues_text else tokenizer.leading_spaces
        self._between_characters = not self._leading_spaces

    def push(self, token_id: int) -> str:
        """The text that is complete now and was not before; may be empty.

        Raises:
            GenerationFailedError: an id outside the vocabulary. Other streams are not affected.
        """
        if token_id in self._hidden:
            return ""
        try:
            if self._between_characters and (text := self._whole_texts[token_id]) is not None:
                return text
            raw = self._token_bytes(token_id)
        except InvalidRequestError as error:
            raise GenerationFailedError(
                f"The model produced token id {token_id}, which its tokenizer does not have; "
                "check that weights and tokenizer belong together."
            ) from error
        while self._leading_spaces and raw:
            stripped = raw.removeprefix(b" ")
            self._leading_spaces = self._leading_spaces - 1 if stripped != raw else 0
            raw = stripped
        text = self._decoder.decode(raw)
        self._between_characters = not (self._leading_spaces or self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", final=True)
