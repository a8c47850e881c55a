"""`EngineClient` against real engine processes: streams, aborts, deaths, hangs, restarts and leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from chatserve.config import CacheConfig, EngineConfig, ModelConfig
from chatserve.engine.client import Delta, EngineClient, EngineStream, Event
from chatserve.engine.launch import EngineChild
from chatserve.engine.protocol import Finished, Started
from chatserve.engine.supervisor import Limits
from chatserve.errors import ChatserveError, ConfigError, EngineUnavailableError, ModelLoadError
from chatserve.sampling_params import SamplingParams
from chatserve.scope import Scope
from tests.engine.doubles import (
    DIES_LOADING,
    EXECUTOR,
    EXITS,
    FIRST_TOKEN,
    GOOD,
    HANGS,
    RAISES,
    SLOW,
    UNLOADABLE,
)
from tests.waiting import PATIENCE, UNHURRIED, eventually

CONFIG = EngineConfig(executor=EXECUTOR, cache=CacheConfig(num_blocks=256))
SCOPES = (Scope("public"), Scope("tenant", "a"))

_salts = itertools.count(step=37)


def on_uvloop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test on the loop that production runs on; `test_transport` runs on asyncio's own."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


@pytest.fixture(autouse=True)
def _allow_test_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATSERVE_TEST", "1")


@contextlib.asynccontextmanager
async def running(config: EngineConfig = CONFIG, limits: Limits = UNHURRIED) -> AsyncIterator[EngineClient]:
    client = EngineClient(config, limits=limits)
    await client.start()
    try:
        await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
        yield client
    finally:
        await client.close()


def submit(client: EngineClient, kind: int, length: int = 20, max_tokens: int | None = 8, n: int = 1) -> EngineStream:
    """A prompt of ``length`` tokens whose first one chooses the double's behaviour; the others are unique to it."""
    salt = next(_salts)
    prompt = array("i", [kind, *((salt + i) % 900 + 100 for i in range(length - 1))])
    sampling = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0, seed=1)
    return client.submit(prompt.tobytes(), sampling, scopes=SCOPES)


async def read_all(stream: EngineStream) -> list[Event]:
    events: list[Event] = []
    while batch := await asyncio.wait_for(stream.next(), PATIENCE):
        events += batch
    return events


async def read_tokens(stream: EngineStream, count: int) -> list[int]:
    """Read until ``count`` tokens have come."""
    tokens: list[int] = []
    while len(tokens) < count:
        batch = await asyncio.wait_for(stream.next(), PATIENCE)
        assert batch, "the stream ended early"
        tokens += [event.token_id for event in batch if isinstance(event, Delta)]
    return tokens


def assert_right(events: list[Event], length: int, count: int) -> None:
    """One `Started`, the counted tokens in order, one `Finished`."""
    assert isinstance(events[0], Started)
    assert events[0].prompt_tokens == length
    assert [event.token_id for event in events[1:-1] if isinstance(event, Delta)] == [
        FIRST_TOKEN + length + i for i in range(count)
    ]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@on_uvloop
async def test_streams_deliver_their_own_tokens_in_order() -> None:
    """Thirty concurrent requests of different lengths: each gets its tokens, whole and in order, and one end."""
    async with running() as client:
        lengths = [5 + 3 * i for i in range(30)]
        streams = [submit(client, GOOD, length, max_tokens=4 + i % 9) for i, length in enumerate(lengths)]
        assert client.num_waiting == 30
        results = await asyncio.gather(*map(read_all, streams))
        for i, (length, events) in enumerate(zip(lengths, results, strict=True)):
            assert_right(events, length, 4 + i % 9)
        assert client.num_waiting == 0
        assert await streams[0].next() == []
        await eventually(lambda: client.stats.num_running == 0 and client.stats.steps > 0)


@on_uvloop
async def test_every_choice_has_its_own_end() -> None:
    """With n=3 each choice streams its tokens and finishes once."""
    async with running() as client:
        events = await read_all(submit(client, GOOD, 20, max_tokens=5, n=3))
        for choice in range(3):
            deltas = [e for e in events if isinstance(e, Delta) and e.choice == choice]
            assert [d.token_id for d in deltas] == [FIRST_TOKEN + 20 + i for i in range(5)]
            assert [e.choice for e in events if isinstance(e, Finished)].count(choice) == 1


@on_uvloop
async def test_abort_ends_the_stream_and_frees_the_engine() -> None:
    """Abort is immediate here, idempotent, and leaves nothing running or held in the engine."""
    async with running() as client:
        stream = submit(client, SLOW, 40, max_tokens=2000)
        await read_tokens(stream, 3)
        stream.abort()
        stream.abort()
        events = await read_all(stream)
        assert events[-1] == Finished(stream.request_id, 0, "abort")
        state = await client.state()
        assert state.live_requests == 0
        assert state.recounted_held == state.stats.blocks_held == 0


