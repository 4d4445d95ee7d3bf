"""What moves over a channel is exact, however it is cut or attacked, or an error; it is kept for the next exchange."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing
from blake3 import blake3

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk import negotiation as bulk
from farandole.node.bulk.channel import BulkChannel, ChannelError
from farandole.protocol.exchange.pipe import Transfer
from farandole.protocol.wire.record_layer import RECORD_BYTES, Opener, Sealer

from ....patience import PATIENCE
from ...parties import ALICE
from ...sockets import SECRETS, channel_pair, tcp_pair
from .parties import Party, meet, move, two_parties


@pytest.mark.parametrize("sends", [True, False])
async def test_a_peer_that_dies_in_the_middle_is_an_error(alice: Party, bob: Party, sends: bool) -> None:
    near, far = await meet(alice, bob)
    memory = memoryview(bytearray(20_000_000))
    errors: list[ChannelError] = []

    async def move_all() -> None:
        with pytest.raises(ChannelError) as caught:
            await (near.send(memory) if sends else near.receive(Transfer(memory)))
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move_all)
        await (far.receive(Transfer(memory[:1_000])) if sends else far.send(memory[:1_000]))
        far.close()
    assert len(errors) == 1


@pytest.mark.parametrize("sends", [True, False])
async def test_cancellation_ends_the_thread_and_the_channel(alice: Party, bob: Party, sends: bool) -> None:
    near, far = await meet(alice, bob)
    memory = memoryview(bytearray(20_000_000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(near.send, memory) if sends else partial(near.receive, Transfer(memory)))
        await (far.receive(Transfer(memory[:1_000])) if sends else far.send(memory[:1_000]))
        nursery.cancel_scope.cancel()
    assert near._threads.borrowed_tokens == 0
    assert not near.is_fit
    assert not far.is_fit or sends  # what was sent before is still to be read
    near.close()
    far.close()
    with pytest.raises(ChannelError):
        await near.send(memory)


# How sends and receives are cut


@pytest.mark.parametrize("size", [10, 3 * RECORD_BYTES])
async def test_a_channel_with_a_rest_that_nobody_asked_for_is_not_used_again(
    alice: Party, bob: Party, size: int
) -> None:
    near, far = await meet(alice, bob)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send, memoryview(bytes(size)))
        await far.receive(Transfer(memoryview(bytearray(size - 1))))
    assert not far.is_fit
    bob.service.release(far)
    assert bob.service.take(ALICE, far.session) is None


# Channels that are kept for the next exchange


async def test_a_kept_channel_is_used_again(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    await move(near, far, b"first")
    alice.service.release(near)
    bob.service.release(far)
    again, far_again = await meet(alice, bob)
    assert (again, far_again) == (near, far)
    assert alice.host.streams_opened == 1
    await move(again, far_again, b"second")


async def test_a_kept_channel_that_the_peer_has_closed_is_replaced(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    alice.service.release(near)
    far.close()
    again, far_again = await meet(alice, bob)
    assert again is not near
    await move(again, far_again, b"data")


async def test_only_so_many_channels_are_kept(alice: Party, bob: Party) -> None:
    pairs = [await meet(alice, bob) for _ in range(bulk.MAX_IDLE + 1)]
    for near, _ in pairs:
        alice.service.release(near)
    assert [near.is_fit for near, _ in pairs] == [False] + [True] * bulk.MAX_IDLE


async def test_a_channel_is_called_for_by_its_peer_alone(alice: Party, bob: Party) -> None:
    near, far = await meet(alice, bob)
    bob.service.release(far)
    assert bob.service.take(b"m" * 32, near.session) is None
    assert bob.service.take(ALICE, b"x" * 16) is None
    assert bob.service.take(ALICE, near.session) is far
    assert bob.service.take(ALICE, near.session) is None


async def test_closing_the_service_closes_kept_channels(nursery: trio.Nursery) -> None:
    async with two_parties() as (alice, bob):
        near, _ = await meet(alice, bob)
        alice.service.release(near)
        port = bob.port
    assert not near.is_fit
    with pytest.raises(OSError, match=r"refused|failed"):
        await trio.open_tcp_stream("127.0.0.1", port)


async def test_idle_channels_close_in_time(
    alice: Party, bob: Party, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    near, far = await meet(alice, bob)
    alice.service.release(near)
    monkeypatch.setattr(bulk, "IDLE_TIMEOUT", 0.0)
    nursery.start_soon(alice.service.close_idle)
    while alice.service._idle:
        await trio.lowlevel.checkpoint()
    assert not near.is_fit
    far.close()
    nursery.cancel_scope.cancel()


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
