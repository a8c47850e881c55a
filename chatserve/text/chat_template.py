"""Messages to prompt tokens, through the model's own chat template.

Two promises beyond rendering. Text that a user types never becomes a control token: content is cut inside every
occurrence of a control token's text, and the pieces are encoded on their own. And where the exact ids behind an
earlier answer are known, they go into the prompt instead of that answer's text, so that a conversation's next
prompt begins with the tokens that are already cached. Used by `chatserve.server.generation_service`; knows no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2.exceptions
import msgspec

from chatserve.errors import InvalidRequestError, ModelLoadError
from chatserve.text.template_environment import TemplateRefusalError, compile_template
from chatserve.text.tokenizer import Tokenizer, read_json

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Private-use characters, from which a marker that occurs nowhere in a conversation is taken.
_MARKERS = range(0xE000, 0xF8FF)


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation.

    Attributes:
        token_ids: int32 ids behind an assistant message's content, without the end-of-turn token, when they are
            known exactly; the caller vouches that they decode to ``content``.
    """

    role: str
    content: str
    name: str | None = None
    token_ids: bytes | None = None


class RenderedPrompt(msgspec.Struct, frozen=True):
    """A prompt ready for the engine.

    Attributes:
        token_ids: little-endian int32.
        num_spliced: answers whose exact ids went into the prompt.
        num_unspliceable: answers whose ids were known but whose text the template drops or changes.
    """

    token_ids: bytes
    num_spliced: int
    num_unspliceable: int


