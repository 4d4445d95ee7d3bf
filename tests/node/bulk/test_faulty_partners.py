"""A partner that dies, freezes, drips or lies, at any stage, costs the deadline of an exchange and nothing else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.protocol.exchange.exchange import Commit
from farandole.protocol.exchange.pipe import BULK_FROM, CHUNK_KIND, CONTROL_KIND, MESSAGE_KIND

from ..parties import (
    ALICE,
    BOB,
    CAROL,
    PATIENCE,
    SIZE,
    AlwaysWaits,
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

    def end_of(self, stream: trio.abc.Stream, peer: bytes, protocol: str) -> Any:
        end = super().end_of(stream, peer, protocol)
        return FaultyStream(end, self.stage, self.fault) if "exchange" in protocol else end


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
    size: int, author: bytes, stage: str, fault: str, nursery: trio.Nursery, clock: MockClock
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
    assert not (must_fail and honest.result.committed)
    if honest.result.committed:
        assert honest.incoming == mallory.contribution
    if stage == "Committed":
        assert honest.result.committed, "it was decided"
    ways[honests.author].kept.clear()
    carol = Party(MemoryHost(CAROL, nursery, hosts), 3, size, MemoryChannels(CAROL, ways))
    await assert_can_go_on(honest, carol, "bulk" if size == LARGE else "stream")
