"""Conversations at work: what the commands of all WebSockets act on.

Turns a `ChatSend` into a stored user message, one engine request and one `LiveGeneration` per answer; writes the logs
as the engine produces; closes each answer exactly once, in the store first and on the wire second, so that a client
that has seen the end can build on it. Knows conversations, the generation service and idempotency; knows no sockets.
`ws_connection` is its caller; `tenant_sync` tells it of deleted tenants.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from chatserve.errors import (
    ChatserveError,
    ConflictError,
    GenerationFailedError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedParameterError,
)
from chatserve.server import ws_protocol as wire
from chatserve.server.errors import internal_error
from chatserve.server.generation import (
    ChoiceDone,
    Event,
    Generation,
    GenerationRequest,
    PromptStarted,
    TextDelta,
    Usage,
)
from chatserve.server.ws_generation import LiveGeneration
from chatserve.server.ws_params import parse_params
from chatserve.server.ws_recent import Recent
from chatserve.server.ws_timing import Stopwatch
from chatserve.sessions.conversation import Message, new_id, new_message
from chatserve.text.chat_template import ChatMessage

if TYPE_CHECKING:
    from chatserve.server.auth import Principal
    from chatserve.server.context import ServerContext
    from chatserve.sessions.store import ConversationStore
    from chatserve.text.tokenizer import Tokenizer

QUEUE_NOTICE_SECONDS = 0.5
"""How often a waiting client hears about its place, where that has changed."""

_TRIM_TOKENS = 8
_FIRST_SENDER_LEFT = "The socket that sent this first has gone before it was accepted; send it again."


@dataclass(frozen=True)
class Sent:
    """What a `ChatSend` led to: its answer, and the logs of what was asked for."""

    ack: wire.SendAck
    answers: list[LiveGeneration]


class Turn:
    """One engine request and the answers it produces."""

    def __init__(self, answers: list[LiveGeneration], generation: Generation, position: int) -> None:
        self.answers = answers
        self.generation = generation
        self.position = position
        self.stopwatches = [Stopwatch() for _ in answers]
        self.closing: set[str] = set()
        self.task: asyncio.Task[None] | None = None

    def append(self, delta: TextDelta) -> None:
        """Write the log of an answer that has not begun to end."""
        live = self.answers[delta.choice]
        if live.gen not in self.closing:
            self.stopwatches[delta.choice].tokens(len(delta.token_ids))
            live.append(delta.text, delta.token_ids)

    def deliver(self, events: Sequence[Event]) -> bool:
        """Take events that are text only; see `Generation.deliver_to`."""
        if not all(type(event) is TextDelta for event in events):
            return False
        for event in events:
            assert isinstance(event, TextDelta)
            self.append(event)
        return True

    @property
    def open_answers(self) -> list[LiveGeneration]:
        """Answers that have not begun to end."""
        return [answer for answer in self.answers if answer.gen not in self.closing]


class ChatHub:
    """Every conversation and every running answer of this process."""

    def __init__(self, context: ServerContext, store: ConversationStore) -> None:
        self.boot = new_id("b")
        self._context = context
        self._store = store
        self._turns: dict[str, Turn] = {}  # running, by generation id
        self._recent = Recent[Sent]()
        self._log = structlog.get_logger("chatserve.websocket")

    def active(self, tenant: str) -> list[wire.ActiveGeneration]:
        """The tenant's running answers."""
        return [
            wire.ActiveGeneration(gen, live.conv, live.msg, live.end, "running" if live.started else "queued")
            for gen, turn in self._turns.items()
            for live in turn.answers
            if live.gen == gen and live.tenant == tenant
        ]

    async def send(self, principal: Principal, command: wire.ChatSend) -> Sent:
        """Accept a user message and start its answers; the same id within ten minutes gets what the first one got.

        Raises:
            ChatserveError: refused; nothing was stored or started.
        """
        tenant = principal.tenant
        known = self._recent.find_send(tenant, command.id)
        if known is not None:
            return await asyncio.shield(known)
        future = self._recent.add_send(tenant, command.id)
        try:
            sent = await self._start(principal, command)
        except BaseException as error:
            self._recent.drop_send(tenant, command.id)
            future.set_exception(_for_second_sender(error))
            future.exception()  # seen by a second sender of this id only, and usually there is none
            raise
        future.set_result(sent)
        return sent

    async def cancel(self, tenant: str, gen: str, *, reason: str = "cancelled") -> None:
        """Stop one answer and keep what was delivered. Idempotent; one that has ended stays as it is.

        Raises:
            NotFoundError: never heard of it, or it is another tenant's.
        """
        turn = self._turns.get(gen)
        live = None if turn is None else next(answer for answer in turn.answers if answer.gen == gen)
        known = self._recent.has_ended(tenant, gen) if live is None else live.tenant == tenant
        if not known:
            raise NotFoundError("No such generation; it may have ended long ago.", param="gen")
        if turn is not None and live is not None:
            await self._close(turn, live, reason=reason)

    async def release(self, answers: Sequence[LiveGeneration]) -> None:
        """A socket has gone: answers that nobody watches any more are stopped at once."""
        for live in answers:
            if live.num_watches == 0 and live.terminal is None:
                await self.cancel(live.tenant, live.gen, reason="abandoned")

    async def forget(self, tenant: str) -> None:
        """Drop what is kept of a tenant, which was deleted; its running answers were ended with its keys."""
        self._recent.forget(tenant)
        await self._store.forget(tenant)

    async def _start(self, principal: Principal, command: wire.ChatSend) -> Sent:
        context = self._context
        _refuse_unimplemented(command)
        context.service.check_tenant(principal)
        if not isinstance(command.content, str):
            raise InvalidRequestError("content is required: the text of the message.", param="content")
        params = parse_params(
            command.params,
            context.model_name,
            context.service.engine_info().vocab_size,
            context.config.server,
            context.sampling_defaults,
        )
        scopes = context.scopes_for(principal, params.cache_salt)
        history, new = await self._prompt(principal.tenant, command)
        chat = [ChatMessage(m.role, m.content, token_ids=m.token_ids) for m in (*history, *new)]
        # What is said of a prompt is of these here, and who knows of which where there are two.
        prompt_field = "content" if command.system is None else None
        try:
            rendered = await context.service.render_chat_off_loop(chat, scopes[-1])
        except InvalidRequestError as error:
            error.param = error.param and prompt_field
            raise
        position = context.engine.num_waiting + 1
        request = GenerationRequest(
            prompt_ids=rendered.token_ids,
            sampling=params.sampling,
            scopes=scopes,
            principal=principal,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            priority=params.priority,
            flex=params.flex,
            prompt_field=prompt_field,
            max_tokens_field=params.max_tokens_field,
        )
        generation = context.service.start(request)
        user = new[-1]
        answers = [new_message("assistant", "", parent=user.id, state="running") for _ in range(params.sampling.n)]
        try:
            conv = command.conv
            if conv is None:
                conv = await self._store.create(principal.tenant, [*new, *answers])
            else:
                await self._store.append(principal.tenant, conv, [*new, *answers])
        except BaseException:
            generation.cancel()
            raise
        lives = [LiveGeneration(new_id("g"), conv, answer.id, principal.tenant) for answer in answers]
        ack = wire.SendAck(command.id, conv, user.id, [wire.GenerationRef(live.gen, live.msg) for live in lives])
        turn = Turn(lives, generation, position)
        self._turns.update((live.gen, turn) for live in lives)
        turn.task = asyncio.create_task(self._run(turn), name=f"turn {lives[0].gen}")
        return Sent(ack, lives)

    async def _prompt(self, tenant: str, command: wire.ChatSend) -> tuple[list[Message], list[Message]]:
        """The stored messages before the new ones, and the new ones (system prompt, user message)."""
        assert isinstance(command.content, str)
        parent = command.parent
        if command.conv is None:
            if isinstance(parent, str):
                raise InvalidRequestError("parent needs conv: which conversation it is in.", param="conv")
            parent = None
        elif not isinstance(parent, str):
            head = await self._store.head(tenant, command.conv)  # also checks that the conversation is the caller's
            parent = None if parent is None else head.id
        if parent is None:
            new = [] if not command.system else [new_message("system", command.system, parent=None)]
            new.append(new_message("user", command.content, parent=new[-1].id if new else None))
            return [], new
        if command.system is not None:
            raise InvalidRequestError("system can only be set where a conversation starts.", param="system")
        assert command.conv is not None
        history = await self._store.path(tenant, command.conv, parent)
        if history[-1].role != "assistant":
            raise ConflictError("parent must be an answer, or null for a new start.", param="parent")
        if history[-1].state == "running":
            raise ConflictError("That answer is still being written; wait for its end or cancel it.", param="parent")
        return history, [new_message("user", command.content, parent=parent)]

    async def _run(self, turn: Turn) -> None:
        """Write the logs until every answer has ended."""
        generation = turn.generation
        generation.deliver_to(turn.deliver)
        failure: ChatserveError | None = None
        queue_task = asyncio.create_task(self._tell_position(turn))
        try:
            while events := await generation.next():
                for event in events:
                    if isinstance(event, PromptStarted):
                        queue_task.cancel()
                        self._note_start(turn, event)
                    elif isinstance(event, TextDelta):
                        turn.append(event)
                    else:
                        await self._close(turn, turn.answers[event.choice], done=event)
        except ChatserveError as error:
            failure = error
        except Exception:
            self._log.exception("answer_failed", generations=[live.gen for live in turn.answers])
            failure = internal_error()
        finally:
            queue_task.cancel()
            failure = failure or GenerationFailedError("The answer ended without a reason; try again.")
            for live in turn.open_answers:
                await self._close(turn, live, failure=failure)

    def _note_start(self, turn: Turn, event: PromptStarted) -> None:
        block_size = self._context.engine.info.block_size  # known: it has just started something
        for live, stopwatch in zip(turn.answers, turn.stopwatches, strict=True):
            stopwatch.started()
            if live.gen not in turn.closing:
                live.set_started(
                    wire.Started(
                        live.gen,
                        event.prompt_tokens,
                        event.cached_tokens,
                        stopwatch.queue_ms or 0,
                        -(-event.prompt_tokens // block_size),
                    )
                )

    async def _tell_position(self, turn: Turn) -> None:
        """Keep a waiting client informed until it is cancelled by the start."""
        while True:
            await asyncio.sleep(QUEUE_NOTICE_SECONDS)
            turn.position = max(1, min(turn.position, self._context.engine.num_waiting))
            for live in turn.open_answers:
                if live.queued is None or live.queued.pos != turn.position:
                    live.set_queued(wire.Queued(live.gen, turn.position))

    async def _close(
        self,
        turn: Turn,
        live: LiveGeneration,
        *,
        done: ChoiceDone | None = None,
        reason: str = "",
        failure: ChatserveError | None = None,
    ) -> None:
        """End one answer, whatever fails: engine, store, wire, in this order. The second call for it does nothing."""
        if live.gen in turn.closing:
            return
        turn.closing.add(live.gen)
        text, token_ids = live.text(), None
        try:
            if failure is not None or not turn.open_answers:
                turn.generation.cancel()
            end, token_ids = self._end_of(turn, live, text, done, reason, failure)
        except Exception:
            self._log.exception("answer_failed", generations=[live.gen])
            end = _failed(live, failure or internal_error())
        try:
            await self._store.finish(
                live.tenant,
                live.conv,
                live.msg,
                content=text,
                token_ids=token_ids,
                state="failed" if isinstance(end, wire.Failed) else "complete" if done is not None else "cancelled",
            )
        except NotFoundError:
            pass  # the conversation was forgotten while it ran; the client still gets its end
        except Exception:
            self._log.exception("answer_not_stored", generation=live.gen)
            if isinstance(end, wire.Done):
                end = _failed(live, internal_error())
        finally:
            live.finish(end)
            self._turns.pop(live.gen, None)
            self._recent.add_ended(live.tenant, live.gen)

    def _end_of(
        self,
        turn: Turn,
        live: LiveGeneration,
        text: str,
        done: ChoiceDone | None,
        reason: str,
        failure: ChatserveError | None,
    ) -> tuple[wire.Done | wire.Failed, bytes | None]:
        """What the client is told, and the ids that are stored with the text; see `_close`."""
        index = turn.answers.index(live)
        sampled = array("i", turn.generation.choice_token_ids(index))
        known = sampled if done is not None else live.token_ids
        token_ids = exact_token_ids(self._context.service.tokenizer, text, known)
        if failure is not None:
            return _failed(live, failure), token_ids
        num_tokens = len(sampled) + (done is not None and done.stop_token is not None)
        usage = _usage(turn.generation.usage, num_tokens)
        timings = turn.stopwatches[index].timings()
        final_reason = reason if done is None else done.finish_reason
        return wire.Done(live.gen, live.end, final_reason, usage, timings, live.text_sha256()), token_ids


def _failed(live: LiveGeneration, error: ChatserveError) -> wire.Failed:
    return wire.Failed(live.gen, live.end, wire.error_body(error))


def _for_second_sender(error: BaseException) -> ChatserveError:
    """What the second sender of an id is told where the first one's send led to ``error``."""
    if isinstance(error, ChatserveError):
        return error
    return internal_error() if isinstance(error, Exception) else ConflictError(_FIRST_SENDER_LEFT)


def exact_token_ids(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> bytes | None:
    """int32 ids that decode to exactly ``text``: ``token_ids`` less a few last ones; ``None`` if there are none.

    The last tokens of an answer may have no text yet (half a character, the start of a stop string). Ids that hide a
    control token are no history to build on: the text is tokenised again then.
    """
    if not tokenizer.special_ids.isdisjoint(token_ids):
        return None
    for length in range(len(token_ids), max(len(token_ids) - _TRIM_TOKENS, 0), -1):
        if tokenizer.decode(token_ids[:length]) == text:
            return array("i", token_ids[:length]).tobytes()
    return None


def _usage(request: Usage, completion_tokens: int) -> wire.Usage:
    """Usage of one answer: its own tokens, and the prompt it shares with its siblings."""
    total = request.prompt_tokens + completion_tokens
    cached = wire.CachedTokens(request.cached_tokens)
    return wire.Usage(request.prompt_tokens, completion_tokens, total, cached)


def _refuse_unimplemented(command: wire.ChatSend) -> None:
    if command.edit_of is not None:
        raise UnsupportedParameterError(
            "edit_of is not available yet; send the new text with the parent of the message you edit.", param="edit_of"
        )
    if not command.watch:
        raise UnsupportedParameterError("watch: false is not available yet; leave it out.", param="watch")
