"""A link's driver over streams in memory: Bob's node sends a gradient, Alice receives it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaper, Shaping
from farandole.node.bulk.channel import BulkChannel
from farandole.node.loop import pipeline_service
from farandole.node.loop.pipeline_service import PROGRESS_TIMEOUT, ActivationLink
from farandole.protocol.exchange.bulk import Secrets
from farandole.protocol.exchange.pipe import BULK_FROM, Route
from farandole.protocol.stages.activations import (
    DATA_BYTES,
    Control,
    Credits,
    DataReceived,
    Dropped,
    Event,
    Forward,
    Gradient,
    Hello,
    Link,
    Welcome,
)
from farandole.protocol.wire.record_layer import Sealer

from ...protocol.stages.activations.sides import next_event
from ..parties import Faults, MemoryStream
from ..sockets import tcp_pair

PATIENCE = 10.0
HELLO = Hello(run_id=b"r" * 32, stage=1, shape=b"s" * 32)
FORWARD = Forward(ticket=b"t" * 16, origin=b"o" * 32, round=0, seconds_left=30.0)


def send_data(link: Link, data: memoryview) -> bytes:
    return link.pipe.send_chunk(data)


class Line(MemoryStream):
    """A stream to Alice; ``on_sent`` is called after each write, with the number of writes."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        super().__init__(stream, b"alice", Faults())
        self.num_sent = 0
        self.on_sent: Callable[[int], None] = lambda number: None

    async def send_all(self, data: bytes) -> None:
        await super().send_all(data)
        self.num_sent += 1
        self.on_sent(self.num_sent)


class Alice:
    def __init__(self, stream: trio.abc.Stream, size: int) -> None:
        self.link = Link(True, HELLO, (size, size))
        self.memory = bytearray(size)
        self._stream = stream

    async def write(self, frames: bytes) -> None:
        await self._stream.send_all(frames)

    async def say(self, message: Control, data: bytes = b"") -> None:
        frames = self.link.send(message)
        for offset in range(0, len(data), DATA_BYTES):
            frames += send_data(self.link, memoryview(data)[offset : offset + DATA_BYTES])
        await self._stream.send_all(frames)

    async def hear(self) -> Event:
        while True:
            event = next_event(self.link)
            if isinstance(event, DataReceived):
                self.memory = bytearray(self.link.landed)
            if event is not None:
                return event
            await self.read()

    async def read(self) -> None:
        self.link.pipe.receive_data(await self._stream.receive_some())


SIZE = 5 * DATA_BYTES
CHUNK = memoryview(bytes(DATA_BYTES))
SEALING, OPENING = b"s" * 32, b"o" * 32


class Bob:
    """A node downstream of Alice: it gives her microbatches memory, and records its events."""

    def __init__(self, stream: trio.abc.Stream, size: int, shaping: Shaping, channels: Channels | None = None) -> None:
        self.heard: list[Event] = []
        self.on_heard: Callable[[Event], None] = lambda event: None
        self.is_routed = trio.Event()
        self.has_ended = trio.Event()
        self.line = Line(stream)
        self.link = ActivationLink(Link(False, HELLO, (size, size)), self.line, shaping, cast("Any", channels))

    async def run(self) -> None:
        await self.link.greet(Welcome(1))
        await self.link.run(self._hear, self.is_routed.set)
        self.has_ended.set()

    def _hear(self, event: Event) -> None:
        self.heard.append(event)
        self.on_heard(event)


class Channels:
    """Channels next to the stream: one, whose other end is Alice's socket."""

    def __init__(self) -> None:
        self.alice, bob = tcp_pair()
        self.channel = BulkChannel(b"alice", b"c" * 16, bob, Secrets(SEALING, OPENING), Shaping())

    @contextlib.contextmanager
    def expecting(self, peer: bytes) -> Iterator[None]:
        yield

    async def acquire(self, peer: bytes) -> BulkChannel | None:
        raise AssertionError("the upstream node opens it")

    def take(self, peer: bytes, session: bytes) -> BulkChannel | None:
        return self.channel

    def release(self, channel: BulkChannel) -> None:
        raise AssertionError("a link's channel ends with it")


