"""One accepted WebSocket, from hello to close.

Reads commands in order and answers each exactly once; watches the answers it asked for; closes with the protocol's
codes. Knows the protocol's rules and limits; knows no authentication (it is given a principal) and no generation
details (`ws_hub` acts). `websocket` runs one per socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from msgspec import UNSET
from starlette.websockets import WebSocket, WebSocketDisconnect

import chatserve
from chatserve.errors import ChatserveError, InvalidRequestError
from chatserve.server import ws_protocol as wire
from chatserve.server.errors import internal_error
from chatserve.server.ws_generation import LiveGeneration
from chatserve.server.ws_protocol import Close
from chatserve.server.ws_transport import text_frames
from chatserve.server.ws_writer import MAX_PENDING_BYTES, SlowConsumerError, Writer
from chatserve.sessions.conversation import new_id
from chatserve.tenancy.directory import key_revoked

if TYPE_CHECKING:
    from chatserve.server.auth import Principal
    from chatserve.server.context import ServerContext
    from chatserve.server.ws_hub import ChatHub

RECONNECT_AFTER_MS = 2000
CLOSE_SECONDS = 2.0
"""How long a close waits for what was said before it to be written."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Patience and generosity towards one socket."""

    hello_seconds: float = 10.0
    commands_per_second: int = 20
    command_burst: int = 60
    max_pending_bytes: int = MAX_PENDING_BYTES
    heartbeat_ms: int = 25_000


