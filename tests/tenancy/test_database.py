"""One thread, one file: group commits keep callers apart, and other processes are welcome."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatserve.errors import ConfigError
from chatserve.tenancy.database import Database
from tests.waiting import PATIENCE

SCHEMA = ("CREATE TABLE numbers (n INTEGER PRIMARY KEY) STRICT;",)


def insert(database: Database, number: int) -> None:
    database.call(lambda connection: connection.execute("INSERT INTO numbers VALUES (?)", (number,)))


def count(database: Database) -> int:
    return int(database.call(lambda connection: connection.execute("SELECT count(*) FROM numbers").fetchone()[0]))


@contextmanager
def held(database: Database) -> Iterator[None]:
    """Its thread is inside a transaction meanwhile, and what is asked for gathers."""
    running, go = threading.Event(), threading.Event()

    def hold(connection: sqlite3.Connection) -> None:
        running.set()
        assert go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(database.call, hold)
        assert running.wait(PATIENCE)
        try:
            yield
        finally:
            go.set()
        holding.result()


def until_queued(database: Database, jobs: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while database._jobs.qsize() < jobs:
        assert time.monotonic() < deadline


def test_what_gathers_is_committed_together(tmp_path: Path) -> None:
    """While one transaction runs, a hundred callers queue; they share the next commit, and each is durable."""
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    commits: list[str] = []
    with ThreadPoolExecutor(100) as pool:
        with held(database):
            database._connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
            waiting = [pool.submit(insert, database, n) for n in range(100)]
            until_queued(database, 100)
        for future in waiting:
            future.result()
    assert len(commits) == 2  # the held one's and one for all the others
    other = sqlite3.connect(tmp_path / "d.sqlite")
    assert other.execute("SELECT count(*) FROM numbers").fetchone() == (100,)
    other.close()
    database.close()


def test_a_failure_is_its_callers_alone(tmp_path: Path) -> None:
    """In one batch, a job that fails after a write leaves nothing of its own and everything of the others."""
    database = Database(tmp_path / "d.sqlite", SCHEMA)

    def write_and_fail(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO numbers VALUES (50)")
        raise ValueError("mine")

    with ThreadPoolExecutor(3) as pool:
        with held(database):
            before = pool.submit(insert, database, 1)
            failing = pool.submit(database.call, write_and_fail)
            after = pool.submit(insert, database, 2)
            until_queued(database, 3)
        before.result()
        after.result()
        with pytest.raises(ValueError, match="mine"):
            failing.result()
    assert count(database) == 2
    database.close()


def test_what_undoes_everything_is_told_as_it_was(tmp_path: Path) -> None:
    """SQLite itself rolls back a transaction that does not fit the disk: all in it learn why, and it goes on."""
    database = Database(tmp_path / "d.sqlite", SCHEMA)

    def overflow(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    with ThreadPoolExecutor(2) as pool:
        with held(database):
            before = pool.submit(insert, database, 1)
            until_queued(database, 1)
            overflowing = pool.submit(database.call, overflow)
            until_queued(database, 2)
        for future in (before, overflowing):
            with pytest.raises(sqlite3.OperationalError, match="disk is full"):
                future.result()
    assert count(database) == 0
    insert(database, 2)
    assert count(database) == 1
    database.close()


def test_close_finishes_what_is_queued_and_refuses_more(tmp_path: Path) -> None:
    """Nothing that was asked for is lost, nothing waits for ever afterwards, and closing twice is fine."""
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    with ThreadPoolExecutor(20) as pool:
        for future in [pool.submit(insert, database, n) for n in range(20)]:
            future.result()
    database.close()
    database.close()
    with pytest.raises(RuntimeError, match="closed"):
        insert(database, 99)
    again = Database(tmp_path / "d.sqlite", SCHEMA)
    assert count(again) == 20
    again.close()


def test_two_processes_worth_of_connections(tmp_path: Path) -> None:
    """Two objects on one file, opened at the same moment, both write; neither migrates twice nor loses a row."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: Database(tmp_path / "d.sqlite", SCHEMA), range(2))
        list(pool.map(lambda n: insert(first if n % 2 else second, n), range(60)))
    assert count(first) == count(second) == 60
    first.close()
    second.close()


def test_migrations_run_once_each(tmp_path: Path) -> None:
    """An older file is brought up to date with its data; a newer one is refused and left alone."""
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    insert(database, 7)
    database.close()
    newer = (
        *SCHEMA,
        "ALTER TABLE numbers ADD COLUMN word TEXT NOT NULL DEFAULT 'x';\nINSERT INTO numbers (n) VALUES (8);",
    )
    database = Database(tmp_path / "d.sqlite", newer)
    assert database.call(lambda c: c.execute("SELECT n, word FROM numbers").fetchall()) == [(7, "x"), (8, "x")]
    database.close()
    with pytest.raises(ConfigError, match="version 2"):
        Database(tmp_path / "d.sqlite", SCHEMA)


def test_a_failed_migration_changes_nothing(tmp_path: Path) -> None:
    """Half a migration would lock everybody out."""
    Database(tmp_path / "d.sqlite", SCHEMA).close()
    broken = (*SCHEMA, "CREATE TABLE more (n INTEGER) STRICT;\nCREATE TABLE numbers (n INTEGER) STRICT;")
    with pytest.raises(ConfigError, match="cannot be used"):
        Database(tmp_path / "d.sqlite", broken)
    database = Database(tmp_path / "d.sqlite", SCHEMA)
    assert database.call(lambda c: c.execute("SELECT name FROM sqlite_schema WHERE name = 'more'").fetchall()) == []
    database.close()


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    """A wrong path is told at the start, and the file stays as it was."""
    file = tmp_path / "notes.txt"
    file.write_text("no database, but more than a hundred bytes of text " * 4)
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        Database(file, SCHEMA)
    assert file.read_text().startswith("no database")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Database(file / "below" / "d.sqlite", SCHEMA)


def test_file_is_the_owners_alone(tmp_path: Path) -> None:
    """Names, limits and usage are nobody else's to read."""
    Database(tmp_path / "d.sqlite", SCHEMA).close()
    assert (tmp_path / "d.sqlite").stat().st_mode & 0o777 == 0o600
