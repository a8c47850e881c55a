"""The conversation store: trees, ownership, single finish, bounds."""

from __future__ import annotations

import pytest

from chatserve.errors import ConflictError, InvalidRequestError, NotFoundError
from chatserve.sessions.conversation import Message, new_message
from chatserve.sessions.memory_store import MemoryStore
from chatserve.sessions.store import ConversationStore

pytestmark = pytest.mark.asyncio

TENANT = "t1"


def turn(parent: str | None = None, text: str = "question") -> tuple[Message, Message]:
    """A question and its running answer."""
    question = new_message("user", text, parent=parent)
    return question, new_message("assistant", "", parent=question.id, state="running")


async def finish(store: ConversationStore, conversation: str, message: Message, text: str = "answer") -> None:
    """End an answer the usual way."""
    await store.finish(TENANT, conversation, message.id, content=text, token_ids=b"\1\0\0\0", state="complete")


async def test_a_path_leads_from_root_to_message() -> None:
    """Branches share their beginning and nothing else."""
    store = MemoryStore()
    question, answer = turn()
    conversation = await store.create(TENANT, [question, answer])
    await finish(store, conversation, answer)
    left, right = turn(answer.id, "left"), turn(answer.id, "right")
    await store.append(TENANT, conversation, left)
    await store.append(TENANT, conversation, right)
    path = await store.path(TENANT, conversation, left[0].id)
    assert [message.content for message in path] == ["question", "answer", "left"]
    assert path[1].token_ids == b"\1\0\0\0"
    assert (await store.head(TENANT, conversation)).id == right[1].id


async def test_another_tenants_conversation_does_not_exist() -> None:
    """Every method gives the same answer for a foreign conversation as for none."""
    store = MemoryStore()
    question, answer = turn()
    conversation = await store.create("other", [question, answer])
    for identifier in (conversation, "c_none"):
        seen = set()
        for attempt in (
            store.append(TENANT, identifier, turn()),
            finish(store, identifier, answer),
            store.path(TENANT, identifier, question.id),
            store.head(TENANT, identifier),
        ):
            with pytest.raises(NotFoundError) as caught:
                await attempt
            seen.add((caught.value.message, caught.value.param))
        assert len(seen) == 1
    assert (await store.path("other", conversation, answer.id))[1].state == "running"


async def test_an_answer_ends_once() -> None:
    """A finished message never changes again, and a question cannot be finished."""
    store = MemoryStore()
    question, answer = turn()
    conversation = await store.create(TENANT, [question, answer])
    await finish(store, conversation, answer, "first")
    for message in (answer, question):
        with pytest.raises(ConflictError):
            await finish(store, conversation, message, "second")
    assert (await store.path(TENANT, conversation, answer.id))[1].content == "first"


async def test_append_is_all_or_nothing() -> None:
    """Messages without a known parent leave no trace, not even of those before them."""
    store = MemoryStore()
    conversation = await store.create(TENANT, turn())
    before = store.num_bytes
    good = new_message("user", "good", parent=None)
    with pytest.raises(NotFoundError):
        await store.append(TENANT, conversation, [good, new_message("user", "bad", parent="m_none")])
    with pytest.raises(NotFoundError):
        await store.path(TENANT, conversation, good.id)
    assert store.num_bytes == before


async def test_the_least_recently_used_conversation_goes_first() -> None:
    """Reading counts as use; the one in hand never goes; bytes and number are both bounded."""
    store = MemoryStore(max_conversations=3)
    names = [await store.create(TENANT, turn()) for _ in range(3)]
    await store.head(TENANT, names[0])
    await store.create(TENANT, turn())
    with pytest.raises(NotFoundError):
        await store.head(TENANT, names[1])
    await store.head(TENANT, names[0])
    assert len(store) == 3


async def test_bytes_are_bounded_and_counted() -> None:
    """Whatever is added, finished and evicted, the sum is that of what is kept, and stays below the limit."""
    limit = 40_000
    store = MemoryStore(max_bytes=limit)
    kept: list[str] = []
    for number in range(30):
        question, answer = turn(text="x" * (number * 20))
        kept.append(await store.create(TENANT, [question, answer]))
        await finish(store, kept[-1], answer, "y" * 300)
        assert store.num_bytes <= limit
    assert 0 < len(store) < 30
    counted = 0
    for name in kept[-len(store) :]:
        head = await store.head(TENANT, name)
        counted += sum(message.num_bytes for message in await store.path(TENANT, name, head.id))
    assert counted == store.num_bytes


