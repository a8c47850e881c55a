"""Starts one engine process and holds its three ends: the process, its socket, its heartbeat pipe.

Synchronous and light to import, so that a server can start its engine before it imports anything else. Does not
know the event loop (`engine.client` attaches the socket to it) nor what the engine does (`engine.process`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from chatserve.config import EngineConfig


class EngineChild:
    """A spawned engine process.

    The thread that spawns must live as long as the engine is wanted: on Linux the kernel kills the engine when
    its parent thread ends.

    Attributes:
        socket: our end of the message socket.
        heartbeat_fd: non-blocking read end of a pipe into which the engine writes a byte twice a second.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.socket, engine_socket = socket.socketpair()
        self.heartbeat_fd, engine_heartbeat = os.pipe()
        os.set_blocking(self.heartbeat_fd, False)
        command = [
            sys.executable,
            "-P",  # the current folder is no place to import code from
            "-m",
            "chatserve.engine.process",
            str(engine_socket.fileno()),
            str(engine_heartbeat),
            msgspec.json.encode(config).decode(),
        ]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(engine_socket.fileno(), engine_heartbeat)
            )
        except OSError:
            self.close()
            raise
        finally:
            # Only the engine may hold its ends: its death must be the end of file on ours.
            engine_socket.close()
            os.close(engine_heartbeat)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process. Nothing if it has ended already."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Reap the process; its exit status, negative for a signal, or ``None`` if it still runs after ``timeout``."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Close our ends of socket and pipe, which also tells the engine to exit. Idempotent."""
        self.socket.close()
        if self.heartbeat_fd >= 0:
            os.close(self.heartbeat_fd)
            self.heartbeat_fd = -1