class ChatTemplate:
    """The chat template of one model, together with its tokenizer."""

    def __init__(self, source: str | None, tokenizer: Tokenizer) -> None:
        """
        Args:
            source: Jinja source; ``None`` for a model without chat template, which then refuses every chat.

        Raises:
            ModelLoadError: the template is invalid or breaks out of the sandbox.
        """
        self._source = source or ""
        self._tokenizer = tokenizer
        self._template = None if source is None else compile_template(source)
        texts = tokenizer.special_texts
        self._ends_of_control_text = frozenset(text[cut:] for text in texts for cut in range(1, len(text)))
        self._starts_of_control_text = frozenset(text[:cut] for text in texts for cut in range(1, len(text)))
        self._longest_control_text = max(map(len, texts), default=0)
        if self._template is not None:
            try:
                self._template.render(self._variables([{"role": "user", "content": "Hello"}], True))
            except jinja2.exceptions.SecurityError as error:
                raise ModelLoadError(f"The model's chat template breaks out of its sandbox: {error}.") from error
            except Exception:
                # It may well refuse this conversation; then a request that it refuses as well will be told why.
                return

    @classmethod
    def from_folder(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Load from a prepared model folder: ``chat_template.jinja``, else from the older JSON files.

        Raises:
            ModelLoadError: the template is invalid or breaks out of the sandbox.
        """
        file = path / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), tokenizer)
        for name in ("tokenizer_config.json", "chat_template.json"):
            source = read_json(path / name).get("chat_template")
            if isinstance(source, list):
                named = {entry["name"]: entry["template"] for entry in source}
                source = named.get("default")
            if isinstance(source, str):
                return cls(source, tokenizer)
        return cls(None, tokenizer)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> RenderedPrompt:
        """The prompt for ``messages``.

        Raises:
            InvalidRequestError: the template refuses the messages (its own words, param ``messages``), a text is
                no valid Unicode, or the model has no chat template.
        """
        for index, message in enumerate(messages):
            _check_message(index, message)
        marker, sentinel = self._unused_characters(messages)
        marked = [
            msgspec.structs.replace(
                message,
                content=self._mark(message.content, marker),
                name=None if message.name is None else self._mark(message.name, marker),
            )
            for message in messages
        ]
        text = self._render(marked, add_generation_prompt)
        known = {i: message for i, message in enumerate(marked) if message.token_ids and message.role == "assistant"}
        if not known:
            return RenderedPrompt(self._encode(text, marker, continues=False), 0, 0)

        with_sentinels = [
            msgspec.structs.replace(message, content=f"{sentinel}{i}{sentinel}") if i in known else message
            for i, message in enumerate(marked)
        ]
        layout = self._render(with_sentinels, add_generation_prompt)
        contents = {i: message.content for i, message in known.items()}
        parts: list[bytes] = []
        done = 0
        spliced: set[int] = set()
        for index, start, end in _locate(text, layout, sentinel, contents):
            parts.append(self._encode(text[done:start], marker, continues=done > 0))
            parts.append(known[index].token_ids or b"")
            done = end
            spliced.add(index)
        parts.append(self._encode(text[done:], marker, continues=done > 0))
        return RenderedPrompt(b"".join(parts), len(spliced), len(known) - len(spliced))

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions, or serve a chat model.", param="messages"
            )
        given = []
        for message in messages:
            fields = {"role": message.role, "content": message.content}
            if message.name is not None:
                fields["name"] = message.name
            given.append(fields)
        try:
            return self._template.render(self._variables(given, add_generation_prompt))
        except TemplateRefusalError as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # a template is a program; whatever it runs into, these messages led it there
            raise InvalidRequestError(
                f"The model's chat template cannot render these messages ({type(error).__name__}); "
                "a conversation of alternating user and assistant messages always works.",
                param="messages",
            ) from error

    def _variables(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> dict[str, Any]:
        return {
            **self._tokenizer.named_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }

    def _unused_characters(self, messages: Sequence[ChatMessage]) -> tuple[str, str]:
        texts = [self._source, *self._tokenizer.special_texts]
        for message in messages:
            texts.append(message.content)
            texts.append(message.name or "")
        # Each text is looked at once, and most not even that: who asks about every marker in turn can be kept busy.
        used = set().union(*(text for text in texts if not text.isascii()))
        unused = (chr(code) for code in _MARKERS if chr(code) not in used)
        marker, sentinel = next(unused, None), next(unused, None)
        if marker is None or sentinel is None:
            raise InvalidRequestError("The messages use every private-use character; leave some out.", param="messages")
        return marker, sentinel

    def _mark(self, content: str, marker: str) -> str:
        """Put ``marker`` after the first character of every control token's text in ``content``, and at an edge of
        ``content`` where a control token's text might come about together with what the template puts next to it.
        """
        marked = marker.join(self._tokenizer.split_control_text(content))
        inside_control_text = 0 < len(content) < self._longest_control_text and any(
            content in text for text in self._tokenizer.special_texts
        )
        lengths = range(1, min(self._longest_control_text, len(content) + 1))
        if inside_control_text or any(content[:length] in self._ends_of_control_text for length in lengths):
            marked = marker + marked
        if inside_control_text or any(content[-length:] in self._starts_of_control_text for length in lengths):
            marked += marker
        return marked

    def _encode(self, text: str, marker: str, *, continues: bool) -> bytes:
        pieces = self._cut(text, marker)
        first = self._tokenizer.encode(pieces[0], continues=continues)
        return first + b"".join(self._tokenizer.encode(piece, continues=True) for piece in pieces[1:])

    def _cut(self, text: str, marker: str) -> list[str]:
        """Take the markers out, cutting at those that lie inside a control token's text; the others are harmless."""
        parts = text.split(marker)
        if len(parts) == 1:
            return parts
        plain = "".join(parts)
        occurrences = self._tokenizer.control_text(plain)
        upcoming = next(occurrences, None)
        pieces: list[str] = []
        cut, position, covered = 0, 0, 0
        for part in parts[:-1]:
            position += len(part)
            while upcoming is not None and upcoming[0] < position:
                covered = max(covered, upcoming[1])
                upcoming = next(occurrences, None)
            if covered > position:
                pieces.append(plain[cut:position])
                cut = position
        pieces.append(plain[cut:])
        return pieces


def _locate(text: str, layout: str, sentinel: str, contents: dict[int, str]) -> Iterator[tuple[int, int, int]]:
    """Find answers in a rendered text: ``(message index, start, end)``, in order.

    ``layout`` is the same rendering with a sentinel in place of each answer. Only an answer that stands in ``text``
    exactly as it is, between the same neighbours as its sentinel, is reported: a template may drop or change parts.
    """
    head, *rest = re.split(f"{sentinel}([0-9]+){sentinel}", layout)
    if not text.startswith(head):
        return
    position = len(head)
    for index, following in zip(map(int, rest[::2]), rest[1::2], strict=True):
        content = contents[index]
        if text.startswith(content + following, position):
            yield index, position, position + len(content)
            position += len(content) + len(following)
        else:
            found = text.find(following, position)
            if not following or found < 0:
                return
            position = found + len(following)


def _check_message(index: int, message: ChatMessage) -> None:
    if not _ROLE.fullmatch(message.role):
        raise InvalidRequestError(
            "A role is a word of letters, digits, _ and -, such as user.", param=f"messages[{index}].role"
        )
    for field, text in (("content", message.content), ("name", message.name or "")):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "The text holds a lone surrogate (half of a UTF-16 pair); send valid Unicode.",
                param=f"messages[{index}].{field}",
            ) from error