async def test_one_conversation_is_bounded_too() -> None:
    """A conversation that grows without end is refused, and still usable at its end."""
    store = MemoryStore(max_messages=4)
    question, answer = turn()
    conversation = await store.create(TENANT, [question, answer])
    await store.append(TENANT, conversation, turn(answer.id))
    with pytest.raises(InvalidRequestError) as caught:
        await store.append(TENANT, conversation, turn(answer.id))
    assert caught.value.code == "conversation_full"
    big = MemoryStore(max_bytes=20_000)
    with pytest.raises(InvalidRequestError):
        await big.create(TENANT, [new_message("user", "x" * 2000, parent=None)])
    assert big.num_bytes == 0


async def test_one_growing_conversation_costs_others_nothing() -> None:
    """It is full at an eighth of the room, says so, is still there, and everybody else's is too."""
    store = MemoryStore(max_bytes=80_000)
    others = [await store.create(f"t{n}", turn(text="x" * 1500)) for n in range(9)]
    question, answer = turn()
    growing = await store.create("grows", [question, answer])
    for _ in range(4):
        await store.append("grows", growing, turn(text="y" * 200))
    with pytest.raises(InvalidRequestError, match="more than 10000 bytes; start a new one") as caught:
        await store.append("grows", growing, turn(text="y" * 400))
    assert caught.value.code == "conversation_full"
    assert (await store.path("grows", growing, question.id))[0].content == "question"
    for n, name in enumerate(others):
        await store.head(f"t{n}", name)
    await store.create("grows", turn())


async def test_a_deleted_tenant_leaves_nothing() -> None:
    """All its conversations and their bytes go, others' stay; an answer that ends afterwards finds none."""
    store = MemoryStore()
    question, answer = turn()
    gone = [await store.create(TENANT, [question, answer]), await store.create(TENANT, turn())]
    kept = await store.create("other", turn(text="kept"))
    before = MemoryStore()
    await before.create("other", turn(text="kept"))
    for _ in range(2):
        await store.forget(TENANT)
    assert (len(store), store.num_bytes) == (1, before.num_bytes)
    await store.head("other", kept)
    with pytest.raises(NotFoundError):
        await finish(store, gone[0], answer)
    assert TENANT not in store._shelves


@pytest.mark.parametrize("limits", [{"max_conversations": 10}, {"max_bytes": 10 * 1100}])
async def test_what_is_unused_for_a_day_goes_before_the_fullest_pays(limits: dict[str, int]) -> None:
    """Nothing goes while there is room; then the unused, of whoever has least; reading counts as use."""
    now = 0.0
    store = MemoryStore(**limits, clock=lambda: now)
    left = [await store.create("left", turn()) for _ in range(2)]
    read = await store.create("reads", turn())
    busy = [await store.create("busy", turn()) for _ in range(6)]
    now = 86_000.0
    for name in busy:
        await store.head("busy", name)
    await store.head("reads", read)
    now = 86_401.0
    busy.append(await store.create("busy", turn()))
    assert len(store) == 10
    busy.append(await store.create("busy", turn()))
    assert len(store) == 9
    for name in busy:
        await store.head("busy", name)
    await store.head("reads", read)
    for name in left:
        with pytest.raises(NotFoundError):
            await store.head("left", name)


@pytest.mark.parametrize("limits", [{"max_conversations": 40}, {"max_bytes": 60_000}])
async def test_a_flood_of_one_tenant_costs_others_nothing(limits: dict[str, int]) -> None:
    """Room is made at the cost of whoever has most: its own oldest go, a quiet tenant's stay however old they are."""
    store = MemoryStore(**limits)
    quiet = [await store.create("quiet", turn(text="x" * 500)) for _ in range(5)]
    flood = [await store.create("flood", turn(text="y" * 200)) for _ in range(500)]
    assert len(store) < 200
    for name in quiet:
        await store.head("quiet", name)
    await store.head("flood", flood[-1])
    with pytest.raises(NotFoundError):
        await store.head("flood", flood[0])
    # Two that are alike share what there is.
    other = [await store.create("other", turn(text="y" * 200)) for _ in range(500)]
    kept = {"flood": 0, "other": 0}
    for tenant, names in (("flood", flood), ("other", other)):
        for name in names:
            try:
                await store.head(tenant, name)
            except NotFoundError:
                continue
            kept[tenant] += 1
    assert abs(kept["flood"] - kept["other"]) <= 1
    assert len(store) == sum(kept.values()) + len(quiet)
    assert sum(shelf.num_bytes for shelf in store._shelves.values()) == store.num_bytes
