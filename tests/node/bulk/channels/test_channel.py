"""What moves over a channel: exact, however it is cut, or an error."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from farandole.node.bulk.channel import ChannelError
from farandole.protocol.wire.record_layer import RECORD_BYTES

from ...parties import ALICE
from .parties import Party, meet, move

SIZES = [1, 1_001, RECORD_BYTES, RECORD_BYTES + 1, 3_000_001]


@pytest.mark.parametrize("size", SIZES)
async def test_both_ways_at_once_the_bytes_are_exact(alice: Party, bob: Party, size: int) -> None:
    near, far = await meet(alice, bob)
    first, second = random.Random(1).randbytes(size), random.Random(2).randbytes(size)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(move, near, far, first)
        nursery.start_soon(move, far, near, second)
    assert near.is_fit
    assert far.is_fit


@pytest.mark.parametrize("sends", [True, False])
async def test_a_peer_that_dies_in_the_middle_is_an_error(alice: Party, bob: Party, sends: bool) -> None:
    near, far = await meet(alice, bob)
    memory = memoryview(bytearray(20_000_000))
    errors: list[ChannelError] = []

    async def move_all() -> None:
        with pytest.raises(ChannelError) as caught:
            await (near.send(memory) if sends else near.receive_into(memory))
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move_all)
        await (far.receive_into(memory[:1_000]) if sends else far.send(memory[:1_000]))
        far.close()
    assert len(errors) == 1


@pytest.mark.parametrize("sends", [True, False])
async def test_cancellation_ends_the_thread_and_the_channel(alice: Party, bob: Party, sends: bool) -> None:
    near, far = await meet(alice, bob)
    memory = memoryview(bytearray(20_000_000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send if sends else near.receive_into, memory)
        await (far.receive_into(memory[:1_000]) if sends else far.send(memory[:1_000]))
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
        await far.receive_into(memoryview(bytearray(size - 1)))
    assert not far.is_fit
    bob.service.release(far)
    assert bob.service.take(ALICE, far.session) is None
