"""A partner that dies, freezes, drips or lies, at any stage, costs the deadline of an exchange and nothing else."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing

from farandole.node.base.figures import size
from farandole.node.bulk import negotiation as bulk
from farandole.node.bulk.channel import BulkChannel, ChannelError, open_channel
from farandole.node.bulk.negotiation import BulkService, open_bulk
from farandole.protocol.exchange.exchange import Commit
from farandole.protocol.exchange.pipe import BULK_FROM, CHUNK_KIND, CONTROL_KIND, MAX_ROUTES, MESSAGE_KIND
from farandole.protocol.rounds.pairing_events import ExchangeEnded
from farandole.protocol.wire.incoming import Incoming

from ..parties import (
    ALICE,
    BOB,
    CAROL,
    PATIENCE,
    RUN_ID,
    SIZE,
    AlwaysWaits,
    Handler,
    MemoryChannels,
    MemoryHost,
    MemoryStream,
    Party,
    assert_committed,
    meet,
)

LARGE = BULK_FROM + 1
# By the tags of the protocol's messages, from 1.
NAMES = {
    MESSAGE_KIND: ("", "Offer", "Accepted", "Commit", "Committed", "Aborted"),
    CONTROL_KIND: ("", "Route", "Reroute", "Sealed", "Received"),
}
WRONG_HASH = "the partner broke the protocol: the hash of a transfer is not what its sender says"
BEFORE_THE_VERDICTS = ("Offer", "Route", "Chunk", "Sealed", "Received")


def name_of(sent: bytes) -> str:
    return "Chunk" if sent[4] == CHUNK_KIND else NAMES[sent[4]][msgspec.msgpack.decode(sent[5:])[0]]


class FaultyStream(AlwaysWaits):
    """Mallory's end: it works until a message of this name, and never again."""

    is_bulk = False
    handshake_hash = MemoryStream.handshake_hash

    def __init__(self, stream: MemoryStream, stage: str, fault: str) -> None:
        self.peer = stream.peer
        self._stream = stream
        self._stage = stage
        self._fault = fault
        self._has_come = False

    async def send_all(self, data: bytes) -> None:
        while data:
            end = 4 + int.from_bytes(data[:4], "big")
            await self._send_frame(data[:end])
            data = data[end:]

    async def _send_frame(self, data: bytes) -> None:
        if not self._has_come and name_of(data) != self._stage:
            await self._stream.send_all(data)
            return
        is_first, self._has_come = not self._has_come, True
        match self._fault:
            case "dies":
                await self.aclose()
                raise trio.BrokenResourceError("dead")
            case "drips":
                for byte in data:
                    await self._stream.send_all(bytes([byte]))
                    await trio.sleep(1)
                return
            case "babbles" if is_first:
                await self._stream.send_all(random.Random(7).randbytes(1_000))
            case "jumps ahead" if is_first:
                payload = msgspec.msgpack.encode(Commit())
                await self._stream.send_all((1 + len(payload)).to_bytes(4, "big") + b"\0" + payload)
        await trio.sleep_forever()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


class FaultyHost(MemoryHost):
    """Mallory's host: her exchanges go over faulty streams, whichever side opens them."""

    stage = fault = ""

    def set_handler(self, protocol: str, handler: Handler) -> None:
        async def handle(stream: Any) -> None:
            await handler(FaultyStream(stream, self.stage, self.fault) if "exchange" in protocol else stream)

        super().set_handler(protocol, handle)

    async def open_stream(self, peer: bytes, protocol: str, timeout: float = 8.0) -> Any:
        stream = await super().open_stream(peer, protocol, timeout)
        return FaultyStream(stream, self.stage, self.fault) if "exchange" in protocol else stream


def assert_unharmed(honest: Party, mallory: Party, result: ExchangeEnded, must_fail: bool) -> None:
    """A committed contribution is whole. The caller owns the memory from now on: the next check finds it unchanged."""
    assert not (must_fail and result.committed)
    if result.committed:
        assert honest.incoming == mallory.contribution


async def assert_can_go_on(honest: Party, carol: Party, path: str) -> None:
    """Exchange with an honest peer by the same service; nothing may be written into the last session's memory."""
    left, mark = honest.incoming, b"\x5a" * len(honest.incoming)
    left[:] = mark
    honest.incoming = bytearray(len(left))
    honest.results.clear()
    await meet(honest, carol)
    assert_committed(honest, carol)
    assert honest.result.path == path
    assert left == mark


