"""Channels that are kept for the next exchange."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from farandole.node.bulk import negotiation as bulk

from ...parties import ALICE
from .parties import Party, meet, move, two_parties


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
    bob.service.discard(far)
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
