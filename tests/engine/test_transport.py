"""Frames over real socketpairs: order, bounds, garbage and end of file."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from chatserve.engine import transport
from chatserve.engine.protocol import (
    Abort,
    AddRequest,
    EngineFailed,
    FromEngine,
    GetState,
    Shutdown,
    StepFrame,
    ToEngine,
)
from chatserve.engine.transport import (
    AsyncChannel,
    ChannelClosedError,
    FrameReader,
    FrameTooLargeError,
    SocketChannel,
    encode_frame,
)
from chatserve.sampling_params import SamplingParams
from chatserve.scope import Scope
from tests.waiting import PATIENCE

TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_frames_survive_any_fragmentation() -> None:
    """Messages come out whole and in order, one byte at a time or all at once."""
    stream = b"".join(encode_frame(Abort(tuple(range(i)))) for i in range(20))
    for size in (1, 3, 7, 64, len(stream)):
        reader = FrameReader()
        payloads = [p for at in range(0, len(stream), size) for p in reader.feed(stream[at : at + size])]
        assert [len(TO_ENGINE.decode(p).request_ids) for p in payloads] == list(range(20))  # type: ignore[union-attr]


def test_a_giant_length_is_refused_before_any_memory_is_spent() -> None:
    """A corrupt length prefix ends the stream instead of waiting for 4 GiB."""
    with pytest.raises(FrameTooLargeError):
        FrameReader().feed(struct.pack("<I", transport.MAX_FRAME_BYTES + 1))


def test_every_message_keeps_its_content(pair: tuple[socket.socket, socket.socket]) -> None:
    """Both unions decode to what was sent, scopes and sampling parameters included."""
    scope = Scope("tenant", "a", "w", "t", "salt")
    add = AddRequest(7, b"\1\0\0\0", SamplingParams(n=2, seed=5, logit_bias=((3, -1.5),)), (Scope("public"), scope), 1)
    channel = SocketChannel(pair[0], TO_ENGINE)
    sent = [add, Abort((1, 2)), GetState(3), Shutdown()]
    for message in sent:
        pair[1].sendall(encode_frame(message))
    assert channel.receive(wait=True) == sent


def test_the_engine_drops_and_counts_what_does_not_decode(pair: tuple[socket.socket, socket.socket]) -> None:
    """Garbage between two good messages costs neither of them."""
    channel = SocketChannel(pair[0], TO_ENGINE)
    for payload in (b"\xc1\xff", msgspec.msgpack.encode(["add", "x"]), msgspec.msgpack.encode(["unheard-of", 1]), b""):
        pair[1].sendall(struct.pack("<I", len(payload)) + payload)
    pair[1].sendall(encode_frame(GetState(9)))
    assert channel.receive(wait=True) == [GetState(9)]
    assert channel.malformed == 4


def test_receive_does_not_wait_unless_asked(pair: tuple[socket.socket, socket.socket]) -> None:
    """A busy engine looks into its inbox without blocking."""
    assert SocketChannel(pair[0], TO_ENGINE).receive(wait=False) == []


def test_end_of_file_is_an_error_even_with_a_half_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    """A peer that dies in the middle of a message is dead, not silent."""
    channel = SocketChannel(pair[0], TO_ENGINE)
    pair[1].sendall(encode_frame(GetState(9))[:-1])
    pair[1].close()
    with pytest.raises(ChannelClosedError):
        channel.receive(wait=True)


def test_a_peer_that_does_not_read_costs_bounded_memory(pair: tuple[socket.socket, socket.socket]) -> None:
    """Sending never blocks; past the bound the channel says so, and is usable again once the peer has read."""
    channel = SocketChannel(pair[0], TO_ENGINE)
    frame = StepFrame(1, request_ids=bytes(64 * 1024))
    sent = 0
    while not channel.congested:
        channel.send(frame)
        sent += 1
        assert sent * 64 * 1024 < 2 * transport.MAX_BACKLOG_BYTES
    pair[1].sendall(encode_frame(GetState(1)))
    assert channel.receive(wait=False) == [GetState(1)]  # input still arrives

    def read_all() -> None:
        reader, received = FrameReader(), 0
        while received < sent:
            received += len(reader.feed(pair[1].recv(1 << 20)))
        pair[1].sendall(encode_frame(Shutdown()))

    peer = threading.Thread(target=read_all)
    peer.start()
    assert channel.receive(wait=False) == []  # returns when the peer has caught up
    assert not channel.congested
    assert channel.receive(wait=True) == [Shutdown()]  # every frame reached it
    peer.join()


@pytest.mark.asyncio
async def test_the_api_side_receives_in_order_and_learns_of_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    """Messages first, then exactly one notice that the engine is gone."""
    got: list[object] = []
    lost = asyncio.Event()
    channel: AsyncChannel[FromEngine] = AsyncChannel(
        FROM_ENGINE, got.append, lambda: (got.append("lost"), lost.set())[1]
    )
    await channel.attach(pair[0])
    pair[1].sendall(encode_frame(StepFrame(1)) + encode_frame(EngineFailed("internal_error", "x")))
    pair[1].close()
    await asyncio.wait_for(lost.wait(), PATIENCE)
    channel.close()
    channel.send(Shutdown())  # nobody there: no error, no second notice
    await asyncio.sleep(0)
    assert got == [StepFrame(1), EngineFailed("internal_error", "x"), "lost"]


@pytest.mark.asyncio
@pytest.mark.parametrize("garbage", [b"\x02\0\0\0\xc1\xff", b"\xff\xff\xff\xff", b"\x01\0\0\0\x90"])
async def test_garbage_from_the_engine_ends_the_connection(
    pair: tuple[socket.socket, socket.socket], garbage: bytes
) -> None:
    """On this side a frame that is lost could be the end of a stream, so nothing after it is trusted."""
    got: list[object] = []
    lost = asyncio.Event()
    channel: AsyncChannel[FromEngine] = AsyncChannel(FROM_ENGINE, got.append, lost.set)
    await channel.attach(pair[0])
    pair[1].sendall(encode_frame(StepFrame(1)) + garbage + encode_frame(StepFrame(2)))
    await asyncio.wait_for(lost.wait(), PATIENCE)
    assert got in ([], [StepFrame(1)])
