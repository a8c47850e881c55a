"""``chatserve chat``: a conversation in the terminal with any OpenAI-compatible server.

Reads lines (with editing and history where there is a terminal), streams answers, keeps the conversation. Ctrl-C stops
the answer and keeps the program; Ctrl-D ends it. With input from a pipe it answers once and exits. Knows the terminal;
`chat_client` knows the wire.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from chatserve.cli.chat_client import AnswerStats, ChatClient, RemoteError
from chatserve.cli.interrupts import Interrupts
from chatserve.errors import ConfigError

HISTORY_LINES = 1000
HELP = """\
/new           forget the conversation and start again
/retry         ask the last question again
/system TEXT   set the system prompt (without TEXT: remove it)
/help          this list
/quit          leave, like Ctrl-D

Ctrl-C stops an answer; what has arrived stays part of the conversation."""

# A terminal obeys control characters, and the text is the model's: all but tab and newline are dropped.
_HARMLESS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


class Screen:
    """Writes answers to standard output and everything else where it does not disturb a pipe."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._terminal = sys.stdout.isatty()
        self._colour = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def answer(self, text: str) -> None:
        """A piece of the answer, at once."""
        sys.stdout.write(text.translate(_HARMLESS) if self._terminal else text)
        sys.stdout.flush()

    def end_answer(self, note: str) -> None:
        """Close the answer's line; the note is for people, so a pipe does not get it."""
        sys.stdout.write("\n")
        sys.stdout.flush()
        if note and self.interactive:
            self.note(note)

    def note(self, text: str) -> None:
        """Something the program says, dimmed where colours are wanted."""
        shown = text.translate(_HARMLESS)
        click.echo(f"\x1b[2m{shown}\x1b[0m" if self._colour else shown, err=not self._terminal)

    def error(self, text: str) -> None:
        """Something that went wrong."""
        click.echo(f"Error: {text.translate(_HARMLESS)}", err=True)


class Conversation:
    """What has been said, in the form the server wants it."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self._turns: list[dict[str, str]] = []

    def messages(self) -> list[dict[str, str]]:
        """System prompt, if there is one, and all turns."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self._turns

    def ask(self, text: str) -> None:
        """Add a question."""
        self._turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """Add what was answered; with nothing answered, the question goes too."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def take_back(self) -> str | None:
        """Remove the last question and its answer; return the question."""
        while self._turns and self._turns[-1]["role"] == "assistant":
            self._turns.pop()
        return self._turns.pop()["content"] if self._turns else None

    def clear(self) -> None:
        """Forget all turns."""
        self._turns.clear()


class ChatProgram:
    """The read-answer loop."""

    def __init__(
        self, client: ChatClient, model: str, conversation: Conversation, sampling: dict[str, object], screen: Screen
    ) -> None:
        self._client = client
        self._model = model
        self._conversation = conversation
        self._sampling = sampling
        self._screen = screen
        self._interrupts = Interrupts()
        self._commands: dict[str, Callable[[str], None]] = {
            "/new": self._new,
            "/retry": self._retry,
            "/system": self._system,
            "/help": lambda _: self._screen.note(HELP),
        }

    def run(self) -> None:
        """Until Ctrl-D or ``/quit``."""
        with self._interrupts.installed():
            self._converse()

    def _converse(self) -> None:
        self._screen.note(f"{self._model} at {self._client.url}. /help lists commands, Ctrl-D leaves.")
        while True:
            try:
                with self._interrupts.allowed():
                    line = input("> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                self._screen.note("Ctrl-D leaves.")
                continue
            word, _, rest = line.partition(" ")
            if word == "/quit":
                return
            if word in self._commands:
                self._commands[word](rest.strip())
            elif word.startswith("/") and word.count("/") == 1:
                self._screen.note(f"There is no command {word}; /help lists them.")
            elif line:
                self.ask(line)

    def ask(self, text: str) -> bool:
        """One turn; false where it failed. Ctrl-C ends the answer and counts as success."""
        self._conversation.ask(text)
        parts: list[str] = []
        stats = AnswerStats()
        problem: str | None = None
        stopped = False
        stream = self._client.stream(self._model, self._conversation.messages(), self._sampling, stats)
        try:
            with contextlib.closing(stream) as pieces, self._interrupts.allowed():
                for piece in pieces:
                    parts.append(piece)
                    self._screen.answer(piece)
        except KeyboardInterrupt:
            stopped = True
        except RemoteError as error:
            problem = error.message
        if parts or problem is None:
            self._screen.end_answer(" · ".join(filter(None, (stats.line(), "stopped" if stopped else ""))))
        if problem is not None:
            self._screen.error(problem)
        self._conversation.answered("".join(parts))
        return problem is None

    def _new(self, _: str) -> None:
        self._conversation.clear()
        self._screen.note("A new conversation.")

    def _retry(self, _: str) -> None:
        question = self._conversation.take_back()
        if question is None:
            self._screen.note("There is nothing to ask again.")
        else:
            self.ask(question)

    def _system(self, text: str) -> None:
        self._conversation.system = text or None
        self._screen.note("The system prompt is set." if text else "The system prompt is removed.")


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Editing keys and a history that survives the program, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "chatserve" / "chat_history"
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", envvar="CHATSERVE_URL", show_default=True, help="The server.")
@click.option("--api-key", envvar=["CHATSERVE_API_KEY", "OPENAI_API_KEY"], help="Key the server asks for.")
@click.option("--model", help="Model to ask; by default the first one the server lists.")
@click.option("--system", help="System prompt.")
@click.option("--temperature", type=float, help="0 always takes the likeliest token.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens of this total probability.")
@click.option("--top-k", type=int, help="Sample from this many likeliest tokens.")
@click.option("--min-p", type=float, help="Drop tokens this much less likely than the likeliest.")
@click.option("--repetition-penalty", type=float, help="Above 1 discourages repetition.")
@click.option("--max-tokens", type=int, help="Tokens of one answer at most.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
def chat(url: str, api_key: str | None, model: str | None, system: str | None, **sampling: float | int | None) -> None:
    """Chat in the terminal with any OpenAI-compatible server.

    With text from a pipe it answers that text and exits: echo "Say hi" | chatserve chat
    """
    client = ChatClient(url, api_key)
    screen = Screen()
    text = None if screen.interactive else sys.stdin.read().strip()
    if text == "":
        raise ConfigError("There is nothing to ask: standard input was empty.")
    chosen: dict[str, object] = {name: value for name, value in sampling.items() if value is not None}
    program = ChatProgram(client, model or client.first_model(), Conversation(system), chosen, screen)
    if text is not None:
        if not program.ask(text):
            raise SystemExit(1)
        return
    with _line_editing():
        program.run()