STAGES = [
    *itertools.product([SIZE], [ALICE], ["Offer", "Sealed", "Chunk", "Commit"]),
    *itertools.product([SIZE], [BOB], ["Offer", "Sealed", "Chunk", "Accepted", "Committed"]),
    *itertools.product([LARGE], [ALICE], ["Offer", "Route", "Sealed", "Received", "Commit"]),
    *itertools.product([LARGE], [BOB], ["Offer", "Route", "Sealed", "Received", "Accepted", "Committed"]),
]


@pytest.mark.parametrize("fault", ["dies", "freezes", "drips", "babbles", "jumps ahead"])
@pytest.mark.parametrize(("size", "author", "stage"), STAGES)
async def test_a_partner_that_fails_on_the_stream(
    size: int, author: bytes, stage: str, fault: str, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    hosts: dict[bytes, MemoryHost] = {}
    ways: dict[bytes, MemoryChannels] = {}
    mallorys = FaultyHost(author, nursery, hosts)
    mallorys.stage, mallorys.fault = stage, fault
    mallory = Party(mallorys, 1, size, MemoryChannels(author, ways))
    honests = MemoryHost(BOB if author == ALICE else ALICE, nursery, hosts)
    honest = Party(honests, 2, size, MemoryChannels(honests.author, ways))
    async with trio.open_nursery() as meeting:
        meeting.start_soon(mallory.exchange, honests.author)
        with trio.fail_after(PATIENCE):
            await honest.exchange(author)
    must_fail = stage in BEFORE_THE_VERDICTS and not (fault == "drips" and stage == "Received")
    assert_unharmed(honest, mallory, honest.result, must_fail)
    if stage == "Committed":
        assert honest.result.committed, "it was decided"
    ways[honests.author].kept.clear()
    carol = Party(MemoryHost(CAROL, nursery, hosts), 3, size, MemoryChannels(CAROL, ways))
    await assert_can_go_on(honest, carol, "bulk" if size == LARGE else "stream")


# On bulk channels over loopback


class FaultyChannel:
    """Mallory's end of a real channel: half of her data are sent properly."""

    def __init__(self, channel: BulkChannel, fault: str) -> None:
        self.channel = channel
        self.session = channel.session
        self._fault = fault

    @property
    def num_sent(self) -> int:
        return self.channel.num_sent

    @property
    def num_received(self) -> int:
        return self.channel.num_received

    @property
    def seconds_held_up(self) -> float:
        return self.channel.seconds_held_up

    async def receive(self, incoming: Incoming) -> None:
        await self.channel.receive(incoming)

    async def send(self, data: memoryview) -> None:
        middle = len(data) // 2
        await self.channel.send(data[:middle])
        match self._fault:
            case "dies":
                self.channel._connection.shutdown(socket.SHUT_RDWR)
                raise ChannelError("dead")
            case "freezes":
                await trio.sleep_forever()
            case "drips":
                for at in range(middle, len(data)):
                    await self.channel.send(data[at : at + 1])
                    await trio.sleep(0.05)
            case "lies":
                await self.channel.send(memoryview(bytes(len(data) - middle)))
            case "sends too much":
                await self.channel.send(data[middle:])
                await self.channel.send(memoryview(bytes(1_000)))
            case "":
                await self.channel.send(data[middle:])
            case "drops the encryption":
                self.channel._connection.send(random.Random(7).randbytes(10_000))
                await trio.sleep_forever()


class FaultyChannels:
    """Mallory's bulk service; the first channels are faulty."""

    def __init__(self, service: BulkService, fault: str) -> None:
        self.num_faulty = MAX_ROUTES
        self._service = service
        self._fault = fault

    def expecting(self, peer: bytes) -> AbstractContextManager[None]:
        return self._service.expecting(peer)

    async def acquire(self, peer: bytes) -> FaultyChannel | None:
        return self._faulty(await self._service.acquire(peer))

    def take(self, peer: bytes, session: bytes) -> FaultyChannel | None:
        return self._faulty(self._service.take(peer, session))

    def _faulty(self, channel: BulkChannel | None) -> FaultyChannel | None:
        self.num_faulty -= channel is not None
        return FaultyChannel(channel, self._fault if self.num_faulty >= 0 else "") if channel else None

    def release(self, channel: FaultyChannel) -> None:
        self._service.release(channel.channel)

    def discard(self, channel: FaultyChannel) -> None:
        self._service.discard(channel.channel)


class WatchedChannels:
    """The honest side's bulk service, with its channels and whether they were discarded."""

    def __init__(self, service: BulkService) -> None:
        self._service = service
        self.channels: list[BulkChannel] = []
        self.discarded: list[BulkChannel] = []
        self.expecting = service.expecting
        self.release = service.release

    async def acquire(self, peer: bytes) -> BulkChannel | None:
        return self._watched(await self._service.acquire(peer))

    def take(self, peer: bytes, session: bytes) -> BulkChannel | None:
        return self._watched(self._service.take(peer, session))

    def discard(self, channel: BulkChannel) -> None:
        assert channel._threads.borrowed_tokens == 0
        self.discarded.append(channel)
        self._service.discard(channel)

    def _watched(self, channel: BulkChannel | None) -> BulkChannel | None:
        if channel is not None:
            self.channels.append(channel)
        return channel


class RealPair:
    """Mallory and an honest peer, with real channels between them."""

    def __init__(
        self, hosts: dict[bytes, MemoryHost], author: bytes, channels: dict[bytes, BulkService], fault: str
    ) -> None:
        other = BOB if author == ALICE else ALICE
        self.watched = WatchedChannels(channels[other])
        self.faulty = FaultyChannels(channels[author], fault)
        self.mallory = Party(hosts[author], 1, LARGE, self.faulty)
        self.honest = Party(hosts[other], 2, LARGE, self.watched)
        self.carol = Party(hosts[CAROL], 3, LARGE, channels[CAROL])

    async def meet(self, deadline: float) -> ExchangeEnded:
        """Let both exchange, Mallory without a hurry; return the honest side's result."""
        async with trio.open_nursery() as meeting:
            meeting.start_soon(self.mallory.exchange, self.honest.host.author, deadline)
            with trio.fail_after(deadline + PATIENCE):  # the machine may be busy
                await self.honest.exchange(self.mallory.host.author, deadline)
        return self.honest.result

    def assert_left_alone(self) -> None:
        """Assert that no thread is working, and that no channel is kept over which data may still arrive."""
        for channel in self.watched.channels:
            assert channel._threads.borrowed_tokens == 0
            assert channel in self.watched.discarded or self.honest.result.committed


@asynccontextmanager
async def real_pair(author: bytes, fault: str) -> AsyncIterator[RealPair]:
    hosts: dict[bytes, MemoryHost] = {}
    async with trio.open_nursery() as nursery:
        for name in (ALICE, BOB, CAROL):
            MemoryHost(name, nursery, hosts)
        async with (
            open_bulk(cast("Any", hosts[ALICE]), RUN_ID) as alice,
            open_bulk(cast("Any", hosts[BOB]), RUN_ID) as bob,
            open_bulk(cast("Any", hosts[CAROL]), RUN_ID) as carol,
        ):
            yield RealPair(hosts, author, {ALICE: alice, BOB: bob, CAROL: carol}, fault)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("author", [ALICE, BOB])
@pytest.mark.parametrize(
    ("fault", "deadline", "path", "reason"),
    [
        ("dies", PATIENCE, "stream", ""),  # which brings the rest, after three channels
        ("drops the encryption", PATIENCE, "stream", ""),
        ("freezes", PATIENCE / 2, "stream", ""),  # each is given up after a sixth of that
        ("sends too much", PATIENCE, "bulk", ""),
        ("lies", PATIENCE, "bulk", WRONG_HASH),
        ("drips", PATIENCE / 3, "bulk", f"{size(LARGE)} did not fit into "),
    ],
)
async def test_a_partner_that_fails_on_the_channel(
    author: bytes, fault: str, deadline: float, path: str, reason: str
) -> None:
    async with real_pair(author, fault) as pair:
        result = await pair.meet(deadline)
        assert_unharmed(pair.honest, pair.mallory, result, must_fail=bool(reason))
        assert result.path == path
        assert result.reason.startswith(reason) if reason else not result.reason
        pair.assert_left_alone()
        await assert_can_go_on(pair.honest, pair.carol, "bulk")


@pytest.mark.parametrize("author", [ALICE, BOB])
@pytest.mark.parametrize("fault", ["freezes", "babbles"])
async def test_a_partner_that_fails_before_the_channel_opens_is_met_over_the_stream(
    author: bytes, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with real_pair(author, "") as pair:
        honests = pair.honest.host.author

        async def fail(peer: bytes, session: bytes, connection: socket.socket, *rest: Any) -> BulkChannel:
            if peer != honests:
                return await open_channel(peer, session, connection, *rest)
            with connection:
                if fault == "babbles":
                    connection.send(random.Random(7).randbytes(10_000))
                await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(bulk, "open_channel", fail)
        monkeypatch.setattr(bulk, "OPEN_TIMEOUT", 0.5)
        result = await pair.meet(PATIENCE)
        assert_unharmed(pair.honest, pair.mallory, result, must_fail=False)
        assert (result.path, result.reason) == ("stream", "")
        assert not pair.watched.channels
        monkeypatch.undo()
        await assert_can_go_on(pair.honest, pair.carol, "bulk")


# In separate processes
