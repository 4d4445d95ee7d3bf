"""Bulk channels of a private run: what a watcher on the path records, and what a stranger gets who connects."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import msgspec
import pytest
import trio

from farandole.node.bulk.negotiation import BULK_PROTOCOL, PRIVATE_BULK_PROTOCOL, open_bulk
from farandole.protocol.exchange.bulk import GREETING_BYTES, greeting
from farandole.protocol.run.invite import NETWORK_KEY_BYTES, NONCE_BYTES, cipher_of
from farandole.protocol.wire.record_layer import HEADER_BYTES, RECORD_BYTES, TAG_BYTES

from ...hosts import Line, host_at_loopback
from ...parties import ALICE, BOB, RUN_ID
from .parties import Party, meet, move, two_parties

KEY, OTHER_KEY = b"k" * NETWORK_KEY_BYTES, b"o" * NETWORK_KEY_BYTES
FULL_HEADER = (RECORD_BYTES + TAG_BYTES).to_bytes(HEADER_BYTES, "big")


def lead_to(alice: Party, bob: Party, port: int) -> None:
    """Let both ends offer only this port, as Bob's."""
    alice.host.change = lambda proposal: msgspec.structs.replace(proposal, addresses=[])
    bob.host.change = lambda proposal: msgspec.structs.replace(proposal, addresses=[("127.0.0.1", port)])


def is_flat(data: bytes) -> bool:
    """Return whether the bytes could be random: by the chi-square of their values, which has 255 degrees of freedom."""
    expected, counts = len(data) / 256, Counter(data)
    return sum((counts[value] - expected) ** 2 for value in range(256)) / expected < 400


@pytest.mark.parametrize("key", [KEY, b""])
async def test_a_watcher_records_random_bytes_where_the_run_is_private(key: bytes, nursery: trio.Nursery) -> None:
    first, second = random.Random(1).randbytes(5 * RECORD_BYTES), random.Random(2).randbytes(5 * RECORD_BYTES)
    async with two_parties(network_key=key) as (alice, bob):
        line = Line(nursery, bob.port)
        lead_to(alice, bob, await line.open())
        near, far = await meet(alice, bob)
        async with trio.open_nursery() as moving:
            moving.start_soon(move, near, far, first)
            moving.start_soon(move, far, near, second)
        used = [bytes(record) for record in line.recorded if len(record) > RECORD_BYTES]
        assert len(used) == 2
        for record in used:
            assert (near.session in record) == (not key)
            assert (record.count(FULL_HEADER) >= 5) == (not key)
        greetings = [bytes(record[: NONCE_BYTES + GREETING_BYTES]) for record in line.recorded]
        assert any(near.session in each for each in greetings) == (not key)
        assert not key or all(left[:8] != right[:8] for left, right in itertools.combinations(greetings, 2))
        assert not key or all(map(is_flat, used))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("known", ["the session and the token", "another key", "nothing"])
async def test_a_stranger_that_connects_gets_no_answer(known: str) -> None:
    async with two_parties(network_key=KEY) as (_, bob):
        with bob.service._race(ALICE, b"s" * 16, [], is_asker=True) as race:
            race.is_on.set()
            told = greeting(b"s" * 16, race.proposal.token)
            nonce = bytes(NONCE_BYTES)
            said = {
                "the session and the token": told + bytes(NONCE_BYTES),
                "another key": nonce + cipher_of(OTHER_KEY, nonce).update(told),
                "nothing": b"",
            }[known]
            async with await trio.open_tcp_stream("127.0.0.1", bob.port) as stranger:
                await stranger.send_all(said)
                await stranger.send_eof()
                assert await stranger.receive_some() == b""


async def test_a_stranger_that_is_dialled_and_reflects_what_it_gets_is_left(nursery: trio.Nursery) -> None:
    got: list[bytes] = []

    async def reflect(stream: trio.SocketStream) -> None:
        got.append(b"")
        while data := await stream.receive_some():
            got[-1] += data
            await stream.send_all(data)

    async with two_parties(network_key=KEY) as (alice, bob):
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        lead_to(alice, bob, listeners[0].socket.getsockname()[1])
        nursery.start_soon(trio.serve_listeners, reflect, listeners)
        with bob.service.expecting(ALICE), trio.move_on_after(0.5):
            assert await alice.service.acquire(BOB) is None
        assert {len(each) for each in got} == {NONCE_BYTES + GREETING_BYTES}
        assert all(is_flat(b"".join(got)[at::7]) for at in range(7))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("key", [KEY, b""])
async def test_the_key_is_that_of_the_hosts_connections(key: bytes) -> None:
    async with host_at_loopback(network_key=key) as host, open_bulk(host, RUN_ID):
        served = {protocol for protocol in host.handlers.protocols if "bulk" in protocol}
    assert served == {PRIVATE_BULK_PROTOCOL if key else BULK_PROTOCOL}
