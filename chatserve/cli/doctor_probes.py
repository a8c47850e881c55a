"""Ways to send a prompt to a running server, and how much of it each answer says was cached.

What `chatserve doctor` asks with; what the answers mean, `doctor` decides. Speaks HTTP through `AdminClient` and the
chat protocol over a WebSocket of its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chatserve.cli.admin_client import AdminClient
from chatserve.errors import ChatserveError, EngineUnavailableError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from websockets.sync.client import ClientConnection

Json = dict[str, Any]
Probe = Callable[[AdminClient, str, str], tuple[int, int]]
"""(client, text, name of the other tenant) to (tokens of the prompt, how many of them were cached)."""

SUBPROTOCOL = "chatserve.v1"
SOCKET_SECONDS = 120.0


def _chat(client: AdminClient, text: str, other: str, **fields: object) -> tuple[int, int]:
    body = {"messages": _messages(text), "max_tokens": 1, **_borrowed(other), **fields}
    return _counts(client.call("POST", "/v1/chat/completions", body)["usage"])


def _chat_streamed(client: AdminClient, text: str, other: str) -> tuple[int, int]:
    body = {"messages": _messages(text), "max_tokens": 1, **_STREAMED, **_borrowed(other)}
    return _counts(client.events("POST", "/v1/chat/completions", body)[-1]["usage"])


def _salted(client: AdminClient, text: str, other: str) -> tuple[int, int]:
    return _chat(client, text, other, cache_salt="doctor")


def _choices(client: AdminClient, text: str, other: str) -> tuple[int, int]:
    return _chat(client, text, other, n=3, temperature=1.0)


def _completion(client: AdminClient, text: str, other: str) -> tuple[int, int]:
    body = {"prompt": text, "max_tokens": 1, **_borrowed(other)}
    return _counts(client.call("POST", "/v1/completions", body)["usage"])


def _completion_streamed(client: AdminClient, text: str, other: str) -> tuple[int, int]:
    body = {"prompt": text, "max_tokens": 1, **_STREAMED, **_borrowed(other)}
    return _counts(client.events("POST", "/v1/completions", body)[-1]["usage"])


def _socket(client: AdminClient, text: str, other: str) -> tuple[int, int]:
    with open_socket(client) as socket:
        ack = send(socket, content=text, params={"max_tokens": 1})
        return _counts(_until(socket, "gen", ack["gens"][0]["gen"], "gen.done")["usage"])


def _explained(client: AdminClient, text: str, other: str) -> tuple[int, int]:
    """What `/v1/cache/explain` tells; an ordinary chat puts the text there first."""
    answer = client.call("POST", "/v1/cache/explain", {"messages": _messages(text)})
    found = sum(answer["cached_tokens"].values())
    _chat(client, text, other)
    return int(answer["prompt_tokens"]), int(found)


PROBES: dict[str, Probe] = {
    "chat": _chat,
    "chat, streamed": _chat_streamed,
    "chat with a salt": _salted,
    "chat, three choices": _choices,
    "completion": _completion,
    "completion, streamed": _completion_streamed,
    "chat over WebSocket": _socket,
    "explanation": _explained,
}


def may_continue(owner: AdminClient, other: AdminClient, text: str) -> bool:
    """Whether ``other`` gets into a conversation that ``owner`` has begun, knowing its ids."""
    with open_socket(owner) as mine, open_socket(other) as theirs:
        ack = send(mine, content=text, params={"max_tokens": 1})
        _until(mine, "gen", ack["gens"][0]["gen"], "gen.done")
        try:
            send(theirs, content="go on", conv=ack["conv"], parent=ack["gens"][0]["msg"], params={"max_tokens": 1})
        except NotFoundError:
            return False
        return True


@contextmanager
def open_socket(client: AdminClient) -> Iterator[ClientConnection]:
    """A greeted WebSocket with a client's key."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect
    from websockets.typing import Subprotocol

    url = client.url.replace("http", "ws", 1) + "/v1/ws"
    try:
        with connect(
            url, subprotocols=[Subprotocol(SUBPROTOCOL)], additional_headers=client.headers, compression=None
        ) as socket:
            _command(socket, "hello", client={"name": "chatserve doctor", "version": "1"})
            yield socket
    except (WebSocketException, OSError, TimeoutError) as error:
        raise EngineUnavailableError(f"The WebSocket at {url} does not work: {error}.") from None


def send(socket: ClientConnection, **fields: object) -> Json:
    """Send a message to a conversation; the server's ack.

    Raises:
        NotFoundError: there is no such conversation for this caller.
    """
    return _command(socket, "chat.send", **fields)


def _command(socket: ClientConnection, kind: str, **fields: object) -> Json:
    command_id = secrets.token_hex(8)
    socket.send(json.dumps({"type": kind, "id": command_id, **fields}))
    return _until(socket, "re", command_id)


def _until(socket: ClientConnection, field: str, value: str, kind: str | None = None) -> Json:
    """The first message that has ``value`` in ``field`` and is of that kind."""
    while True:
        message: Json = json.loads(socket.recv(SOCKET_SECONDS))
        error = message.get("error")
        if message.get(field) == value and error:
            wrong = NotFoundError if error["code"] == "not_found" else ChatserveError
            raise wrong(error["message"], code=error["code"])
        if message.get(field) == value and kind in (None, message["type"]):
            return message


def _messages(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def _borrowed(other: str) -> Json:
    """Everything by which a client might hope to be taken for the other tenant."""
    return {"user": other, "prompt_cache_key": other, "safety_identifier": other, "metadata": {"tenant": other}}


def _counts(usage: Json) -> tuple[int, int]:
    return int(usage["prompt_tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])


_STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}
