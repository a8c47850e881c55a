"""Keeps one engine process alive: spawn, watch, declare dead, replace, give up.

Knows the process, its heartbeat and its deadlines; what the messages mean for requests is `engine.client`'s part.
Death is noticed by end of file on the socket; a stopped process by its silent heartbeat; a hanging step by the
lack of frames while work is pending. Crash loops are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import Protocol

import msgspec

from chatserve.config import EngineConfig
from chatserve.engine.launch import EngineChild
from chatserve.engine.protocol import (
    EngineFailed,
    EngineReady,
    FromEngine,
    Reply,
    Shutdown,
    StepFrame,
    ToEngine,
)
from chatserve.engine.transport import MAX_FRAME_BYTES, AsyncChannel
from chatserve.errors import ChatserveError, ConfigError, EngineUnavailableError, ModelLoadError

logger = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True):
    """How patient the supervisor is; seconds, but for the count.

    Attributes:
        suspect_after: heartbeat silence after which the engine counts as not ready. It recovers by itself when the
            heartbeat returns.
        dead_after: heartbeat silence after which it is killed and replaced.
        step_deadline: work is pending, but no frame came for so long: it is killed and replaced. (A busy engine
            sends stats several times per second, between steps.)
        first_backoff, max_backoff: pause before a restart; doubles with each death in a row, and the first restart
            waits for nothing.
        stable_after: an engine that was ready for so long ends a row of deaths.
        max_load_failures: deaths in a row before it was ready, after which the engine is given up. One that loads
            and then dies is always replaced, however often, so that nobody can end the server with a request.
        stop_timeout: an engine that does not follow `Shutdown` for so long is killed.
    """

    suspect_after: float = 2.0
    dead_after: float = 5.0
    step_deadline: float = 60.0
    first_backoff: float = 0.25
    max_backoff: float = 10.0
    stable_after: float = 30.0
    max_load_failures: int = 5
    stop_timeout: float = 5.0


DEFAULT_LIMITS = Limits()

_WATCH_INTERVAL = 0.25
_PERMANENT = {ModelLoadError.default_code: ModelLoadError, ConfigError.default_code: ConfigError}
"""Failures that the same process with the same configuration will meet again."""


class EngineListener(Protocol):
    """What the supervisor tells, on the event loop. None of it may block."""

    @property
    def has_pending_work(self) -> bool: ...

    def handle_ready(self, message: EngineReady) -> None: ...

    def handle_frame(self, frame: StepFrame) -> None: ...

    def handle_reply(self, reply: Reply) -> None: ...

    def set_ready(self, ready: bool) -> None: ...

    def handle_lost(self) -> None: ...


class EngineSupervisor:
    """One engine process after the other, until `close` or until it is hopeless."""

    def __init__(
        self, config: EngineConfig, listener: EngineListener, child: EngineChild | None, limits: Limits
    ) -> None:
        self.restarts = 0
        self.failure: ChatserveError | None = None
        self._config = config
        self._listener = listener
        self._child = child
        self._limits = limits
        self._session: _Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._failed = asyncio.Event()
        self._closing = asyncio.Event()

    async def start(self) -> None:
        """Spawn, unless a child was handed over, and begin to supervise."""
        child = self._child or EngineChild(self._config)
        self._child = None
        self._task = asyncio.create_task(self._supervise(child), name="engine supervisor")

    async def wait_ready(self) -> None:
        """Raises the failure if the engine is given up first."""
        waits = [asyncio.create_task(event.wait()) for event in (self._ready, self._failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.failure is not None:
            raise self.failure

    async def wait_failed(self) -> ChatserveError:
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def close(self) -> None:
        """Stop: politely when it is loaded, else at once. Returns when the process is gone. Idempotent."""
        self._closing.set()
        if self._child is not None:  # handed over, but never started
            self._child.kill()
            self._child.wait()
            self._child.close()
            self._child = None
        if self._task is not None:
            if self._session is not None:
                await self._session.stop()
            await self._task
            self._task = None

    def send(self, message: ToEngine) -> None:
        """Queue a message; nothing when there is no engine (the listener has been told)."""
        if self._session is not None:
            self._session.send(message)

    async def _supervise(self, child: EngineChild) -> None:
        deaths = load_failures = 0  # in a row
        while True:
            if self._closing.is_set():
                child.kill()
            session = self._session = _Session(child, self._listener, self._limits, self._ready)
            try:
                await session.run()
            except Exception:  # a process that cannot be talked to counts as one that died
                logger.exception("the engine's socket cannot be used")
            self._session = None
            self._ready.clear()
            failure = await asyncio.to_thread(session.dispose)
            if self._closing.is_set():
                return
            deaths = 1 if session.seconds_ready > self._limits.stable_after else deaths + 1
            load_failures = 0 if session.was_ready else load_failures + 1
            if session.permanent or load_failures >= self._limits.max_load_failures:
                self._give_up(failure)
                return
            logger.warning("the engine is restarted: %s", failure.message)
            if deaths > 1:
                backoff = self._limits.first_backoff * 2 ** min(deaths - 2, 16)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), min(backoff, self._limits.max_backoff))
                if self._closing.is_set():
                    return
            self.restarts += 1
            try:
                child = EngineChild(self._config)
            except OSError as error:
                self._give_up(EngineUnavailableError(f"No engine process can be started: {error}."))
                return

    def _give_up(self, failure: ChatserveError) -> None:
        self.failure = failure
        self._failed.set()
        logger.error("the engine is given up: %s", failure.message)


class _Session:
    """One engine process, from its start to its end.

    Attributes:
        permanent: the next one would end the same way.
        seconds_ready: how long it was of use.
    """

    def __init__(self, child: EngineChild, listener: EngineListener, limits: Limits, ready: asyncio.Event) -> None:
        self._failure: ChatserveError | None = None
        self.permanent = False
        self.seconds_ready = 0.0
        self._child = child
        self._listener = listener
        self._limits = limits
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()
        self._suspect = False
        self._ready_since: float | None = None
        self._last_beat = self._last_frame = self._last_look = self._loop.time()
        decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._channel: AsyncChannel[FromEngine] = AsyncChannel(decoder, self._handle, self._handle_lost)

    @property
    def was_ready(self) -> bool:
        return self._ready_since is not None

    def send(self, message: ToEngine) -> None:
        if not self._listener.has_pending_work:
            self._last_frame = self._loop.time()  # the step deadline runs from the moment there is work
        self._channel.send(message)
        if self._channel.backlog > MAX_FRAME_BYTES:
            self._declare_dead("does not read its messages")

    async def run(self) -> None:
        """Until the process is lost."""
        self._loop.add_reader(self._child.heartbeat_fd, self._read_heartbeat)
        try:
            await self._channel.attach(self._child.socket)
            while not self._lost.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), _WATCH_INTERVAL)
                self._watch()
        finally:
            self._loop.remove_reader(self._child.heartbeat_fd)
            self._channel.close()
            self._lost.set()

    async def stop(self) -> None:
        """End the process; returns when the connection is lost."""
        if self._ready_since is None:
            self._child.kill()  # it would not read a message before it has loaded
        self._channel.send(Shutdown())
        try:
            await asyncio.wait_for(self._lost.wait(), self._limits.stop_timeout)
        except TimeoutError:
            self._child.kill()
            await self._lost.wait()

    def dispose(self) -> ChatserveError:
        """Kill whatever is left, reap it, close our ends; why it ended. Blocks for a moment: call it on a thread."""
        status = self._child.wait(timeout=0.5)
        if status is None:
            self._child.kill()
            status = self._child.wait()
        self._child.close()
        if self._failure is not None:
            return self._failure
        hint = "; the kernel may have run out of memory" if status == -signal.SIGKILL else ""
        return EngineUnavailableError(f"The engine process died (exit status {status}{hint}).")

    def _handle(self, message: FromEngine) -> None:
        self._last_frame = self._loop.time()
        if isinstance(message, StepFrame):
            self._listener.handle_frame(message)
        elif isinstance(message, EngineReady):
            self._ready_since = self._last_beat = self._last_frame
            self._listener.handle_ready(message)
            self._listener.set_ready(True)
            self._ready.set()
        elif isinstance(message, Reply):
            self._listener.handle_reply(message)
        elif isinstance(message, EngineFailed):
            self.permanent = message.code in _PERMANENT
            self._failure = _PERMANENT.get(message.code, EngineUnavailableError)(message.message)
            self._channel.close()

    def _handle_lost(self) -> None:
        if self._ready_since is not None:
            self.seconds_ready = self._loop.time() - self._ready_since
        self._listener.handle_lost()
        self._lost.set()

    def _read_heartbeat(self) -> None:
        try:
            alive = os.read(self._child.heartbeat_fd, 4096)
        except BlockingIOError:
            return
        if not alive:  # end of file: the socket's end of file follows and says the rest
            self._loop.remove_reader(self._child.heartbeat_fd)
            return
        self._last_beat = self._loop.time()

    def _watch(self) -> None:
        """Readiness and deadlines. Only a loaded engine is timed: loading may hold the interpreter for long."""
        now = self._loop.time()
        late = now - self._last_look - _WATCH_INTERVAL
        self._last_look = now
        if self._ready_since is None or self._lost.is_set():
            return
        if late > 1.0:  # this loop itself was held up, and may not have read what is there
            self._last_beat = self._last_frame = now
        silence = now - self._last_beat
        suspect = silence > self._limits.suspect_after
        if suspect and not self._suspect:
            logger.warning("the engine gives no sign of life; it is not ready until it does")
        self._suspect = suspect
        self._listener.set_ready(not suspect)
        if silence > self._limits.dead_after:
            self._declare_dead(f"gave no sign of life for {silence:.0f} s")
        elif self._listener.has_pending_work and now - self._last_frame > self._limits.step_deadline:
            self._declare_dead(f"made no step for {self._limits.step_deadline:g} s")

    def _declare_dead(self, how: str) -> None:
        self._failure = EngineUnavailableError(f"The engine process {how}.")
        self._child.kill()
        self._channel.close()
