"""What moves over a channel is exact, however it is cut, or an error; a channel is kept for the next exchange."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from farandole.node.bulk import negotiation as bulk
from farandole.node.bulk.channel import ChannelError
from farandole.protocol.exchange.pipe import Transfer
from farandole.protocol.wire.record_layer import RECORD_BYTES

from ...parties import ALICE
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
