"""The edge's half of the error tree: HTTP statuses and OpenAI's error body.

Knows statuses, the body ``{"error": {message, type, param, code}}`` and the headers that go with a refusal.
Does not know routes. The middleware, the SSE stream and the WebSocket turn exceptions into words here.
"""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from chatserve.errors import (
    AuthenticationError,
    ChatserveError,
    ConflictError,
    DrainingError,
    EngineUnavailableError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnsupportedMediaTypeError,
)

STATUS: dict[type[ChatserveError], int] = {
    InvalidRequestError: 400,
    AuthenticationError: 401,
    PermissionDeniedError: 403,
    NotFoundError: 404,
    RequestTimeoutError: 408,
    ConflictError: 409,
    RequestTooLargeError: 413,
    UnsupportedMediaTypeError: 415,
    QueueFullError: 429,
    RateLimitError: 429,
    ChatserveError: 500,
    EngineUnavailableError: 503,
    DrainingError: 503,
}
"""The nearest class in an error's ancestry decides."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """What a client is told, on every transport."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's envelope."""

    error: ErrorInfo


def status_of(error: ChatserveError) -> int:
    """HTTP status of an error."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def error_info(error: ChatserveError) -> ErrorInfo:
    """The words a client gets, with OpenAI's ``type``."""
    status = status_of(error)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return ErrorInfo(error.message, kind, error.param, error.code)


def internal_error() -> ChatserveError:
    """What a client is told of a fault of ours: nothing of its inside."""
    return ChatserveError("Something went wrong inside the server. The request id is in the server's log.")


def encode_error(error: ChatserveError) -> bytes:
    """The JSON body of an error."""
    return msgspec.json.encode(ErrorBody(error_info(error)))


def error_response(error: ChatserveError) -> Response:
    """A complete HTTP answer."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after * 1000))
    elif status == 429:
        headers["x-should-retry"] = "false"  # waiting a little cannot help
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, DrainingError):
        headers["connection"] = "close"
    return Response(encode_error(error), status, headers, media_type="application/json")
