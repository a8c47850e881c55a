"""`chatserve chat` as a user runs it: a real process, a real terminal where one is needed, a real server."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chatserve.cli.chat import ChatProgram, Conversation, Screen
from chatserve.cli.chat_client import ChatClient
from chatserve.config import ServerConfig
from chatserve.errors import ConfigError
from tests.fakes import FakeEngineClient, Script, ids, say, write_tokenizer_folder
from tests.server.live import live_server
from tests.waiting import PATIENCE

pytestmark = pytest.mark.asyncio

COMMAND = (sys.executable, "-m", "chatserve", "chat")
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes standard input the controlling terminal, so that Ctrl-C becomes a signal as it does for a user."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a model."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("tiny"))


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A user without keys, colours settings or history of their own."""
    dropped = ("CHATSERVE_", "OPENAI_", "NO_COLOR", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "HOME": str(home), "TERM": "xterm", **extra}


async def pipe(home: Path, text: str, *arguments: str, **extra: str) -> tuple[int, str, str]:
    """Run with a pipe as input; status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home, **extra),
    )
    async with asyncio.timeout(2 * PATIENCE):
        out, err = await process.communicate(text.encode())
    return process.returncode or 0, out.decode(), err.decode()


class Terminal:
    """The program in a terminal: what it shows, and keys to press."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.shown = ""
        self._master = master
        self._new = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the program has gone
            asyncio.get_running_loop().remove_reader(self._master)
            return
        self.shown += data.decode(errors="replace")
        self._new.set()

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    async def enter(self, line: str) -> None:
        """Type a line once the program waits for one."""
        await self.prompt()
        self.press(f"{line}\r")

    async def until(self, text: str, count: int = 1) -> None:
        """Wait until a text has been shown so many times."""
        async with asyncio.timeout(PATIENCE):
            while self.shown.count(text) < count:
                self._new.clear()
                await self._new.wait()

    async def prompt(self) -> None:
        """Wait until the program waits for a line."""
        async with asyncio.timeout(PATIENCE):
            while not self.shown.endswith("> "):
                self._new.clear()
                await self._new.wait()

    async def end(self) -> int:
        """Press Ctrl-D at the prompt and wait; the exit status."""
        await self.prompt()
        async with asyncio.timeout(PATIENCE):
            self.press("\x04")
            return await self.process.wait()


@asynccontextmanager
async def terminal(home: Path, *arguments: str, **extra: str) -> AsyncIterator[Terminal]:
    """The program running in a terminal of its own, as its foreground job."""
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        TAKE_TERMINAL,
        *COMMAND,
        *arguments,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(home, **extra),
        start_new_session=True,
    )
    os.close(slave)
    shown = Terminal(process, master)
    try:
        await shown.until("> ")
        yield shown
    finally:
        asyncio.get_running_loop().remove_reader(master)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)


async def test_a_pipe_gets_the_answer_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    """Standard output is the answer and a newline, so that it can be piped on; flags reach the server."""
    engine = FakeEngineClient(say("Grüße!"))
    async with live_server(folder, engine) as live:
        flags = ("--url", live.url, "--system", "Be brief.", "--temperature", "0", "--max-tokens", "50", "--seed", "7")
        assert await pipe(tmp_path, "hi there\n", *flags) == (0, "Grüße!\n", "")
        assert (await pipe(tmp_path, "again", CHATSERVE_URL=f"{live.url}/v1"))[:2] == (0, "Grüße!\n")
    first = engine.submissions[0]
    assert first.text.startswith("<257>system\nBe brief.<258>\n<257>user\nhi there<258>")
    assert (first.sampling.temperature, first.sampling.max_tokens, first.sampling.seed) == (0, 50, 7)


async def test_problems_are_one_clear_line(folder: Path, tmp_path: Path) -> None:
    """No server, no key, a wrong model, a broken address, nothing to ask: one line on stderr and a status, no trace."""
    server = ServerConfig(port=0, drain_timeout=2.0, api_keys=("sk-1",))
    async with live_server(folder, FakeEngineClient(), server=server) as live:
        cases = {
            ("hi", "--url", "http://127.0.0.1:1"): "chatserve serve",
            ("hi", "--url", live.url): "--api-key",
            ("hi", "--url", live.url, "--api-key", "sk-1", "--model", "other"): "other",
            ("hi", "--url", "ftp://x"): "not the address",
            ("hi", "--url", "http://x:y"): "not the address",
            ("", "--url", live.url): "nothing to ask",
        }
        for (text, *arguments), words in cases.items():
            status, out, err = await pipe(tmp_path, text, *arguments)
            assert status != 0
            assert out == ""
            assert words in err
            assert "Traceback" not in err
            assert err.count("\n") == 1, err
        assert (await pipe(tmp_path, "hi", "--url", live.url, CHATSERVE_API_KEY="sk-1"))[:2] == (0, "Hello!\n")
        assert (await pipe(tmp_path, "hi", "--url", live.url, OPENAI_API_KEY="sk-1"))[:2] == (0, "Hello!\n")


