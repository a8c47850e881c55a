"""The messages of the WebSocket subprotocol ``chatserve.v1``, as types, and how to read one.

Knows the wire: names, limits, close codes. Does not know sockets, conversations or the engine. `ws_connection`
decodes with it, everything that is sent is a struct from here. The protocol is additive: unknown fields are ignored;
an unknown client type is a non-fatal error.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chatserve.errors import ChatserveError, InvalidRequestError
from chatserve.server.body import json_words
from chatserve.server.errors import error_info

SUBPROTOCOL = "chatserve.v1"
MAX_FRAME_BYTES = 256 * 1024
MAX_MALFORMED = 3

CommandId = Annotated[str, Meta(min_length=1, max_length=64)]
ObjectId = Annotated[str, Meta(min_length=1, max_length=64)]


class Close(enum.IntEnum):
    """Close codes; the 44xx ones mirror HTTP statuses."""

    UNSUPPORTED_DATA = 1003
    TOO_BIG = 1009
    MALFORMED = 4400
    NOT_AUTHENTICATED = 4401
    HELLO_TIMEOUT = 4408
    SLOW_CONSUMER = 4410
    TOO_MANY = 4429


# ---------------------------------------------------------------------------------------------- client → server


class Envelope(msgspec.Struct):
    """What every client message has; enough to answer one whose body is wrong or whose type is unknown."""

    type: str
    id: CommandId | UnsetType = UNSET


class ClientInfo(msgspec.Struct):
    """Who is talking, for the log."""

    name: Annotated[str, Meta(max_length=64)] = ""
    version: Annotated[str, Meta(max_length=64)] = ""


class Hello(msgspec.Struct):
    """First message. ``resume`` is answered by `Welcome.active`: what is not in there is gone."""

    id: CommandId | UnsetType = UNSET
    ticket: str | None = None
    client: ClientInfo = msgspec.field(default_factory=ClientInfo)


class ChatSend(msgspec.Struct):
    """A user message, and the answers asked for.

    Attributes:
        conv: conversation; absent starts a new one.
        parent: message to continue from; ``null`` starts at the root; absent continues from the latest message.
        system: system prompt; only where the message starts at the root.
        params: fields of a chat completion (see `ws_params`).
        edit_of, watch: known to the protocol, refused by this version.
    """

    id: CommandId
    content: str | UnsetType = UNSET
    conv: ObjectId | None = None
    parent: ObjectId | UnsetType | None = UNSET
    system: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"{}")
    edit_of: str | None = None
    watch: bool = True


class GenCancel(msgspec.Struct):
    """Stop an answer; what was delivered stays. Idempotent."""

    id: CommandId
    gen: ObjectId


class Ping(msgspec.Struct):
    """Liveness, for clients that cannot send protocol pings."""

    id: CommandId | UnsetType = UNSET
    t: float | UnsetType = UNSET


Command = Hello | ChatSend | GenCancel | Ping

_COMMANDS: dict[str, msgspec.json.Decoder[Command]] = {
    "hello": msgspec.json.Decoder(Hello),
    "chat.send": msgspec.json.Decoder(ChatSend),
    "gen.cancel": msgspec.json.Decoder(GenCancel),
    "ping": msgspec.json.Decoder(Ping),
}
_LATER = frozenset({"chat.regenerate", "chat.continue", "gen.attach", "gen.detach", "sub", "unsub"})
_ENVELOPE = msgspec.json.Decoder(Envelope)


class MalformedFrameError(InvalidRequestError):
    """Not a message of this protocol at all: it cannot be answered by id."""

    default_code = "malformed_frame"


def decode_envelope(text: str, max_depth: int) -> Envelope:
    """Type and id of a frame.

    Raises:
        MalformedFrameError: not a JSON object with a string ``type`` and a fitting ``id``, or nested too deeply.
    """
    if _too_deep(text, max_depth):
        raise MalformedFrameError(f"The frame is nested deeper than {max_depth} levels; send it flatter.")
    try:
        return _ENVELOPE.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise MalformedFrameError(f"The frame is not a message of {SUBPROTOCOL}: {json_words(str(error))}") from None


def decode_command(envelope: Envelope, text: str) -> Command:
    """The whole message behind ``envelope``.

    Raises:
        InvalidRequestError: unknown type, or a field of the wrong type or size (``param`` names it).
    """
    decoder = _COMMANDS.get(envelope.type)
    if decoder is None:
        if envelope.type in _LATER:
            raise InvalidRequestError(
                f"{envelope.type} is not available in this version of the server; see `features` in welcome.",
                code="unsupported",
                param="type",
            )
        raise InvalidRequestError("Unknown message type; check `type`.", code="unknown_type", param="type")
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        what, _, where = str(error).partition(" - at `$.")
        raise InvalidRequestError(f"{json_words(what)}.", param=where.rstrip("`") or None) from None


def _too_deep(text: str, max_depth: int) -> bool:
    """Whether brackets outside strings nest deeper than ``max_depth``, without recursion."""
    if text.count("[") + text.count("{") <= max_depth:
        return False
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > max_depth:
            return True
    return False


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


# ---------------------------------------------------------------------------------------------- server → client


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """The error object of REST and SSE, and when to retry."""

    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None


class ServerInfo(msgspec.Struct):
    """``boot`` changes with every start of the API process: conversations in memory are gone then."""

    id: str
    version: str
    boot: str
    model: str


class Limits(msgspec.Struct):
    """``max_context``: tokens of prompt and answer, null while the model loads; ``max_frame``: bytes per frame."""

    max_context: int | None
    max_frame: int
    commands_per_s: int


class ActiveGeneration(msgspec.Struct):
    """An answer that is being written right now. ``end`` in code points."""

    gen: str
    conv: str
    msg: str
    end: int
    state: str


class Welcome(msgspec.Struct, tag="welcome", omit_defaults=True):
    """Answer to `Hello`. ``grace_ms`` is how long an answer survives without a socket: not at all, for now."""

    conn: str
    server: ServerInfo
    tenant: str
    limits: Limits
    heartbeat_ms: int
    grace_ms: int
    features: list[str]
    active: list[ActiveGeneration]
    re: str | UnsetType = UNSET


class GenerationRef(msgspec.Struct):
    """One answer asked for, and the message it is going to be."""

    gen: str
    msg: str


class SendAck(msgspec.Struct, tag="ack"):
    """A `ChatSend` was accepted."""

    re: str
    conv: str
    user_msg: str
    gens: list[GenerationRef]


class Ack(msgspec.Struct, tag="ack"):
    """A command was accepted."""

    re: str


class Error(msgspec.Struct, tag="error"):
    """A command, or a frame (then without ``re``), was refused. Nothing was changed by it."""

    error: ErrorBody
    re: str | UnsetType = UNSET


class Pong(msgspec.Struct, tag="pong"):
    """``now``: Unix time in milliseconds."""

    now: int
    t: float | UnsetType = UNSET
    re: str | UnsetType = UNSET


class Queued(msgspec.Struct, tag="gen.queued"):
    """Waiting for the engine; ``pos`` 1 is next."""

    gen: str
    pos: int
    why: str = "busy"


class Started(msgspec.Struct, tag="gen.started"):
    """The engine has begun. ``cached_tokens`` of the prompt were not computed again."""

    gen: str
    prompt_tokens: int
    cached_tokens: int
    queue_ms: int
    kv_blocks: int


class Delta(msgspec.Struct, tag="gen.delta"):
    """Text ``off``..``end``, in Unicode code points of the answer. ``n`` tokens; ``seq`` grows, with gaps."""

    gen: str
    seq: int
    off: int
    end: int
    text: str
    n: int


class CachedTokens(msgspec.Struct):
    """OpenAI's place for the number of reused prompt tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one answer, in OpenAI's words."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(msgspec.Struct, omit_defaults=True):
    """Milliseconds; ``tok_s`` tokens per second after the first. ``None`` where there was nothing to measure."""

    total: int
    queue: int | None = None
    prefill: int | None = None
    ttft: int | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    tok_s: float | None = None


