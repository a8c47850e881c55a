"""One SQLite file behind one thread.

Work is queued as functions of the connection; whatever has gathered while the last transaction ran is committed
together, and each caller gets its own result or its own error. Knows migrations, knows no tables' meaning:
`tenancy.store` does. Other processes may use the same file at the same time.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from chatserve.errors import ConfigError

T = TypeVar("T")

BUSY_SECONDS = 5.0
"""How long a transaction waits for another process's."""


class _Job:
    """One queued function and the promise of its result."""

    def __init__(self, work: Callable[[sqlite3.Connection], object]) -> None:
        self.work = work
        self.future: Future[object] = Future()
        self.outcome: Callable[[], None] | None = None


class Database:
    """The connection, its thread, and the way in.

    Attributes:
        path: the file; ``None`` is memory, gone with the object.
    """

    def __init__(self, path: Path | None, migrations: Sequence[str]) -> None:
        """Open (or make) the file and bring its schema up to date.

        Args:
            migrations: scripts; the first ``PRAGMA user_version`` of them have been applied.

        Raises:
            ConfigError: the file cannot be opened, is no database, or was written by a newer version.
        """
        self.path = path
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._door = threading.Lock()  # nothing is queued behind the end
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
            self._connection = sqlite3.connect(
                path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"The database {path} cannot be opened: {error}.") from error
        try:
            _prepare(self._connection, migrations, path)
        except sqlite3.Error as error:
            self._connection.close()
            raise ConfigError(f"The database {path} cannot be used: {error}.") from error
        except ConfigError:
            self._connection.close()
            raise
        # A daemon, so that a forgotten close cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="chatserve database", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` inside a transaction and wait for its commit; what it raises undoes only its own changes.

        Blocks; from an event loop, call it in a thread.
        """
        job = _Job(work)
        with self._door:
            if self._closed:
                raise RuntimeError("the database is closed")
            self._jobs.put(job)
        return job.future.result()  # type: ignore[return-value]

    def close(self) -> None:
        """Finish what is queued and close the file. Idempotent."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            batch = []
            job = self._jobs.get()
            while True:
                if job is None:
                    closing = True
                else:
                    batch.append(job)
                if self._jobs.empty():
                    break
                job = self._jobs.get()
            if batch:
                self._commit(batch)
        self._connection.close()

    def _commit(self, batch: list[_Job]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                self._perform(job)
            self._connection.execute("COMMIT")
        except BaseException as error:  # nothing of the batch is in the file
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for job in batch:
                job.future.set_exception(error)
            return
        for job in batch:
            if job.outcome is not None:
                job.outcome()

    def _perform(self, job: _Job) -> None:
        """Run one job so that its failure leaves the others alone; its outcome is told after the commit."""
        self._connection.execute("SAVEPOINT job")
        try:
            result = job.work(self._connection)
        except Exception as error:
            if not self._connection.in_transaction:
                raise  # a full disk, for one: SQLite has undone everybody's changes
            self._connection.execute("ROLLBACK TO job")
            failure = error
            job.outcome = lambda: job.future.set_exception(failure)
        else:
            job.outcome = lambda: job.future.set_result(result)
        self._connection.execute("RELEASE job")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log. Of two who do that to a new file at once SQLite refuses one without any waiting."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _prepare(connection: sqlite3.Connection, migrations: Sequence[str], path: Path | None) -> None:
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("BEGIN IMMEDIATE")  # two processes may start at once: the second finds it done
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        connection.execute("ROLLBACK")
        raise ConfigError(
            f"{path} has schema version {version}, and this chatserve knows versions up to {len(migrations)}. "
            "Use the newer chatserve that wrote it."
        )
    for script in migrations[version:]:
        for statement in _statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {len(migrations)}")
    connection.execute("COMMIT")


def _statements(script: str) -> list[str]:
    """The statements of a script (`executescript` would commit on its own)."""
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements
