"""A link's driver over streams in memory: Bob's node sends a gradient, Alice hears what comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from farandole.node.activation_link import ActivationLink
from farandole.node.shaping import Shaping
from farandole.protocol.activations import (
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

PATIENCE = 10.0
HELLO = Hello(run_id=b"r" * 32, stage=1, shape=b"s" * 32)
FORWARD = Forward(ticket=b"t" * 16, origin=b"o" * 32, round=0, seconds_left=30.0)


class Line:
    """A stream to Alice; ``on_sent`` is called with the number of writes after each."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.is_bulk = False
        self.peer = b"alice"
        self.num_sent = 0
        self.on_sent: Callable[[int], None] = lambda number: None
        self._stream = stream

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)
        self.num_sent += 1
        self.on_sent(self.num_sent)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


class Alice:
    def __init__(self, stream: trio.abc.Stream, size: int) -> None:
        self.link = Link(True, HELLO, size)
        self.memory = bytearray(size)
        self._stream = stream

    async def say(self, message: Control, data: bytes = b"") -> None:
        frames = self.link.send(message)
        for offset in range(0, len(data), DATA_BYTES):
            frames += self.link.send_data(memoryview(data)[offset : offset + DATA_BYTES])
        await self._stream.send_all(frames)

    async def hear(self) -> Event:
        while True:
            if self.link.awaits_place:
                self.link.place(memoryview(self.memory))
            event = self.link.next_event()
            if event is not None:
                return event
            self.link.receive_data(await self._stream.receive_some())


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("when", range(4))
async def test_a_gradient_whose_memory_is_another_s_is_not_taken_for_one(num_chunks: int, when: int) -> None:
    """Bob drops a microbatch after ``when`` writes of its gradient, and at once uses its memory again."""
    size = (num_chunks - 1) * DATA_BYTES + 100
    near, far = trio.testing.memory_stream_pair()
    line, alice = Line(far), Alice(near, size)
    bob = ActivationLink(0, Link(False, HELLO, size), line, Shaping())
    gradient = bytearray(b"g" * size)
    is_dropped = False

    def drop(number: int) -> None:
        nonlocal is_dropped
        if number == when:
            is_dropped = True
            bob.send(Dropped(0, "the round is over", is_untouched=False))
            gradient[:] = b"x" * size

    def handle(link: ActivationLink, event: Event) -> None:
        if isinstance(event, Forward):
            link.link.place(memoryview(bytearray(size)))
        elif isinstance(event, DataReceived):
            line.num_sent = 0
            line.on_sent = drop
            link.send(Gradient(0), memoryview(gradient))
            drop(0)

    def welcome(event: Event) -> None:
        bob.send(Welcome(1))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bob.greet, welcome)
            await alice.say(HELLO)
            assert await alice.hear() == Welcome(1)
            nursery.start_soon(bob.run, handle)
            await alice.say(FORWARD, bytes(size))
            events = [await alice.hear()]
            while not isinstance(events[-1], Dropped | DataReceived):
                events.append(await alice.hear())
            bob.close()
    if isinstance(events[-1], DataReceived):
        assert when > num_chunks, "all was sent before"
        assert alice.memory == b"g" * size
    else:
        assert is_dropped


async def test_what_comes_with_the_welcome_is_heard() -> None:
    """Bob opens a link to Alice, whose first credits leave in one write with her welcome."""
    near, far = trio.testing.memory_stream_pair()
    alice, heard = Link(False, HELLO, 1), list[Event]()
    bob = ActivationLink(0, Link(True, HELLO, 1), Line(far), Shaping())

    def hear(link: ActivationLink, event: Event) -> None:
        heard.append(event)
        link.close()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            bob.send(HELLO)
            nursery.start_soon(bob.greet, lambda event: None)
            alice.receive_data(await near.receive_some())
            assert alice.next_event() == HELLO
            await near.send_all(alice.send(Welcome(0)) + alice.send(Credits(3)))
        await bob.run(hear)
    assert heard == [Credits(3)]
