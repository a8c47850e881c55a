"""The engine process: load an executor, then receive → step → send until told to stop.

Owns the process's life: its signals, its heartbeat, its clock and its last words; `EngineCore` owns what a step
is, and has none of these. Started by `engine.launch` with an inherited socket and an inherited pipe; nothing else
connects to it. The API process decides when it ends, by `Shutdown`, by closing the socket, or by dying.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from chatserve.config import EngineConfig
from chatserve.engine.core import EngineCore
from chatserve.engine.protocol import (
    Abort,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    Explain,
    GetState,
    Publish,
    Purge,
    SetTenant,
    Shutdown,
    StepFrame,
    ToEngine,
)
from chatserve.engine.transport import ChannelClosedError, FrameTooLargeError, SocketChannel
from chatserve.errors import ChatserveError, ConfigError
from chatserve.scheduler.output import Executor

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.25
"""Seconds between two frames that carry stats while the engine is busy; one more when it falls idle."""

HEARTBEAT_INTERVAL = 0.5

_TORCH_FACTORY = "chatserve.worker.executor:create_executor"
_LAST_WORDS_SECONDS = 1.0


class EngineLoop:
    """One core behind one channel.

    Busy, it looks into its inbox between two steps and never waits; idle, it sleeps in the kernel. When the API
    process stops reading, it stops making tokens (see `SocketChannel`).
    """

    def __init__(self, core: EngineCore, channel: SocketChannel[ToEngine]) -> None:
        self._core = core
        self._channel = channel
        self._busy_seconds = 0.0
        self._stats_due = 0.0
        self._stats_stale = True
        self._step = 0
        self._leaked = 0

    def run(self) -> None:
        """Returns on `Shutdown`.

        Raises:
            ChannelClosedError: the API process is gone.
            Exception: whatever made the executor unusable.
        """
        while True:
            self._report_if_idle()
            for message in self._channel.receive(wait=not self._core.has_work):
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            if self._core.has_work and not self._channel.congested:
                self._advance()
                if self._channel.congested:
                    logger.warning("the API process does not read: generation pauses until it does")

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self._core.add(message)
        elif isinstance(message, Abort):
            self._core.abort(message.request_ids)
        elif isinstance(message, SetTenant):
            self._core.set_tenant(message)
        elif isinstance(message, GetState):
            self._channel.send(self._core.state(message.call_id, self._busy_seconds))
        elif isinstance(message, Publish):
            self._core.publish(message)
        elif isinstance(message, Purge):
            self._core.purge(message)
        elif isinstance(message, Explain):
            self._core.explain(message)
        self._send_replies()
        self._stats_stale = True

    def _send_replies(self) -> None:
        for reply in self._core.replies:
            self._channel.send(reply)
        self._core.replies.clear()

    def _advance(self) -> None:
        begin = time.perf_counter()
        frame = self._core.step(self._channel.send)
        end = time.perf_counter()
        self._busy_seconds += end - begin
        self._step = frame.step
        self._stats_stale = True
        if end >= self._stats_due or not self._core.has_work:
            frame = self._with_stats(frame, end)
        if frame.tokens or frame.started or frame.finished or frame.stats:
            self._channel.send(frame)
        self._send_replies()

    def _report_if_idle(self) -> None:
        if self._stats_stale and not self._core.has_work:
            frame = self._with_stats(StepFrame(self._step), time.perf_counter())
            self._channel.send(frame)
            if frame.stats is not None and frame.stats.blocks_leaked > self._leaked:
                self._leaked = frame.stats.blocks_leaked
                logger.error("%d KV blocks are held though nothing runs", self._leaked)

    def _with_stats(self, frame: StepFrame, now: float) -> StepFrame:
        self._stats_due = now + STATS_INTERVAL
        self._stats_stale = False
        stats = msgspec.structs.replace(self._core.stats(), busy_seconds=self._busy_seconds)
        return msgspec.structs.replace(frame, stats=stats, tenants=self._core.tenant_report.news())


def load_executor(config: EngineConfig) -> tuple[Executor, EngineInfo]:
    """Import and call the factory that the configuration names.

    Raises:
        ConfigError: another factory than torch's outside of tests.
        ModelLoadError: from the factory.
    """
    name = _TORCH_FACTORY if config.executor == "torch" else config.executor
    if name != _TORCH_FACTORY and os.environ.get("CHATSERVE_TEST") != "1":
        raise ConfigError(f"executor must be 'torch', not {name!r}: other executors are for tests (CHATSERVE_TEST=1).")
    module, _, attribute = name.partition(":")
    factory: Callable[[EngineConfig], tuple[Executor, EngineInfo]] = getattr(importlib.import_module(module), attribute)
    return factory(config)


def serve(config: EngineConfig, channel: SocketChannel[ToEngine]) -> int:
    """Load, announce, run; the exit status of the process.

    Returns:
        0 after `Shutdown`; 1 after a failure that was reported by `EngineFailed`; 2 when the API process went away.
    """
    try:
        executor, info = load_executor(config)
        try:
            core = EngineCore(config, executor, info)
            # What loading left behind lives as long as the process: the collector need not walk it again.
            gc.collect()
            gc.freeze()
            channel.send(EngineReady(msgspec.structs.replace(info, pid=os.getpid())))
            EngineLoop(core, channel).run()
        finally:
            executor.shutdown()
    except ChannelClosedError:
        return 2
    except ChatserveError as error:
        _report_failure(channel, error)
        return 1
    except Exception as error:
        logger.exception("the engine cannot go on")
        _report_failure(channel, error)
        return 1
    return 0


def _report_failure(channel: SocketChannel[ToEngine], error: Exception) -> None:
    if isinstance(error, FrameTooLargeError):
        return  # the stream is out of step: closing it is the clearest message
    if isinstance(error, ChatserveError):
        failed = EngineFailed(error.code, error.message)
    else:
        failed = EngineFailed("internal_error", f"{type(error).__name__}: {error}")
    try:
        channel.send(failed)
        channel.flush_for(_LAST_WORDS_SECONDS)
    except OSError:
        return  # nobody is there to hear it


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent does; elsewhere the heartbeat thread alone notices."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _beat(fd: int) -> None:
    """Write a byte twice a second, and end the process at once when nobody is left to read them.

    Runs on its own thread, so that a long step is neither taken for a hang nor survives the API process.
    """
    os.set_blocking(fd, False)
    poll = select.poll()
    poll.register(fd, 0)  # only POLLERR, which means that the read end is closed
    while True:
        try:
            os.write(fd, b"\0")
        except BlockingIOError:
            pass  # the API process is not reading just now
        except OSError:
            os._exit(2)
        if poll.poll(HEARTBEAT_INTERVAL * 1000):
            os._exit(2)


def main() -> None:
    socket_fd, heartbeat_fd, config_json = sys.argv[1:4]
    # Terminals and service managers signal whole process groups; when to stop is the API process's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for fd in (int(socket_fd), int(heartbeat_fd)):
        # A compiler or worker started from here must not keep the connection alive after our death.
        os.set_inheritable(fd, False)
    _die_with_parent()
    threading.Thread(target=_beat, args=(int(heartbeat_fd),), name="heartbeat", daemon=True).start()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    config = msgspec.json.decode(config_json, type=EngineConfig)
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    sys.exit(serve(config, SocketChannel(socket.socket(fileno=int(socket_fd)), decoder)))


if __name__ == "__main__":
    main()