class Done(msgspec.Struct, tag="gen.done"):
    """The end of an answer. ``reason``: stop, length, cancelled."""

    gen: str
    end: int
    reason: str
    usage: Usage
    timings: Timings
    text_sha256: str


class Failed(msgspec.Struct, tag="gen.failed"):
    """The other end of an answer; the text up to ``end`` stays."""

    gen: str
    end: int
    error: ErrorBody


class Draining(msgspec.Struct, tag="server.draining"):
    """The server is going down: answers may run until ``deadline_ms`` from now."""

    deadline_ms: int
    reconnect_after_ms: int


ServerMessage = Welcome | SendAck | Ack | Error | Pong | Queued | Started | Delta | Done | Failed | Draining

_ENCODER = msgspec.json.Encoder()


def encode(message: ServerMessage) -> str:
    """The text frame of a server message."""
    return _ENCODER.encode(message).decode()


def encode_bytes(message: ServerMessage) -> bytes:
    """The same in UTF-8."""
    return _ENCODER.encode(message)


def error_body(error: ChatserveError) -> ErrorBody:
    """The wire form of an error."""
    info = error_info(error)
    retry_after_ms = None if error.retry_after is None else int(error.retry_after * 1000)
    return ErrorBody(info.type, info.code, info.message, info.param, retry_after_ms)
