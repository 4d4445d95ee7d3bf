"""A pipe with several transfers in progress: whatever happens to its channels, each arrives once, and in order."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaper, Shaping
from farandole.node.bulk.pipe import BulkPipe, Outgoing, Patience
from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES, MAX_ROUTES, Pipe

from ..parties import ALICE, BOB, Faults, MemoryChannels, MemoryStream

PATIENCE = Patience(route=1.0, silent=2.0, answer=1.0)
SIZES = [300_000, 1, 70_000, 200_000, 5, 130_000, 65_000, 12_345, 400_000, 1]


class MeteredStream(MemoryStream):
    """Keeps the sizes of its writes. It takes ``room`` bytes without a wait."""

    def __init__(self, stream: trio.abc.Stream, peer: bytes) -> None:
        super().__init__(stream, peer, Faults())
        self.written: list[int] = []
        self.sent_at_once: list[int] = []
        self.room = 0
        self.put: Callable[[bytes], None] = lambda data: None

    def send_now(self, data: bytes) -> None:
        assert 0 < len(data) <= self.room
        self.sent_at_once.append(len(data))
        self.room -= len(data)
        self.put(data)

    async def send_all(self, data: bytes) -> None:
        self.written.append(len(data))
        await super().send_all(data)


class End:
    """Sends transfers, announced by their sizes, and keeps received ones."""

    def __init__(
        self,
        author: bytes,
        stream: trio.abc.Stream,
        channels: MemoryChannels,
        sizes: Sequence[int] = SIZES,
        *,
        is_large: bool = True,
        up: Shaper | None = None,
    ) -> None:
        self.channels = channels
        self.stream = MeteredStream(stream, BOB if author == ALICE else ALICE)
        self.sent = [random.Random(author).randbytes(size) for size in sizes]
        self.received: list[bytearray] = []
        self.num_received = 0
        self.has_all = trio.Event()
        self.bulk = BulkPipe(
            Pipe(author == ALICE, max_message_bytes=8, is_large=is_large),
            self.stream,
            cast("Any", channels),
            Shaping(up or Shaper()),
        )

    async def run(self) -> None:
        with self.channels.expecting(self.stream.peer):
            self.bulk.begin(PATIENCE)
            await self.bulk.run(self._hear, self._receive)

    async def send(self) -> None:
        for name, data in enumerate(self.sent):
            await self.bulk.send(partial(self._announce, name, data))
        await self.bulk.wait_delivered()

    def _announce(self, name: int, data: bytes) -> tuple[bytes, Outgoing]:
        self.bulk.pipe.offer(name, len(data))
        return self.bulk.pipe.send_message(len(data).to_bytes(4, "big")), Outgoing(memoryview(data))

    async def send_held(self, room: int) -> None:
        """Send all, each announcement with its data; every time the stream takes ``room`` bytes without a wait."""
        for name, data in enumerate(self.sent):
            await self.bulk.wait_offerable()
            self.stream.room = room
            frame, source = self._announce(name, data)
            self.bulk.post(frame, is_held=True)
            self.bulk.add(source, is_held=True)
            self.bulk.flush()
        await self.bulk.wait_delivered()

    async def _hear(self, payload: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.received.append(bytearray(int.from_bytes(payload, "big")))
        self.bulk.pipe.expect(len(self.received) - 1, memoryview(self.received[-1]))

    def _receive(self, name: int) -> None:
        assert name == self.num_received
        self.num_received += 1
        if self.num_received == len(self.sent):
            self.has_all.set()


@pytest.mark.parametrize("fault", ["cut_at", "freeze_at"])
@pytest.mark.parametrize("who", [ALICE, BOB])
@pytest.mark.parametrize("num_channels", [1, 2, 100])
@pytest.mark.parametrize("at", [0, 1, 299_999, 300_500, 500_000, sum(SIZES) - 10, None])
async def test_the_rest_goes_over_another_route(
    fault: str, who: bytes, num_channels: int, at: int | None, clock: MockClock
) -> None:
    network: dict[bytes, MemoryChannels] = {}
    streams = dict(zip((ALICE, BOB), trio.testing.memory_stream_pair(), strict=True))
    alice, bob = (End(author, streams[author], MemoryChannels(author, network)) for author in (ALICE, BOB))
    faults = network[who].faults
    setattr(faults, fault, at)
    faults.num_channels = num_channels
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for end in (alice, bob):
                nursery.start_soon(end.run)
            async with trio.open_nursery() as sending:
                for end in (alice, bob):
                    sending.start_soon(end.send)
            while alice.num_received < len(SIZES) or bob.num_received < len(SIZES):
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    for sender, receiver in ((alice, bob), (bob, alice)):
        assert [bytes(data) for data in receiver.received] == sender.sent
        assert receiver.num_received == len(SIZES)
        assert receiver.bulk.bytes_received < sum(SIZES) + 10_000, "nothing moves again that has arrived"
        receiver.bulk.close()
    if num_channels == 100 and at in (0, 1):  # every channel fails, and the stream is the last route
        assert network[ALICE].num_acquired == MAX_ROUTES - 1
    if at is None:
        assert network[ALICE].num_acquired == 1
        assert network[ALICE].kept
        assert network[BOB].kept


@asynccontextmanager
async def over_the_stream(
    sizes: Sequence[int], nursery: trio.Nursery, up: Shaper | None = None
) -> AsyncIterator[tuple[End, End]]:
    """Yield two ends, of which Alice sends, and wait until Bob has all."""
    network: dict[bytes, MemoryChannels] = {}
    near, far = trio.testing.memory_stream_pair()
    alice, bob = (
        End(author, stream, MemoryChannels(author, network), sizes, is_large=False, up=up)
        for author, stream in ((ALICE, near), (BOB, far))
    )
    alice.stream.put = cast("Any", far.receive_stream).put_data
    with trio.fail_after(60):
        nursery.start_soon(alice.run)
        nursery.start_soon(bob.run)
        await alice.bulk.wait_routed()
        await trio.testing.wait_all_tasks_blocked()
        yield alice, bob
        await bob.has_all.wait()
    nursery.cancel_scope.cancel()
    assert [bytes(data) for data in bob.received] == alice.sent


@pytest.mark.parametrize("room", [0, 30, 50_000, CHUNK_FRAME_BYTES, 2 * CHUNK_FRAME_BYTES, 1 << 40])
async def test_what_has_room_is_sent_without_a_wait(room: int, nursery: trio.Nursery, clock: MockClock) -> None:
    sizes = [CHUNK_FRAME_BYTES * 3 // 2, 1, 40_000, CHUNK_FRAME_BYTES * 3 // 2, 300_000, 5]
    async with over_the_stream(sizes, nursery) as (alice, _):
        await alice.send_held(room)
    at_once, later = sum(alice.stream.sent_at_once), sum(alice.stream.written)
    assert at_once + later == alice.bulk.bytes_sent
    assert (at_once == 0) == (room == 0)
    assert (later == 0) == (room == 1 << 40)
    assert max(alice.stream.sent_at_once + alice.stream.written) <= CHUNK_FRAME_BYTES


async def test_a_piece_that_waits_for_the_cap_is_not_sent_twice(nursery: trio.Nursery, clock: MockClock) -> None:
    ahead = 0.0
    up = Shaper(50_000.0, lambda: trio.current_time() + ahead)
    async with over_the_stream([200_000], nursery, up) as (alice, _):
        nursery.start_soon(alice.send_held, 1 << 40)
        while alice.bulk.pipe.num_sent < 150_000:
            await trio.sleep(0.01)  # by the mock clock
            alice.stream.room = 1 << 40
            ahead += 1.0  # the cap allows more, before the task that waits for it runs
            alice.bulk.flush()


async def test_the_cap_holds_for_what_is_sent_without_a_wait(nursery: trio.Nursery, clock: MockClock) -> None:
    up, began_at = Shaper(50_000.0, trio.current_time), trio.current_time()
    async with over_the_stream([1_000, 100_000, 200_000, 1], nursery, up) as (alice, _):
        await alice.send_held(1 << 40)
    assert trio.current_time() - began_at > 0.95 * 301_001 / 50_000.0
    assert alice.stream.sent_at_once
