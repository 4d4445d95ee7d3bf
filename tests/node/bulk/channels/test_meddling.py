"""An attacker on the path of a channel."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable

import pytest
import trio
import trio.testing
from blake3 import blake3

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk.channel import BulkChannel, ChannelError
from farandole.protocol.exchange.pipe import Transfer
from farandole.protocol.wire.record_layer import RECORD_BYTES, Opener, Sealer

from ....patience import PATIENCE
from ...sockets import SECRETS, channel_pair, tcp_pair


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
async def test_who_meddles_on_the_path_breaks_the_channel_and_nothing_counts(meddling: str) -> None:
    num_good, change = MEDDLING[meddling]
    data, sealer = random.Random(2).randbytes(3 * RECORD_BYTES + 1_000), Sealer(SECRETS.sealing, 0.0)
    pieces = [memoryview(data)[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]
    changed = b"".join(change([bytes(sealer.seal(piece, 0.0)) for piece in pieces]))
    memory = bytearray(len(data))
    incoming, received = Transfer(memoryview(memory)), data[: num_good * RECORD_BYTES]

    with trio.fail_after(PATIENCE), channel_pair() as (_, far, alices):

        def send() -> None:
            with contextlib.suppress(OSError):
                alices.sendall(changed)
                alices.shutdown(socket.SHUT_WR)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, send)
            if num_good == 4:
                await far.receive(incoming)
            for _ in range(2):
                with pytest.raises(ChannelError):
                    await far.receive(incoming if num_good < 4 else Transfer(memoryview(bytearray(1))))
            far.close()
        assert incoming.position == len(received)
        assert memory[: len(received)] == received
        assert incoming.digest() == blake3(received).digest()
        assert not far.is_fit


async def test_whose_first_record_says_something_else_is_refused() -> None:
    dialled, accepted = tcp_pair()
    with accepted, trio.fail_after(PATIENCE):
        accepted.sendall(Sealer(SECRETS.opening, 0.0).seal(memoryview(b"hello"), 0.0))
        with pytest.raises(ChannelError, match="ready"):
            await BulkChannel(b"p" * 32, b"s" * 16, dialled, SECRETS, Shaping()).open(True)
    assert dialled.fileno() == -1


async def test_an_end_that_closes_says_so_and_a_cut_connection_does_not() -> None:
    async def error_after(ends: Callable[[BulkChannel, socket.socket], None]) -> str:
        with channel_pair() as (near, far, alices):
            await near.send(memoryview(b"data"))
            await far.receive(Transfer(memoryview(bytearray(4))))
            assert far.is_fit
            ends(near, alices)
            with pytest.raises(ChannelError) as caught:
                await far.receive(Transfer(memoryview(bytearray(4))))
            assert not far.is_fit
        return str(caught.value)

    with trio.fail_after(PATIENCE):
        assert await error_after(lambda near, _: near.close()) == "the peer closed the channel"
        cut = await error_after(lambda _, alices: alices.shutdown(socket.SHUT_RDWR))
        assert cut == "the connection ended without a final record"


async def test_no_final_record_follows_one_that_was_cut_short() -> None:
    alices, bobs = tcp_pair()
    near = BulkChannel(b"b" * 32, b"s" * 16, alices, SECRETS, Shaping())
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
