"""Attacks on an exchange by a partner or a stranger: they cost its deadline, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.bulk.exchange_service import EXCHANGE_PROTOCOL, FAREWELL_TIMEOUT, TOO_LONG
from farandole.protocol.exchange.exchange import Aborted, Accepted, Commit, Exchange, Offer
from farandole.protocol.exchange.pipe import CHUNK_BYTES, Route, TransferReceived

from ..parties import ALICE, BOB, SIZE, MemoryChannel, MemoryHost, Party, assert_committed
from .bulk_pair import BulkPair
from .liars import Liar, meet_liar


@pytest.mark.parametrize("lie", [{"run_id": b"x" * 32}, {"size": 2**44}])
async def test_an_offer_that_does_not_fit_is_refused_before_any_data(
    bob: Party, lie: dict[str, object], clock: MockClock
) -> None:
    async def script(liar: Liar) -> None:
        await liar.stream.send_all(liar.exchange.send(msgspec.structs.replace(liar.exchange.offer, **lie)))

    await meet_liar(bob, script)
    assert not bob.result.committed
    assert "the partner broke the protocol: the partner's offer is of another" in bob.result.reason
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_bytes_behind_the_decision_change_nothing(bob: Party, clock: MockClock) -> None:
    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.send_contribution)
            await liar.expect(TransferReceived)
        await liar.expect(Accepted)
        await liar.stream.send_all(liar.exchange.send(Commit()) + b"rubbish")

    await meet_liar(bob, script)
    assert bob.result.committed
    assert bob.incoming == bytes(SIZE)


async def test_a_stranger_cannot_take_the_partners_place(alice: Party, bob: Party, clock: MockClock) -> None:
    mallory = MemoryHost(b"m" * 32, alice.host.nursery, alice.host.network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        await trio.testing.wait_all_tasks_blocked()
        stream = await mallory.open_stream(BOB, EXCHANGE_PROTOCOL)
        liar = Exchange(True, alice.offer, memoryview(bytearray(SIZE)))
        await stream.send_all(liar.send(alice.offer))
        assert await stream.receive_some(1) == b""
        nursery.start_soon(alice.exchange, BOB)
    assert_committed(alice, bob)


async def test_an_abort_in_the_middle_ends_it_at_once(bob: Party, clock: MockClock) -> None:
    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        await liar.send(liar.contribution[:CHUNK_BYTES])
        await liar.send(Aborted("out of memory"))

    await meet_liar(bob, script)
    assert bob.result.reason == "the partner aborted: out of memory"
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_who_says_at_once_that_it_took_too_long_is_not_believed(bob: Party, clock: MockClock) -> None:
    """This node's owner would otherwise read that the line is slow."""

    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        await liar.send(Aborted(TOO_LONG))

    await meet_liar(bob, script)
    assert bob.result.reason == f"the partner aborted: {TOO_LONG}"


async def agree_on_channel(liar: Liar, pair: BulkPair) -> MemoryChannel:
    """Begin honestly, up to the agreement on a channel."""
    await liar.send(liar.exchange.offer)
    await liar.expect(Offer)
    channel = await pair.way(ALICE).acquire(BOB)
    assert channel is not None
    await liar.send(Route(channel.session, 0))
    await liar.expect(Route)
    return channel


async def test_an_abort_ends_what_moves_over_the_channel(pair: BulkPair, clock: MockClock) -> None:
    pair.way(ALICE).faults.freeze_at = 1_000

    async def script(liar: Liar) -> None:
        await agree_on_channel(liar, pair)
        await liar.send(Aborted("out of memory"))

    await meet_liar(pair.bob, script, pair.alice.contribution)
    assert pair.bob.result.reason == "the partner aborted: out of memory"
    assert pair.way(BOB).discarded
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_all_of_a_contribution_and_no_hash_is_worth_nothing(pair: BulkPair, clock: MockClock) -> None:
    async def script(liar: Liar) -> None:
        channel = await agree_on_channel(liar, pair)
        await channel.send(liar.contribution)
        await trio.testing.wait_all_tasks_blocked()
        await liar.send(Route(None, 0))

    await meet_liar(pair.bob, script, pair.alice.contribution)
    assert pair.bob.incoming == pair.alice.contribution
    assert pair.bob.result.reason == "the partner broke the protocol: all of the transfer, and no hash"
    assert trio.current_time() <= FAREWELL_TIMEOUT


async def test_a_channel_that_is_not_there_is_not_used(pair: BulkPair, clock: MockClock) -> None:
    async def script(liar: Liar) -> None:
        await liar.send(liar.exchange.offer)
        await liar.expect(Offer)
        await liar.send(Route(b"x" * 16, 0))
        await liar.expect(Route)
        assert liar.exchange.pipe.channel is None
        await liar.send(Aborted("never mind"))

    await meet_liar(pair.bob, script, pair.alice.contribution)
    assert pair.bob.result.path == "stream"