@on_uvloop
async def test_a_dropped_stream_aborts_its_request() -> None:
    """A handler that dies without cleaning up leaves no request behind."""
    async with running() as client:
        stream = submit(client, SLOW, max_tokens=2000)
        await read_tokens(stream, 1)
        del stream
        gc.collect()
        async with asyncio.timeout(PATIENCE):  # its answer would take 40 s
            while (await client.state()).live_requests:
                pass


@on_uvloop
async def test_the_kernel_kills_the_engine() -> None:
    """kill -9 in mid-stream: every choice of every stream ends at once, not for the engine's silence; readiness flips,
    and the next engine serves.
    """
    async with running() as client:
        changes: list[bool] = []
        client.on_ready_change(changes.append)
        streams = [submit(client, SLOW, max_tokens=2000, n=n) for n in (1, 2)]
        queued = submit(client, SLOW, max_tokens=2000)
        for stream in streams:
            await read_tokens(stream, 2)
        call = asyncio.create_task(client.state())
        os.kill(client.info.pid, signal.SIGKILL)
        results = await asyncio.gather(*map(read_all, [*streams, queued]))
        for events, n in zip(results, (1, 2, 1), strict=True):
            ends = [event for event in events if isinstance(event, Finished)]
            assert sorted(end.choice for end in ends) == list(range(n))
            assert {(end.reason, end.error_code) for end in ends} == {("error", "engine_unavailable")}
        assert not client.ready
        assert client.num_waiting == 0
        with contextlib.suppress(EngineUnavailableError):
            await call
        with pytest.raises(EngineUnavailableError):
            submit(client, GOOD)
        await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
        assert changes == [False, True]
        assert_right(await read_all(submit(client, GOOD)), 20, 8)
        assert client.restarts == 1


@on_uvloop
@pytest.mark.parametrize("kind", [RAISES, EXITS])
async def test_an_executor_that_fails_ends_streams_and_is_replaced(kind: int) -> None:
    """An exception or exit inside a step is the engine's end, said to every stream, and not the server's end."""
    async with running() as client:
        bystander = submit(client, SLOW, max_tokens=2000)
        await read_tokens(bystander, 1)
        victim = submit(client, kind)
        for stream in (victim, bystander):
            end = (await read_all(stream))[-1]
            assert isinstance(end, Finished)
            assert (end.reason, end.error_code) == ("error", "engine_unavailable")
        await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
        assert_right(await read_all(submit(client, GOOD)), 20, 8)


@on_uvloop
async def test_a_stopped_engine_is_suspected_then_replaced() -> None:
    """SIGSTOP: not ready soon, streams end when patience does, a new engine serves, the stopped one is gone."""
    async with running(limits=Limits(suspect_after=1.5, dead_after=4.0)) as client:
        stream = submit(client, SLOW, max_tokens=2000)
        await read_tokens(stream, 1)
        pid = client.info.pid
        alive: list[bool] = []
        client.on_ready_change(lambda ready: alive.append(is_alive(pid)))
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: not client.ready)
        end = (await read_all(stream))[-1]
        assert isinstance(end, Finished)
        assert end.error_code == "engine_unavailable"
        await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
        assert alive == [True, False], "suspected first, then gone"
        assert not is_alive(pid)
        assert_right(await read_all(submit(client, GOOD)), 20, 8)


@on_uvloop
async def test_a_short_stop_is_forgiven() -> None:
    """An engine that comes back before patience ends is ready again, and its streams lose nothing."""
    async with running(limits=Limits(suspect_after=1.5, dead_after=3600.0)) as client:
        stream = submit(client, SLOW, 20, max_tokens=60)
        os.kill(client.info.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: not client.ready)
        finally:
            os.kill(client.info.pid, signal.SIGCONT)
        await eventually(lambda: client.ready)
        assert_right(await read_all(stream), 20, 60)
        assert client.restarts == 0


@on_uvloop
async def test_a_stall_of_this_process_is_not_blamed_on_the_engine() -> None:
    """After 5 s without the event loop everything sent meanwhile is still there, and the engine is kept."""
    async with running(limits=Limits(suspect_after=2.0, dead_after=4.0, step_deadline=4.0)) as client:
        stream = submit(client, SLOW, 20, max_tokens=300)
        await read_tokens(stream, 1)
        time.sleep(5.0)  # noqa: ASYNC251 - the stall is the point
        events = await read_all(stream)
        assert isinstance(events[-1], Finished)
        assert events[-1].reason == "length"
        assert client.restarts == 0


@on_uvloop
async def test_a_step_that_hangs_is_replaced_though_the_process_lives() -> None:
    """The heartbeat goes on while the step hangs: the step deadline ends it."""
    async with running(limits=Limits(suspect_after=3600.0, dead_after=3600.0, step_deadline=2.0)) as client:
        await asyncio.sleep(3.0)  # an idle engine sends nothing and is not late
        assert client.restarts == 0
        end = (await read_all(submit(client, HANGS)))[-1]
        assert isinstance(end, Finished)
        assert end.error_code == "engine_unavailable"
        await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
        assert_right(await read_all(submit(client, GOOD)), 20, 8)


