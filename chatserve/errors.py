"""The one exception tree of chatserve.

Knows error codes (one registry for REST, SSE and WebSocket) and the request field at fault.
Does not know HTTP statuses or wire bodies: `chatserve.server.errors` maps these classes at the edge.
Every message tells the reader what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class ChatserveError(Exception):
    """Base of every error that a user of chatserve can be shown.

    Attributes:
        message: what went wrong and what to do, for the client to read.
        code: machine-readable word from the registry, e.g. ``context_length_exceeded``.
        param: the request field at fault as a JSON path (``messages[0].content``), if there is one.
        retry_after: seconds after which a retry may succeed, if a retry can.
    """

    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after = retry_after


class InvalidRequestError(ChatserveError):
    """The request itself is wrong; sending it again unchanged cannot succeed."""

    default_code = "invalid_value"


class UnsupportedParameterError(InvalidRequestError):
    """A known field that this version does not implement: refused by name, never dropped."""

    default_code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output exceed what the model or the KV pool can ever hold."""

    default_code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    """The body is over the limit and was not read to its end."""

    default_code = "request_too_large"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The body is not JSON."""

    default_code = "unsupported_media_type"


class RequestTimeoutError(InvalidRequestError):
    """The client did not deliver its request before the deadline."""

    default_code = "request_timeout"


class AuthenticationError(ChatserveError):
    """No key, or one that is not known here."""

    default_code = "invalid_api_key"


class PermissionDeniedError(ChatserveError):
    """Known caller or page, but not allowed: a foreign Host or Origin, for example."""

    default_code = "origin_not_allowed"


class NotFoundError(ChatserveError):
    """No such route, model, conversation or message."""

    default_code = "not_found"


class ConflictError(ChatserveError):
    """The request does not fit the state it meets."""

    default_code = "conversation_conflict"


class QueueFullError(ChatserveError):
    """The waiting queue is at its limit; nothing was enqueued."""

    default_code = "queue_full"


class RateLimitError(ChatserveError):
    """A limit of the caller's tenant is reached; nothing was enqueued.

    Without ``retry_after`` waiting a little cannot help: the request is too large, or the day's quota is used up.
    """

    default_code = "rate_limit_exceeded"


class EngineUnavailableError(ChatserveError):
    """The engine is loading, restarting or dead."""

    default_code = "engine_unavailable"


class DrainingError(ChatserveError):
    """The server is shutting down and takes no new work."""

    default_code = "draining"


class GenerationFailedError(ChatserveError):
    """An accepted request could not be finished: a numerical fault, or the engine died."""

    default_code = "internal_error"


class ConfigError(ChatserveError):
    """A setting, flag or file that the program cannot start with."""

    default_code = "invalid_config"


class ModelLoadError(ChatserveError):
    """A model that cannot be found, fetched, verified or understood."""

    default_code = "model_not_loadable"
