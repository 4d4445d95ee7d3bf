"""An attacker on the path of a channel."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from blake3 import blake3

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk.channel import BulkChannel, ChannelError
from farandole.protocol.exchange.bulk import Secrets
from farandole.protocol.exchange.pipe import Transfer
from farandole.protocol.wire.record_layer import HEADER_BYTES, RECORD_BYTES, Opener, Sealer

from ....patience import PATIENCE
from ...parties import ALICE, BOB
from ...sockets import tcp_pair


class Meddler:
    """Sits between two ends of a channel: forwards Alice's records, as changed by ``change``."""

    def __init__(self, change: Callable[[list[bytes]], list[bytes]]) -> None:
        self._change = change
        self.has_ended = trio.Event()
        """Set once everything is forwarded, the end of the stream included."""

    async def run(self, from_alice: trio.SocketStream, to_bob: trio.SocketStream, num_records: int) -> None:
        records = [await self._read_record(from_alice) for _ in range(num_records)]
        with contextlib.suppress(trio.BrokenResourceError):
            for record in self._change(records):
                await to_bob.send_all(record)
            await to_bob.send_eof()
            self.has_ended.set()

    async def _read_record(self, stream: trio.SocketStream) -> bytes:
        header = await self._read_exactly(stream, HEADER_BYTES)
        return header + await self._read_exactly(stream, int.from_bytes(header, "big"))

    async def _read_exactly(self, stream: trio.SocketStream, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await stream.receive_some(size - len(data))
        return data


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


MEDDLING: dict[str, tuple[int, Callable[[list[bytes]], list[bytes]]]] = {
    "nothing": (4, lambda r: r),
    "flips a byte": (1, lambda r: [r[0], flipped(r[1], 100), *r[2:]]),
    "drops the last": (3, lambda r: r[:3]),
    "truncates": (3, lambda r: [*r[:3], r[3][:-1]]),
    "inserts": (1, lambda r: [r[0], random.Random(1).randbytes(5_000), *r[1:]]),
}


@pytest.mark.parametrize("meddling", MEDDLING)
async def test_who_meddles_on_the_path_breaks_the_channel_and_nothing_counts(
    meddling: str, nursery: trio.Nursery
) -> None:
    num_good, change = MEDDLING[meddling]
    data = random.Random(2).randbytes(3 * RECORD_BYTES + 1_000)
    memory = bytearray(len(data))
    incoming = Transfer(memoryview(memory))
    with trio.fail_after(PATIENCE):
        meddler = Meddler(change)
        async with open_meddled(meddler, 4) as (near, far):
            async with trio.open_nursery() as moving:
                moving.start_soon(near.send, memoryview(data))
                if num_good == 4:
                    await far.receive(incoming)
                else:
                    with pytest.raises(ChannelError):
                        await far.receive(incoming)
            if num_good == 4:
                await meddler.has_ended.wait()
            received = data[: num_good * RECORD_BYTES]
            assert incoming.position == len(received)
            assert memory[: len(received)] == received
            assert incoming.digest() == blake3(received).digest()
            assert not far.is_fit
            if num_good < 4:
                for _ in range(2):
                    with pytest.raises(ChannelError):
                        await far.receive(incoming)
                assert incoming.position == len(received)


@asynccontextmanager
async def open_meddled(meddler: Meddler, num_records: int) -> AsyncIterator[tuple[BulkChannel, BulkChannel]]:
    """Open both ends of a channel that leads through an attacker once it is open."""
    (alices, from_alice), (to_bob, bobs) = tcp_pair(), tcp_pair()
    near = BulkChannel(BOB, b"s" * 16, alices, SECRETS, Shaping())
    far = BulkChannel(ALICE, b"s" * 16, bobs, Secrets(SECRETS.opening, SECRETS.sealing), Shaping())
    middle = []
    for plain in (from_alice, to_bob):
        plain.setblocking(False)
        middle.append(trio.SocketStream(trio.socket.from_stdlib_socket(plain)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meddler.run, *middle, num_records)
        try:
            yield near, far
        finally:  # before the meddler's end: if Bob's window is shut, only this releases him
            for end in (near, far):
                end.close()
    for stream in middle:
        await stream.aclose()


SECRETS = Secrets(b"n" * 32, b"f" * 32)


async def test_whose_first_record_says_something_else_is_refused() -> None:
    dialled, accepted = tcp_pair()
    with accepted, trio.fail_after(PATIENCE):
        accepted.sendall(Sealer(SECRETS.opening, 0.0).seal(memoryview(b"hello"), 0.0))
        with pytest.raises(ChannelError, match="ready"):
            await BulkChannel(b"p" * 32, b"s" * 16, dialled, SECRETS, Shaping()).open(True)
    assert dialled.fileno() == -1


async def test_an_end_that_closes_says_so_and_a_cut_connection_does_not() -> None:
    async def error_after(ends: Callable[[BulkChannel, socket.socket], None]) -> str:
        alices, bobs = tcp_pair()
        near = BulkChannel(BOB, b"s" * 16, alices, SECRETS, Shaping())
        far = BulkChannel(ALICE, b"s" * 16, bobs, Secrets(SECRETS.opening, SECRETS.sealing), Shaping())
        await near.send(memoryview(b"data"))
        await far.receive(Transfer(memoryview(bytearray(4))))
        assert far.is_fit
        ends(near, alices)
        with pytest.raises(ChannelError) as caught:
            await far.receive(Transfer(memoryview(bytearray(4))))
        assert not far.is_fit
        near.close()
        far.close()
        return str(caught.value)

    with trio.fail_after(PATIENCE):
        assert await error_after(lambda near, _: near.close()) == "the peer closed the channel"
        cut = await error_after(lambda _, alices: alices.shutdown(socket.SHUT_RDWR))
        assert cut == "the connection ended without a final record"


async def test_no_final_record_follows_one_that_was_cut_short() -> None:
    alices, bobs = tcp_pair()
    near = BulkChannel(BOB, b"s" * 16, alices, SECRETS, Shaping())
    with bobs, trio.fail_after(PATIENCE):
        with trio.move_on_after(0.05):
            await near.send(memoryview(bytes(100 * RECORD_BYTES)))
        near.close()
        received = b""
        while piece := bobs.recv(1 << 20):
            received += piece
    opener, memory = Opener(SECRETS.sealing), memoryview(bytearray(RECORD_BYTES))
    while received:
        if not opener.take(memory):
            room = opener.wanted
            piece, received = received[: len(room)], received[len(room) :]
            room[: len(piece)] = piece
            opener.received(len(piece))
    while opener.take(memory):
        pass
    assert not opener.has_ended