@contextlib.asynccontextmanager
async def linked(
    size: int = SIZE, shaping: Shaping | None = None, channels: Channels | None = None
) -> AsyncIterator[tuple[Alice, Bob]]:
    near, far = trio.testing.memory_stream_pair()
    alice, bob = Alice(near, size), Bob(far, size, shaping or Shaping(), channels)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.run)
        await alice.say(HELLO)
        assert await alice.hear() == Welcome(1)
        yield alice, bob
        bob.link.close()


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("when", range(4))
async def test_a_gradient_whose_memory_is_another_s_is_not_taken_for_one(num_chunks: int, when: int) -> None:
    """Bob drops a microbatch after ``when`` chunks of its gradient, and reuses its memory at once."""
    size = (num_chunks - 1) * DATA_BYTES + 100
    gradient = bytearray(b"g" * size)
    is_dropped = False

    def drop(number: int) -> None:
        nonlocal is_dropped
        if number == when:
            is_dropped = True
            bob.link.send(Dropped(0, "the round is over", is_untouched=False))
            gradient[:] = b"x" * size

    def send_back(event: Event) -> None:
        if isinstance(event, DataReceived):
            bob.line.num_sent, bob.line.on_sent = 0, drop
            bob.link.send(Gradient(0), memoryview(gradient))
            drop(0)

    with trio.fail_after(PATIENCE):
        async with linked(size) as (alice, bob):
            bob.on_heard = send_back
            await alice.say(FORWARD, bytes(size))
            while not isinstance(last := await alice.hear(), Dropped | DataReceived):
                pass
    if isinstance(last, DataReceived):
        assert when >= num_chunks, "all was sent before"
        assert alice.memory == b"g" * size
    else:
        assert is_dropped


# Data that stop arriving


async def fall_silent(alice: Alice) -> None:
    await trio.sleep_forever()


async def trickle_frames(alice: Alice) -> None:
    while True:
        await alice.write(send_data(alice.link, CHUNK[:1]))
        await trio.sleep(1.0)


async def trickle_within_a_frame(alice: Alice) -> None:
    for byte in send_data(alice.link, CHUNK):
        await alice.write(bytes((byte,)))
        await trio.sleep(1.0)


@pytest.mark.parametrize("what", [fall_silent, trickle_frames, trickle_within_a_frame])
@pytest.mark.parametrize("num_chunks", [0, 2])
async def test_who_stops_amid_data_loses_the_link(
    num_chunks: int, what: Callable[[Alice], Awaitable[None]], clock: MockClock
) -> None:
    async with linked() as (alice, bob):
        await alice.say(FORWARD, bytes(num_chunks * DATA_BYTES))
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(what, alice)
            with trio.fail_after(10 * PROGRESS_TIMEOUT):
                await bob.has_ended.wait()
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began_at <= 2 * PROGRESS_TIMEOUT
        assert bob.heard[0] == FORWARD
        assert not any(isinstance(event, DataReceived) for event in bob.heard)


@contextlib.asynccontextmanager
async def upstream_of(size: int) -> AsyncIterator[tuple[ActivationLink, Link, trio.StapledStream]]:
    """Open a link from this node to one downstream; yield it with the other's end, which has heard its greeting."""
    near, far = trio.testing.memory_stream_pair()
    link, theirs = (
        ActivationLink(Link(True, HELLO, (size, size)), Line(far), Shaping()),
        Link(False, HELLO, (size, size)),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.greet, HELLO)
        theirs.pipe.receive_data(await near.receive_some())
        assert next_event(theirs) == HELLO
        yield link, theirs, near


async def test_what_comes_with_the_welcome_is_heard() -> None:
    """The first credits arrive in one write with it."""
    heard = list[Event]()

    def hear(event: Event) -> None:
        heard.append(event)
        link.close()

    with trio.fail_after(PATIENCE):
        async with upstream_of(1) as (link, theirs, stream):
            await stream.send_all(theirs.send(Welcome(0)) + theirs.send(Credits(3)))
        await link.run(hear)
    assert heard == [Credits(3)]


