"""Stand-ins for slow parts: an engine client that follows a script, and a model folder without a model.

`FakeEngineClient` has the surface of `chatserve.engine.client.EngineClient` and lives in the test's own event loop.
`write_tokenizer_folder` writes a byte-level tokenizer (token id = byte value, then control tokens) with a ChatML-like
template, so that tests read token ids by eye and download nothing.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chatserve.config import Config, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig, TenancyConfig
from chatserve.engine.client import Delta, EngineStream, _Mailbox
from chatserve.engine.protocol import (
    EngineInfo,
    EngineState,
    EngineStats,
    ExplainReply,
    Finished,
    FinishReason,
    PurgeReply,
    Started,
    TenantState,
)
from chatserve.errors import EngineUnavailableError
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import SampleLogprobs
from chatserve.scope import Scope

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
VOCAB_SIZE = 259
MODEL = "tiny"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' and loop.index > 1 and messages[loop.index0 - 1]['role'] == 'user' %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer_folder(folder: Path) -> Path:
    """A prepared model folder without weights: every byte is a token, then three control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab={_byte_char(b): b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB_SIZE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _byte_char(byte: int) -> str:
    """GPT-2's printable stand-in for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def ids(text: str | bytes) -> list[int]:
    """Token ids of a text: its UTF-8 bytes."""
    return list(text.encode() if isinstance(text, str) else text)


@dataclass
class Script:
    """What the fake engine does with one choice of one request.

    Attributes:
        tokens: sampled one per step.
        reason: how it ends after them; ``stop`` appends ``stop_token``.
        delay: seconds before each step.
        start_delay: seconds in the queue.
        error_code: of an end with reason ``error``.
        hang: never end.
    """

    tokens: Sequence[int]
    reason: FinishReason = "stop"
    stop_token: int | None = IM_END
    delay: float = 0.0
    start_delay: float = 0.0
    error_code: str | None = None
    error_message: str | None = None
    cached_tokens: int = 0
    hang: bool = False


@dataclass
class Submission:
    """A request as the fake engine got it.

    Attributes:
        num_sent: tokens sampled for it so far, all choices.
        aborted: an abort arrived before its end.
    """

    request_id: int
    prompt: list[int]
    sampling: SamplingParams
    scopes: tuple[Scope, ...]
    priority: int
    priority_class: int
    tenant: str
    num_sent: int = 0
    aborted: bool = False
    ended: bool = False
    aborted_event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        """The prompt as text, control tokens as ``<n>``."""
        return "".join(chr(t) if t < 128 else f"<{t}>" for t in self.prompt)


def say(text: str | bytes, **options: object) -> Script:
    """A script that answers with a text."""
    return Script(tokens=ids(text), **options)  # type: ignore[arg-type]


class FakeStream(EngineStream):
    """One request's events, filled by `FakeEngineClient`."""

    def __init__(
        self, client: FakeEngineClient, submission: Submission, on_start: Callable[[], None] | None = None
    ) -> None:
        self.on_start = on_start
        self.request_id = submission.request_id
        self.submission = submission
        self._fake = client
        self._mailbox = _Mailbox(submission.sampling.n, on_start)  # delivery is the real client's
        self.open = self._mailbox.open_choices
        self.running = False

    @property
    def started(self) -> bool:
        return self.running or not self.open

    def abort(self) -> None:
        self._fake.abort(self)

    def __del__(self) -> None:
        pass

    def put(self, events: Iterable[Started | Delta | Finished]) -> None:
        self._mailbox.events.extend(events)
        self._mailbox.deliver()


class FakeEngineClient:
    """Follows ``script(submission, choice)`` for every request; everything it was asked is in ``submissions``.

    Attributes:
        script: chooses what each choice says; set it before the request. Of ``max_running`` requests at once the
            rest wait, as for a full batch.
    """

    def __init__(
        self, script: Callable[[Submission, int], Script] | Script | None = None, *, max_running: int = 1000
    ) -> None:
        self.script: Callable[[Submission, int], Script] | Script = script or say("Hello!")
        self.submissions: list[Submission] = []
        self.stats = EngineStats(blocks_total=64, blocks_free=64)
        self.restarts = 0
        self.failure = None
        self._slots = asyncio.Semaphore(max_running)
        self.info = EngineInfo(
            model=MODEL,
            weights_revision="weights-1",
            vocab_size=VOCAB_SIZE,
            max_model_len=1024,
            max_tokens_in_pool=2048,
            block_size=16,
            num_blocks=64,
            kv_bytes_per_token=1,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            dtype="float32",
            device="cpu",
            threads=1,
            pid=0,
            eos_token_ids=(IM_END,),
        )
        self.ready = True
        self._streams: dict[int, FakeStream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._callbacks: list[Callable[[bool], None]] = []
        self._tenant_callbacks: list[Callable[[Sequence[TenantState]], None]] = []
        self._totals: dict[str, TenantState] = {}
        self.tenants: dict[str, tuple[float, float, float]] = {}
        self.purged: list[str] = []

    async def start(self) -> None:
        """Nothing to spawn."""

    async def wait_ready(self) -> EngineInfo:
        return self.info

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def make_room(self, count: int) -> None:
        """So many more may run at once."""
        for _ in range(count):
            self._slots.release()

    @property
    def num_waiting(self) -> int:
        return sum(not stream.running for stream in self._streams.values())

    @property
    def num_running(self) -> int:
        """Requests that have started and not ended."""
        return sum(stream.running for stream in self._streams.values())

    def on_ready_change(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    def on_tenants(self, callback: Callable[[Sequence[TenantState]], None]) -> None:
        self._tenant_callbacks.append(callback)

    def set_tenant(self, tenant: str, *, weight: float = 1.0, kv_floor: float = 0.0, kv_cap: float = 1.0) -> None:
        self.tenants[tenant] = (weight, kv_floor, kv_cap)

    async def purge(self, tenant: str) -> PurgeReply:
        self.purged.append(tenant)
        return PurgeReply(0, 0, 0)

    async def explain(self, prompt: bytes, scopes: tuple[Scope, ...]) -> ExplainReply:
        return ExplainReply(0, len(prompt) // 4, 0, 0, "never_seen")

    def count(self, tenant: str, *, prompt: int = 0, cached: int = 0, generated: int = 0, blocks: int = 0) -> None:
        """Add to a tenant's counters and report them, as the engine does."""
        old = self._totals.get(tenant, TenantState(tenant, 0, 0, 0, 0, 0, 0, 0.0))
        new = self._totals[tenant] = TenantState(
            tenant,
            old.prompt_tokens + prompt,
            old.cached_tokens + cached,
            old.computed_tokens + prompt - cached,
            old.generated_tokens + generated,
            old.device_blocks + blocks,
            0,
            0.0,
        )
        for callback in self._tenant_callbacks:
            callback((new,))

    def submit(
        self,
        prompt: bytes,
        sampling: SamplingParams,
        *,
        scopes: tuple[Scope, ...],
        priority: int = 0,
        priority_class: int = 0,
        tenant: str = "",
        on_start: Callable[[], None] | None = None,
    ) -> FakeStream:
        if not self.ready:
            raise EngineUnavailableError("not ready")
        assert sampling.seed is not None
        submission = Submission(
            len(self.submissions), array("i", prompt).tolist(), sampling, scopes, priority, priority_class, tenant
        )
        self.submissions.append(submission)
        stream = FakeStream(self, submission, on_start)
        self._streams[submission.request_id] = stream
        task = asyncio.get_running_loop().create_task(self._play(stream))
        self._tasks[submission.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(submission.request_id, None))
        return stream

    def abort(self, stream: FakeStream) -> None:
        submission = stream.submission
        if submission.ended:
            return
        submission.aborted = submission.ended = True
        submission.aborted_event.set()
        self._streams.pop(submission.request_id, None)
        if (task := self._tasks.get(submission.request_id)) is not None:
            task.cancel()

    async def state(self) -> EngineState:
        return EngineState(0, self.stats, 0, 0, len(self._streams))

    def die(self, *, ready_again: bool = False) -> None:
        """Every stream ends with an error at once, as when the engine process is killed."""
        self.set_ready(False)
        self._totals.clear()
        for stream in list(self._streams.values()):
            self._tasks[stream.submission.request_id].cancel()
            self._end(
                stream,
                [
                    Finished(stream.request_id, choice, "error", None, "engine_unavailable", "The engine died.")
                    for choice in sorted(stream.open)
                ],
            )
        self.stats = EngineStats()
        if ready_again:
            self.restarts += 1
            self.set_ready(True)

    def set_ready(self, ready: bool) -> None:
        """Flip readiness and tell whoever asked to know."""
        self.ready = ready
        for callback in self._callbacks:
            callback(ready)

    async def _play(self, stream: FakeStream) -> None:
        submission = stream.submission
        scripts = [
            self.script if isinstance(self.script, Script) else self.script(submission, choice)
            for choice in range(submission.sampling.n)
        ]
        await asyncio.sleep(scripts[0].start_delay)
        async with self._slots:
            await self._run(stream, scripts)

    async def _run(self, stream: FakeStream, scripts: Sequence[Script]) -> None:
        submission = stream.submission
        stream.running = True
        if stream.on_start is not None:
            stream.on_start()
        self.count(submission.tenant, prompt=len(submission.prompt), cached=scripts[0].cached_tokens)
        stream.put([Started(submission.request_id, len(submission.prompt), scripts[0].cached_tokens)])
        limit = submission.sampling.max_tokens or 10**9
        position = 0
        while stream.open:
            await asyncio.sleep(max(scripts[c].delay for c in stream.open))
            await self.before_step(position)
            events: list[Started | Delta | Finished] = []
            for choice in sorted(stream.open):
                events += self._step(stream, choice, scripts[choice], position, limit)
            position += 1
            if stream.open:
                stream.put(events)
            else:
                self._end(stream, events)

    async def before_step(self, position: int) -> None:
        """For subclasses that hold an answer before its token at ``position``."""

    def _step(
        self, stream: FakeStream, choice: int, script: Script, position: int, limit: int
    ) -> list[Started | Delta | Finished]:
        request_id, events = stream.request_id, list[Started | Delta | Finished]()
        if position < len(script.tokens) and position < limit:
            events.append(self._delta(stream, choice, script.tokens[position]))
            if position + 1 == limit:
                stream.open.discard(choice)
                events.append(Finished(request_id, choice, "length"))
            return events
        if script.hang:
            return events
        stop_token = script.stop_token if script.reason == "stop" else None
        if stop_token is not None:
            events.append(self._delta(stream, choice, stop_token))
        stream.open.discard(choice)
        events.append(Finished(request_id, choice, script.reason, stop_token, script.error_code, script.error_message))
        return events

    def _delta(self, stream: FakeStream, choice: int, token: int) -> Delta:
        stream.submission.num_sent += 1
        self.count(stream.submission.tenant, generated=1)
        asked = stream.submission.sampling.logprobs
        logprobs = None
        if asked is not None:
            top = [token, *(t for t in range(97, 123) if t != token)][:asked]
            logprobs = SampleLogprobs(
                -0.5, array("i", top).tobytes(), array("f", [-0.5 - i for i in range(len(top))]).tobytes()
            )
        return Delta(choice, token, logprobs)

    def _end(self, stream: FakeStream, events: list[Started | Delta | Finished]) -> None:
        stream.submission.ended = True
        stream.open.clear()
        self._streams.pop(stream.request_id, None)
        stream.put(events)


def make_config(
    folder: Path, *, server: ServerConfig | None = None, max_queued: int = 1024, admin_key: str | None = None
) -> Config:
    """A configuration for the fake engine: any free port, a short drain, and no heartbeat, so that nothing is noticed
    because one failed.
    """
    return Config(
        engine=EngineConfig(
            model=ModelConfig(path=str(folder), name=MODEL),
            scheduler=SchedulerConfig(max_num_queued_reqs=max_queued),
        ),
        server=server or ServerConfig(port=0, drain_timeout=2.0, heartbeat_interval=3600.0),
        tenancy=TenancyConfig(admin_api_key=admin_key),
    )