async def test_an_answer_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    """A stream without its end is not taken for a whole answer, and what came is still printed."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        if request.startswith(b"GET"):
            writer.write(b'{"data":[{"id":"m"}]}')
        else:
            writer.write(b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(broken, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        status, out, err = await pipe(tmp_path, "hi", "--url", f"http://127.0.0.1:{port}")
    assert (status, out) == (1, "half\n")
    assert "before it was complete" in err


async def test_a_failure_in_the_middle(folder: Path, tmp_path: Path) -> None:
    """The server's words reach the user, after what had come, and the status tells."""
    failure = say("half", reason="error", error_code="internal_error", error_message="Numbers went bad.")
    async with live_server(folder, FakeEngineClient(failure)) as live:
        assert await pipe(tmp_path, "hi", "--url", live.url) == (1, "half\n", "Error: Numbers went bad.\n")


async def test_a_conversation_in_a_terminal(folder: Path, tmp_path: Path) -> None:
    """Turns build on each other; /new, /retry and /system do what they say; costs are shown; Ctrl-D leaves with 0."""
    engine = FakeEngineClient(say("first answer", cached_tokens=5))
    async with live_server(folder, engine) as live, terminal(tmp_path, "--url", live.url) as screen:
        await screen.enter("one")
        await screen.until("tok/s")
        assert "(5 from cache)" in screen.shown
        assert "\x1b[2mprompt" in screen.shown
        engine.script = say("second answer")
        await screen.enter("two")
        await screen.until("second answer")
        await screen.until("tok/s", 2)
        await screen.enter("/retry")
        await screen.until("tok/s", 3)
        await screen.enter("/system Be kind.")
        await screen.until("is set")
        await screen.enter("/new")
        await screen.until("new conversation")
        await screen.enter("three")
        await screen.until("tok/s", 4)
        await screen.enter("/nonsense")
        await screen.until("no command /nonsense")
        await screen.enter("/help")
        await screen.until("/retry         ask")
        assert await screen.end() == 0
    _, two, retried, three = (submission.text for submission in engine.submissions)
    assert "user\none<258>\n<257>assistant\nfirst answer<258>\n<257>user\ntwo<258>" in two
    assert retried == two
    assert three.startswith("<257>system\nBe kind.<258>\n<257>user\nthree")
    history = tmp_path / ".local" / "state" / "chatserve" / "chat_history"
    assert "two" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


async def test_ctrl_c_stops_the_answer_only(folder: Path, tmp_path: Path) -> None:
    """The engine stops, the program goes on, and the partial answer is part of the conversation."""
    engine = FakeEngineClient(say("word " * 100, delay=0.01, hang=True))
    async with live_server(folder, engine) as live, terminal(tmp_path, "--url", live.url) as screen:
        await screen.enter("go")
        await screen.until("word word")
        screen.press("\x03")
        async with asyncio.timeout(PATIENCE):
            await engine.submissions[0].aborted_event.wait()
        await screen.until("stopped")
        engine.script = say("fine")
        await screen.prompt()
        screen.press("\x03")
        await screen.until("Ctrl-D leaves", 2)
        await screen.enter("more")
        await screen.until("fine")
        assert await screen.end() == 0
    assert "assistant\nword word" in engine.submissions[1].text


class NervousScreen(Screen):
    """A screen on which Ctrl-C is pressed each time the program writes something of its own."""

    def note(self, text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        super().note(text)

    def end_answer(self, note: str) -> None:
        signal.raise_signal(signal.SIGINT)
        super().end_answer(note)


async def test_impatient_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A second Ctrl-C, while the program closes the first one's answer or goes back to the prompt, ends nothing."""
    lines = ["go", "/system Be kind.", "/new", "/quit"]
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    client = ChatClient("http://127.0.0.1:1")  # refused at once: the program says so and goes on
    handler = signal.getsignal(signal.SIGINT)
    ChatProgram(client, "m", Conversation(None), {}, NervousScreen()).run()
    assert lines == []
    assert signal.getsignal(signal.SIGINT) is handler
    assert "No server answers" in capsys.readouterr().err


async def test_the_terminal_obeys_the_user_not_the_model(folder: Path, tmp_path: Path) -> None:
    """Control sequences in an answer do not reach the terminal; NO_COLOR keeps ours away too."""
    engine = FakeEngineClient(Script(tokens=ids("a\x1b]0;owned\x07b\x1b[31mc\td\ne")))
    async with (
        live_server(folder, engine) as live,
        terminal(tmp_path, "--url", live.url, NO_COLOR="1") as screen,
    ):
        await screen.enter("go")
        await screen.until("tok/s")
        assert await screen.end() == 0
    assert "a]0;ownedb[31mc" in screen.shown
    assert "\x1b]0;" not in screen.shown
    assert "\x1b[2m" not in screen.shown


async def test_a_signal_ends_it_quietly(folder: Path, tmp_path: Path) -> None:
    """SIGTERM at the prompt ends the program without a stack trace."""
    async with live_server(folder, FakeEngineClient()) as live, terminal(tmp_path, "--url", live.url) as screen:
        screen.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            await screen.process.wait()
    assert "Traceback" not in screen.shown


async def test_addresses() -> None:
    """With or without scheme, path and /v1: the same server; anything else is refused in words."""
    for url in ("127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"):
        assert ChatClient(url).url == "http://127.0.0.1:8000"
    assert "secret" not in ChatClient("http://user:secret@host").url
    with pytest.raises(ConfigError):
        ChatClient("http://")


async def test_it_starts_light() -> None:
    """The terminal chat imports neither torch nor the server."""
    heavy = "('torch', 'transformers', 'starlette')"
    code = f"import sys, chatserve.cli.chat; print([name for name in {heavy} if name in sys.modules])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.strip() == b"[]"