@on_uvloop
async def test_a_model_that_cannot_load_is_not_tried_twice() -> None:
    """What the loader says reaches whoever waits, as the error it was."""
    client = EngineClient(EngineConfig(executor=UNLOADABLE, model=ModelConfig(path="/models/none")))
    await client.start()
    with pytest.raises(ModelLoadError, match="/models/none has no weights"):
        await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
    assert client.restarts == 0
    await client.close()


@on_uvloop
async def test_a_crash_loop_is_bounded() -> None:
    """An engine that dies each time it loads is given up after the set number of tries."""
    client = EngineClient(
        EngineConfig(executor=DIES_LOADING), limits=Limits(max_load_failures=3, first_backoff=0.01, max_backoff=0.02)
    )
    await client.start()
    error = await asyncio.wait_for(client.wait_failed(), 3 * PATIENCE)
    assert isinstance(error, ChatserveError)
    assert client.restarts == 2
    assert not client.ready
    await client.close()


@on_uvloop
async def test_a_deadly_request_does_not_end_the_server() -> None:
    """An engine that loads is replaced however often it dies, so that nobody can end the server by asking."""
    async with running(limits=Limits(max_load_failures=2, first_backoff=0.01, max_backoff=0.02)) as client:
        for death in range(4):
            end = (await read_all(submit(client, EXITS)))[-1]
            assert isinstance(end, Finished)
            assert end.reason == "error"
            await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
            assert client.restarts == death + 1
        assert_right(await read_all(submit(client, GOOD)), 20, 8)


@on_uvloop
async def test_other_executors_are_for_tests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration file cannot make a production engine import a module of its choice."""
    monkeypatch.delenv("CHATSERVE_TEST")
    client = EngineClient(CONFIG)
    await client.start()
    with pytest.raises(ConfigError, match="executor"):
        await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
    await client.close()


@on_uvloop
async def test_close_ends_streams_and_leaves_no_process() -> None:
    """After `close` every stream has its end and the engine is reaped; closing twice is closing once."""
    async with running() as client:
        stream = submit(client, SLOW, max_tokens=2000)
        await read_tokens(stream, 1)
        pid = client.info.pid
        await client.close()
        assert not is_alive(pid)
        assert isinstance((await read_all(stream))[-1], Finished)
    await client.close()


def left_behind() -> tuple[int, set[str]]:
    """Open descriptors of this process, and shared memory."""
    gc.collect()  # what earlier tests dropped
    return len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))


@on_uvloop
async def test_twenty_lives_leave_nothing_behind() -> None:
    """Twenty engines started and killed or closed: descriptors and shared memory as before."""

    async def one_life(kill: bool) -> None:
        async with running() as client:
            assert_right(await read_all(submit(client, GOOD, max_tokens=2)), 20, 2)
            if kill:
                os.kill(client.info.pid, signal.SIGKILL)
                await eventually(lambda: not client.ready)

    await one_life(kill=True)  # thread pool and selector exist from here on
    descriptors, memory = left_behind()
    for life in range(20):
        await one_life(kill=life % 2 == 0)
    descriptors_now, memory_now = left_behind()
    assert descriptors_now <= descriptors
    assert memory_now <= memory


PARENT = """
import asyncio, sys, uvloop
from chatserve.engine.client import EngineClient
from tests.engine.test_client import CONFIG, SLOW, HANGS, submit

async def main():
    client = EngineClient(CONFIG)
    await client.start()
    await client.wait_ready()
    stream = submit(client, {"idle": SLOW, "busy": SLOW, "hanging": HANGS}[sys.argv[1]], max_tokens=2000)
    await stream.next()  # its start is told before its first step runs
    if sys.argv[1] == "idle":
        stream.abort()
        await client.state()
    print(client.info.pid, flush=True)
    await asyncio.sleep(60)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy", "hanging"])
def test_no_orphan_after_the_api_process_is_killed(state: str) -> None:
    """kill -9 of the parent: the engine is gone long before what it was doing would have ended."""
    with subprocess.Popen([sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        deadline = time.monotonic() + PATIENCE
        while is_alive(pid):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.02)


@on_uvloop
async def test_signals_of_the_terminal_do_not_end_the_engine() -> None:
    """Ctrl-C and a group-wide SIGTERM are for the API process, which drains before it stops its engine."""
    async with running() as client:
        stream = submit(client, SLOW, 20, max_tokens=20)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.info.pid, number)
        assert_right(await read_all(stream), 20, 20)
        assert client.restarts == 0


@on_uvloop
async def test_an_engine_whose_socket_is_broken_counts_as_dead() -> None:
    """A child that cannot be talked to is killed and replaced, and closing right after starting does not hang."""
    child = EngineChild(CONFIG)
    child.socket.close()
    client = EngineClient(CONFIG, child)
    await client.start()
    await asyncio.wait_for(client.wait_ready(), 2 * PATIENCE)
    assert client.restarts == 1
    assert not is_alive(child.pid)
    assert_right(await read_all(submit(client, GOOD)), 20, 8)
    await client.close()
    hasty = EngineClient(CONFIG)
    await hasty.start()
    await asyncio.wait_for(hasty.close(), PATIENCE)
