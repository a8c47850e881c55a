"""Reading a request's JSON body under limits, before anything trusts it.

Size, time, media type, encoding and nesting are checked here; values are checked by the wire types. Knows JSON's
grammar just well enough to count brackets. Called by the route modules and (for nesting) by the WebSocket.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from chatserve.config import ServerConfig
from chatserve.errors import InvalidRequestError, RequestTooLargeError, UnsupportedMediaTypeError

T = TypeVar("T")

MAX_VALUES = 160_000
"""Values one body may hold: more than any prompt of token ids has, few enough to decode in some milliseconds."""

SLICE_MATCHES = 10_000
"""Brackets, commas and strings looked at before other tasks get a turn (about 2 ms)."""

_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{},]', re.DOTALL)
_PATH = re.compile(r"(.*?)(?: - at `\$?\.?([^`]*)`)?", re.DOTALL)
_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TYPE = re.compile(r"\b(?:str|int|float|bool)\b")
_QUOTED = re.compile(r"`([^`]*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")


class ClientGoneError(Exception):
    """The client went away; nobody is left to answer."""


async def read_json_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body of a request that says it is JSON.

    Raises:
        UnsupportedMediaTypeError: another media type, charset or content coding. Nothing was read.
        RequestTooLargeError: longer than ``max_body_bytes``. The rest was not read.
        InvalidRequestError: not UTF-8, nested deeper than ``max_nesting_depth``, or of too many values.
        ClientGoneError: it hung up before the end.
    """
    _check_media_type(request)
    limit = config.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            break
    whole = bytes(body)
    try:
        whole.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8 (byte {error.start}).") from None
    for _ in scan_structure(whole, config.max_nesting_depth):
        await asyncio.sleep(0)
    return whole


def scan_structure(body: bytes, max_depth: int, max_values: int = MAX_VALUES) -> Iterator[None]:
    """Raise `InvalidRequestError` where brackets nest too deep or values are too many, before a parser allocates.

    Yields between slices of work. A body with few brackets and commas, which is nearly every one, costs three byte
    counts.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth and body.count(b",") < max_values:
        return
    depth, values = 0, 1
    for position, match in enumerate(_STRUCTURE.finditer(body)):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise InvalidRequestError(f"The JSON is nested deeper than {max_depth} levels.")
        elif first in b"]}":
            depth -= 1
        elif first in b",":
            values += 1
            if values > max_values:
                raise InvalidRequestError(f"The JSON holds more than {max_values} values.")
        if position % SLICE_MATCHES == SLICE_MATCHES - 1:
            yield


def decode(body: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Strictly typed decoding; raises `InvalidRequestError` that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        rule, param = _explain(str(error))
        raise InvalidRequestError(f"{param}: {rule}." if param else f"{rule}.", param=param) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except (RecursionError, UnicodeError):
        raise InvalidRequestError("The body is not valid JSON.") from None


def json_words(rule: str) -> str:
    """What msgspec says of a value, with JSON's names of types instead of Python's."""
    return _QUOTED.sub(lambda quoted: _TYPE.sub(lambda name: _JSON_TYPES[name[0]], quoted[1]), rule)


def _explain(message: str) -> tuple[str, str | None]:
    """The rule a value broke, and the field's path, from msgspec's message."""
    match = _PATH.fullmatch(message)
    rule, path = match.groups("") if match is not None else (message, "")
    path = path.replace("[...]", "")
    if missing := _MISSING.fullmatch(rule):
        return "this field is required", f"{path}.{missing[1]}".removeprefix(".")
    return json_words(rule), path or None


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_media_type(request: Request) -> None:
    kind, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    charset = next((p.partition("=")[2].strip('"') for p in parameters if p.startswith("charset=")), "utf-8")
    if kind != "application/json" or charset not in ("utf-8", "utf8"):
        raise UnsupportedMediaTypeError("Send JSON in UTF-8, with the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaTypeError("Send the body without a Content-Encoding.")


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"The body is larger than the limit of {limit} bytes.")