async def test_a_gradient_must_come_too(clock: MockClock) -> None:
    """The upstream node is the one that waits."""
    heard, heard_there = list[Event](), list[Event]()
    async with upstream_of(SIZE) as (link, theirs, stream), trio.open_nursery() as nursery:

        async def answer() -> None:
            while DataReceived(0) not in heard_there:
                theirs.pipe.receive_data(await stream.receive_some())
                while (event := next_event(theirs)) is not None:
                    heard_there.append(event)
            await stream.send_all(theirs.send(Gradient(0)) + send_data(theirs, CHUNK))

        await stream.send_all(theirs.send(Welcome(1)))
        await trio.testing.wait_all_tasks_blocked()
        link.send(FORWARD, memoryview(bytes(SIZE)))
        nursery.start_soon(answer)
        await link.run(heard.append)
    assert heard == [Gradient(0)]


async def test_who_is_slow_but_steady_keeps_the_link(clock: MockClock) -> None:
    async with linked() as (alice, bob):
        await alice.say(FORWARD)
        for _ in range(5):
            await trio.sleep(0.9 * PROGRESS_TIMEOUT)
            await alice.write(send_data(alice.link, CHUNK))
        await trio.testing.wait_all_tasks_blocked()
        assert bob.heard == [FORWARD, DataReceived(0)]


async def test_what_this_node_s_own_cap_holds_up_is_not_the_peer_s_fault(clock: MockClock) -> None:
    cap = Shaper(DATA_BYTES / PROGRESS_TIMEOUT / 4, trio.current_time)
    async with linked(shaping=Shaping(down=cap)) as (alice, bob):
        await alice.say(FORWARD, bytes(SIZE))
        await trio.sleep(4 * PROGRESS_TIMEOUT * SIZE / DATA_BYTES + 2 * PROGRESS_TIMEOUT)
        assert bob.heard == [FORWARD, DataReceived(0)]
        assert not bob.has_ended.is_set()


async def test_a_link_without_anything_under_way_stays(clock: MockClock) -> None:
    async with linked() as (alice, bob):
        await trio.sleep(3_600)
        await alice.say(FORWARD, bytes(SIZE))
        await trio.sleep(3_600)
        assert bob.heard == [FORWARD, DataReceived(0)]
        assert not bob.has_ended.is_set()


async def test_large_data_wait_for_a_route_and_small_data_do_not() -> None:
    channels = Channels()
    with channels.alice, trio.fail_after(PATIENCE):
        async with linked(SIZE) as (_, bob):
            await bob.is_routed.wait()
        async with linked(BULK_FROM, channels=channels) as (alice, bob):
            await trio.testing.wait_all_tasks_blocked()
            assert not bob.is_routed.is_set()
            await alice.write(alice.link.pipe.send(Route(b"c" * 16, 0)))
            await bob.is_routed.wait()


@pytest.mark.parametrize("pause", [None, 0.01])
async def test_who_stops_amid_a_channel_s_data_loses_the_link(
    pause: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is silent, or sends a byte now and then; over a real channel, so in real time."""
    monkeypatch.setattr(pipeline_service, "PROGRESS_TIMEOUT", 0.3)
    channels = Channels()
    with channels.alice, trio.fail_after(PATIENCE):
        async with linked(BULK_FROM, channels=channels) as (alice, bob):
            await alice.write(alice.link.pipe.send(Route(b"c" * 16, 0)))
            while alice.link.pipe.channel is None:
                await alice.read()
                assert next_event(alice.link) is None
            await alice.say(FORWARD)
            record = bytes(Sealer(OPENING, 0.0).seal(memoryview(bytes(100_000)), 0.0))
            channels.alice.sendall(record[:50_000])
            for byte in record[50_000:]:
                with contextlib.suppress(OSError):
                    channels.alice.sendall(bytes((byte,)) if pause else b"")
                await trio.sleep(pause or 0.01)
                if bob.has_ended.is_set():
                    break
            await bob.has_ended.wait()
            assert not any(isinstance(event, DataReceived) for event in bob.heard)