class _Closing(Exception):  # noqa: N818 - not an error: how the reader says goodbye
    def __init__(self, code: Close, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Connection:
    """The server's half of one socket.

    Attributes:
        id: names it in the log and in `Welcome`.
        principal: whose it is.
        num_commands: frames it sent.

    Args:
        fail: closes the socket at once, whatever is still unwritten (the peer may not be reading).
    """

    def __init__(
        self,
        websocket: WebSocket,
        context: ServerContext,
        hub: ChatHub,
        principal: Principal,
        limits: ConnectionLimits,
        fail: Callable[[int, str], None],
    ) -> None:
        self.id = new_id("w")
        self.num_commands = 0
        self._websocket = websocket
        self._context = context
        self._hub = hub
        self.principal = principal
        self._limits = limits
        self._fail = fail
        self._writer = Writer(
            websocket.send_text,
            send_timeout=context.config.server.send_timeout,
            max_pending_bytes=limits.max_pending_bytes,
            frames=text_frames(websocket.scope),
        )
        self._answers: list[LiveGeneration] = []
        self._greeted = False
        self._revoked = asyncio.Event()
        self._num_malformed = 0
        self._allowance = float(limits.command_burst)
        self._allowance_at = time.monotonic()

    async def run(self) -> None:
        """Serve until either side closes; then stop the answers that nobody else watches."""
        reader = asyncio.create_task(self._read(), name=f"{self.id} reader")
        writer = asyncio.create_task(self._writer.run(), name=f"{self.id} writer")
        drain = asyncio.create_task(self._tell_draining(), name=f"{self.id} drain")
        revoked = asyncio.create_task(self._leave_revoked(), name=f"{self.id} revoked")
        try:
            await asyncio.wait({reader, writer, revoked}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                self._end_of_writer(writer.exception())
            elif revoked.done():
                await self._end_of_reader(revoked.exception(), writer)
            else:
                await self._end_of_reader(reader.exception(), writer)
        finally:
            for task in (reader, writer, drain, revoked):
                task.cancel()
            # First of all the engine is freed: what comes after may be cut short where the server is shutting down.
            self._writer.close()
            await self._hub.release(self._answers)
            await asyncio.gather(reader, writer, drain, revoked, return_exceptions=True)

    def revoke(self) -> None:
        """The key that opened this socket is no longer good: say so and close. Idempotent."""
        self._revoked.set()

    def _end_of_writer(self, error: BaseException | None) -> None:
        if isinstance(error, SlowConsumerError):
            self._fail(Close.SLOW_CONSUMER, "slow_consumer")
        elif error is not None and not isinstance(error, WebSocketDisconnect):
            raise error

    async def _end_of_reader(self, error: BaseException | None, writer: asyncio.Task[None]) -> None:
        if isinstance(error, _Closing):
            flushed = asyncio.create_task(self._writer.flushed())
            await asyncio.wait({flushed, writer}, timeout=CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            is_flushed = flushed.done()
            flushed.cancel()
            if is_flushed and not writer.done():
                await self._close(error.code, error.reason)
            else:
                self._fail(error.code, error.reason)
        elif error is not None and not isinstance(error, WebSocketDisconnect):
            raise error

    async def _close(self, code: int, reason: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._websocket.close(code, reason)
        except TimeoutError:
            self._fail(code, reason)
        except (WebSocketDisconnect, OSError):
            pass  # it closed first

    async def _read(self) -> None:
        """Handle frames in order; ends by raising `_Closing` or `WebSocketDisconnect`."""
        try:
            async with asyncio.timeout(self._limits.hello_seconds) as hello:
                while not self._greeted:
                    await self._handle(await self._frame())
                hello.reschedule(None)
        except TimeoutError:
            raise _Closing(Close.HELLO_TIMEOUT, "no hello in time") from None
        while True:
            await self._handle(await self._frame())

    async def _frame(self) -> str:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1005)
        text = message.get("text")
        if text is None:
            raise _Closing(Close.UNSUPPORTED_DATA, "binary frames are not part of chatserve.v1")
        if len(text) > wire.MAX_FRAME_BYTES or len(text.encode()) > wire.MAX_FRAME_BYTES:
            raise _Closing(Close.TOO_BIG, f"frames are limited to {wire.MAX_FRAME_BYTES} bytes")
        self._spend()
        return str(text)

    def _spend(self) -> None:
        self.num_commands += 1
        now = time.monotonic()
        rate = self._limits.commands_per_second
        self._allowance = min(self._limits.command_burst, self._allowance + (now - self._allowance_at) * rate)
        self._allowance_at = now
        if self._allowance < 1:
            raise _Closing(Close.TOO_MANY, "1")
        self._allowance -= 1

    async def _handle(self, text: str) -> None:
        try:
            envelope = wire.decode_envelope(text, self._context.config.server.max_nesting_depth)
        except wire.MalformedFrameError as error:
            self._num_malformed += 1
            if self._num_malformed > wire.MAX_MALFORMED:
                raise _Closing(Close.MALFORMED, "too many malformed frames") from None
            self._refuse(error)
            return
        try:
            await self._execute(wire.decode_command(envelope, text))
        except ChatserveError as error:
            self._refuse(error, envelope)
        except Exception:
            # A fault of ours must not take the socket and its other answers down.
            structlog.get_logger().exception("websocket command failed", command=envelope.type)
            self._refuse(internal_error(), envelope)

    def _refuse(self, error: ChatserveError, envelope: wire.Envelope | None = None) -> None:
        body = wire.error_body(error)
        self._writer.send(wire.Error(body, UNSET if envelope is None else envelope.id))

    async def _execute(self, command: wire.Command) -> None:
        if isinstance(command, wire.Ping):
            self._writer.send(wire.Pong(time.time_ns() // 10**6, command.t, command.id))
        elif isinstance(command, wire.Hello):
            self._greet(command)
        elif not self._greeted:
            raise InvalidRequestError("Say hello first.", code="hello_required", param="type")
        elif isinstance(command, wire.ChatSend):
            sent = await self._hub.send(self.principal, command)
            self._writer.send(sent.ack)
            for answer in sent.answers:
                self._writer.watch(answer)
                self._answers.append(answer)
            self._answers = [answer for answer in self._answers if answer.terminal is None]
        else:
            await self._hub.cancel(self.principal.tenant, command.gen)
            self._writer.send(wire.Ack(command.id))

    def _greet(self, command: wire.Hello) -> None:
        if self._greeted:
            raise InvalidRequestError("One hello per socket.", code="already_done", param="type")
        if command.ticket is not None:
            raise InvalidRequestError("Tickets are not available in this version.", code="unsupported", param="ticket")
        self._greeted = True
        context = self._context
        self._writer.send(
            wire.Welcome(
                conn=self.id,
                server=wire.ServerInfo("chatserve", chatserve.__version__, self._hub.boot, context.model_name),
                tenant=self.principal.tenant,
                limits=wire.Limits(
                    context.service.context_length() if context.engine.ready else None,
                    wire.MAX_FRAME_BYTES,
                    self._limits.commands_per_second,
                ),
                heartbeat_ms=self._limits.heartbeat_ms,
                grace_ms=0,
                features=[],
                active=self._hub.active(self.principal.tenant),
                re=command.id,
            )
        )

    async def _leave_revoked(self) -> None:
        await self._revoked.wait()
        self._refuse(key_revoked())
        raise _Closing(Close.NOT_AUTHENTICATED, "key_revoked")

    async def _tell_draining(self) -> None:
        lifecycle = self._context.lifecycle
        await lifecycle.drain_started.wait()
        deadline_ms = round(self._context.config.server.drain_timeout * 1000)
        self._writer.send(wire.Draining(deadline_ms, RECONNECT_AFTER_MS))
