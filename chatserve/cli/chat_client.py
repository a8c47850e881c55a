"""A small client for any OpenAI-compatible server: list models, stream a chat completion.

Standard library only, one connection per request, so that closing it is what stops an answer. Knows HTTP and
server-sent events; knows no terminal. `chatserve.cli.chat` is its caller.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from chatserve.errors import ChatserveError, ConfigError

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0
MAX_LINE = 4 * 2**20


class RemoteError(ChatserveError):
    """The server could not be reached, refused, or broke off."""

    default_code = "remote_error"


@dataclass
class AnswerStats:
    """What one streamed answer cost; seconds are measured here, tokens are the server's count.

    Attributes:
        ttft: seconds to the first text.
        tokens_per_second: after the first token, over all of them.
    """

    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int | None = None
    finish_reason: str | None = None
    ttft: float | None = None
    last: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """``None`` where there is nothing to divide."""
        if self.completion_tokens is None or self.ttft is None or self.last is None or self.last <= self.ttft:
            return None
        return (self.completion_tokens - 1) / (self.last - self.ttft)

    def line(self) -> str:
        """``prompt 512 tok (480 from cache) · TTFT 0.4 s · 31 tok/s``, as far as it is known."""
        parts = []
        if self.prompt_tokens is not None:
            cached = f" ({self.cached_tokens:,} from cache)" if self.cached_tokens else ""
            parts.append(f"prompt {self.prompt_tokens:,} tok{cached}")
        if self.ttft is not None:
            parts.append(f"TTFT {self.ttft:.2f} s")
        if (rate := self.tokens_per_second) is not None:
            parts.append(f"{rate:.1f} tok/s")
        if self.completion_tokens is not None:
            parts.append(f"{self.completion_tokens:,} tok")
        if self.finish_reason == "length":
            parts.append("cut at the length limit")
        return " · ".join(parts)


class ChatClient:
    """One server.

    Args:
        url: ``http://host:port``, with or without a path that ends in ``/v1``.
        api_key: sent as a bearer token, where there is one.

    Raises:
        ConfigError: not an http or https address.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"{url!r} is not the address of a server; it looks like http://127.0.0.1:8000.")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The first model the server lists."""
        with closing(self._connect()) as connection:
            body = self._json(self._request(connection, "GET", "/models", None))
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RemoteError(f"{self.url} lists no models; name one with --model.") from None

    def stream(
        self, model: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, object], stats: AnswerStats
    ) -> Generator[str, None, None]:
        """Yield the answer's text as it comes and fill ``stats``. Closing the generator stops the answer.

        Raises:
            RemoteError: with the server's own words where it has any.
        """
        request = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        began = time.monotonic()
        # Either of the two may be the last holder of the socket, and only a closed socket stops the answer.
        with (
            closing(self._connect()) as connection,
            self._request(connection, "POST", "/chat/completions", request) as response,
        ):
            for chunk in _events(response):
                if "error" in chunk:
                    raise RemoteError(_message(chunk) or "The server reported an error and no reason.")
                _note_usage(chunk.get("usage"), stats)
                for choice in chunk.get("choices") or []:
                    stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
                    text = (choice.get("delta") or {}).get("content")
                    if text:
                        stats.last = time.monotonic() - began
                        stats.ttft = stats.ttft if stats.ttft is not None else stats.last
                        yield text

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=CONNECT_SECONDS)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object
    ) -> http.client.HTTPResponse:
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.connect()
            if isinstance(connection.sock, socket.socket):
                connection.sock.settimeout(READ_SECONDS)
            connection.request(method, self._base + path, payload, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RemoteError(
                f"No server answers at {self.url} ({_reason(error)}). Start one with `chatserve serve smollm2-135m`, "
                "or give the address of another with --url."
            ) from None
        if response.status != 200:
            raise self._refusal(response)
        return response

    def _refusal(self, response: http.client.HTTPResponse) -> RemoteError:
        try:
            message = _message(self._json(response))
        except RemoteError:
            message = None
        if response.status == 401:
            return RemoteError(f"{message or 'The server wants a key.'} Give it with --api-key or CHATSERVE_API_KEY.")
        return RemoteError(message or f"{self.url} answered {response.status} {response.reason}.")

    def _json(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            body = json.loads(response.read(MAX_LINE))
        except (OSError, ValueError, http.client.HTTPException):
            body = None
        if not isinstance(body, dict):
            raise RemoteError(f"What answers at {self.url} does not speak OpenAI's API; check --url.")
        return body


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream, up to ``[DONE]``."""
    data: list[str] = []
    try:
        while line := response.readline(MAX_LINE):
            field, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif not field and not value and data:
                text, data = "\n".join(data), []
                if text.startswith("[DONE]"):
                    return
                event = json.loads(text)
                if isinstance(event, dict):
                    yield event
                    if "error" in event:
                        return
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RemoteError(f"The connection broke off in the middle of the answer ({_reason(error)}).") from None
    raise RemoteError("The server ended the answer before it was complete; try again.")


def _note_usage(usage: dict[str, Any] | None, stats: AnswerStats) -> None:
    if usage:
        stats.prompt_tokens = usage.get("prompt_tokens")
        stats.completion_tokens = usage.get("completion_tokens")
        stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _message(body: dict[str, Any]) -> str | None:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
