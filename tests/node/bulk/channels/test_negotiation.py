"""Negotiation of a channel, and peers that get none; in a private run also what a watcher on the path records."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from trio.testing import MockClock

from farandole.node.base.settings import DEFAULT_LISTEN
from farandole.node.bulk import negotiation as bulk
from farandole.node.bulk.negotiation import (
    BULK_PROTOCOL,
    FIRST_RETRY_AFTER,
    MAX_UNPROVEN_PER_ADDRESS,
    PRIVATE_BULK_PROTOCOL,
    open_bulk,
)
from farandole.node.mesh.host import open_host
from farandole.protocol.exchange.bulk import GREETING_BYTES, greeting
from farandole.protocol.run.invite import NETWORK_KEY_BYTES, NONCE_BYTES, cipher_of
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.messagepack import encode
from farandole.protocol.wire.record_layer import HEADER_BYTES, RECORD_BYTES, TAG_BYTES

from ....patience import PATIENCE
from ...hosts import Line, has_ipv6, host_at_loopback
from ...parties import ALICE, BOB, RUN_ID
from .parties import Party, assert_refused, meet, move, noted, two_parties


@pytest.mark.skipif(sys.platform != "linux", reason="needs 127.0.0.2")
async def test_announced_addresses_leave_the_listener_where_the_node_listens() -> None:
    """Binding all interfaces would open a port that the owner has not opened."""
    announce = ["/ip4/8.8.8.8/tcp/4001", "/ip6/2606:4700::1111/tcp/4001"]
    async with host_at_loopback(announce=announce) as host, open_bulk(host, RUN_ID):
        (port,) = host.own.bulk_ports
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), PATIENCE)
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()


async def test_a_network_that_comes_later_leads_to_the_listeners_too() -> None:
    """A laptop has one address, and another one in the next network; or none when its node starts."""
    async with open_host(Ed25519PrivateKey.generate(), DEFAULT_LISTEN) as host, open_bulk(host, RUN_ID):
        (port,) = host.own.bulk_ports  # for both versions of IP: an owner opens one port in the router
        for later in ["127.0.0.1", "::1"] if has_ipv6() else ["127.0.0.1"]:
            socket.create_connection((later, port), PATIENCE).close()


async def test_what_the_router_sends_on_is_offered_first_and_what_others_observe(alice: Party, bob: Party) -> None:
    bob.host.own.mapped[bob.port] = ("5.1.1.1", 5_002)
    bob.host.observed = [("5.1.1.1", 5_003)]
    offered = noted(bob)
    assert bob.host.own.bulk_ports == {bob.port}
    await meet(alice, bob)
    assert offered[0].addresses == [("5.1.1.1", 5_002), ("5.1.1.1", 5_003), ("127.0.0.1", bob.port)]


async def test_who_is_out_of_reach_costs_no_wait(alice: Party, bob: Party) -> None:
    alice.host.unreachable.add(BOB)
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    assert alice.host.streams_opened == 0
    alice.host.unreachable.clear()
    await meet(alice, bob)


async def test_who_could_not_be_reached_is_tried_again_soon_and_then_later(
    alice: Party, bob: Party, caplog: pytest.LogCaptureFixture, clock: MockClock
) -> None:
    caplog.set_level("INFO", bulk.__name__)
    assert await alice.service.acquire(BOB) is None
    await trio.sleep(FIRST_RETRY_AFTER)
    assert await alice.service.acquire(BOB) is None
    assert alice.host.streams_opened == 2
    assert "for 20 s no channel is tried" in caplog.messages[-1]


async def test_who_could_not_be_reached_is_tried_again_over_another_connection(alice: Party, bob: Party) -> None:
    assert await alice.service.acquire(BOB) is None
    alice.host.remote_port += 1
    await meet(alice, bob)


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("who", [ALICE, BOB])
async def test_a_peer_that_freezes_in_the_negotiation_costs_its_timeout(alice: Party, bob: Party, who: bytes) -> None:
    (alice if who == ALICE else bob).host.is_frozen = True
    await assert_refused(alice, bob)


async def test_each_negotiation_has_keys_of_its_own(alice: Party, bob: Party) -> None:
    proposed = noted(alice, bob)
    for _ in range(2):
        await meet(alice, bob)
    assert len({proposal.key for proposal in proposed}) == len(proposed) == 4


async def test_a_stranger_is_cut_off_while_nothing_is_negotiated(bob: Party) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", bob.port) as stranger:
        assert await _closed_by_peer(stranger)


async def test_a_negotiation_for_which_the_exchange_has_no_more_time_counts_as_failed(alice: Party, bob: Party) -> None:
    bob.host.is_frozen = True
    with bob.service.expecting(ALICE), trio.move_on_after(0.1):
        await alice.service.acquire(BOB)
    bob.host.is_frozen = False
    with bob.service.expecting(ALICE):
        assert await alice.service.acquire(BOB) is None
    assert alice.host.streams_opened == 1


ANOTHERS_KEY = X25519PrivateKey.generate().public_key().public_bytes_raw()


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("lie", [{"key": ANOTHERS_KEY}, {"key": bytes(32)}, {"key": b""}, {"token": bytes(32)}])
@pytest.mark.parametrize("liar", [ALICE, BOB])
async def test_a_proposal_that_lies_brings_no_channel(
    alice: Party, bob: Party, liar: bytes, lie: dict[str, object]
) -> None:
    host = alice.host if liar == ALICE else bob.host
    host.change = lambda proposal: msgspec.structs.replace(proposal, **lie)
    await assert_refused(alice, bob)


async def test_an_answer_to_another_session_brings_no_channel(alice: Party, bob: Party) -> None:
    bob.host.change = lambda proposal: msgspec.structs.replace(proposal, session=b"x" * 16)
    await assert_refused(alice, bob)


@pytest.mark.parametrize("hidden", [ALICE, BOB])
async def test_one_listener_within_reach_is_enough(alice: Party, bob: Party, hidden: bytes) -> None:
    host = alice.host if hidden == ALICE else bob.host
    host.change = lambda proposal: msgspec.structs.replace(proposal, addresses=[])
    near, far = await meet(alice, bob)
    await move(near, far, b"data")


async def _closed_by_peer(connection: trio.SocketStream) -> bool:
    try:
        return await connection.receive_some(1) == b""
    except trio.BrokenResourceError:
        return True


@pytest.mark.usefixtures("short_timeouts")
async def test_strangers_get_in_neither_silent_nor_talking_and_do_not_hinder(
    alice: Party, bob: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "OPEN_TIMEOUT", PATIENCE)
    with bob.service._race(b"m" * 32, b"s" * 16, [], is_asker=True) as race:
        rubbish = [await trio.open_tcp_stream("127.0.0.1", bob.port) for _ in range(3)]
        await rubbish[0].send_all(greeting(b"s" * 16, b"u" * 32))
        await rubbish[1].send_all(greeting(b"x" * 16, race.proposal.token))
        await rubbish[2].send_all(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
        for stranger in rubbish:
            assert await _closed_by_peer(stranger)
            await stranger.aclose()
        silent = [await trio.open_tcp_stream("127.0.0.1", bob.port) for _ in range(MAX_UNPROVEN_PER_ADDRESS + 3)]
        await trio.testing.wait_all_tasks_blocked()
        near, far = await meet(alice, bob)  # by the reverse dial
        for stranger in silent:
            assert await _closed_by_peer(stranger)
            await stranger.aclose()
    await move(near, far, b"data")


async def test_a_stranger_with_another_token_is_not_told_the_peers(bob: Party) -> None:
    with bob.service._race(ALICE, b"s" * 16, [], is_asker=True) as race:
        race.is_on.set()
        async with await trio.open_tcp_stream("127.0.0.1", bob.port) as stranger:
            await stranger.send_all(greeting(b"s" * 16, b"u" * 32))
            assert await _closed_by_peer(stranger)


class CancelledAt(trio.abc.Instrument):
    """Cancels a scope before the task that creates this object takes its ``step``-th step."""

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self._task, self._scope, self.steps_left = trio.lowlevel.current_task(), scope, step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self.steps_left -= 1
            if not self.steps_left:
                self._scope.cancel()


@contextlib.contextmanager
def cancelled_at(step: int) -> Iterator[CancelledAt]:
    """Cancel the block at this step."""
    with trio.CancelScope() as scope:
        instrument = CancelledAt(scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            yield instrument
        finally:
            trio.lowlevel.remove_instrument(instrument)


async def test_wherever_an_attempt_is_cancelled_no_socket_is_left_open() -> None:
    channel = None
    for step in itertools.count(1):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            async with two_parties() as (alice, bob):
                with bob.service.expecting(ALICE), cancelled_at(step) as instrument:
                    channel = await alice.service.acquire(BOB)
                assert not alice.service._races
                if channel is not None:
                    channel.close()
            gc.collect()
        assert not [str(each.message) for each in warned], f"cancelled at step {step}"
        if instrument.steps_left > 0:
            break
    assert step > 5  # otherwise there was nothing to cancel


async def test_no_two_negotiations_with_one_peer(alice: Party, bob: Party) -> None:
    with bob.service.expecting(ALICE), bob.service._race(ALICE, b"1" * 16, [], is_asker=True) as race:
        stream = await alice.host.open_stream(BOB, BULK_PROTOCOL)
        await stream.send_all(frame(encode(msgspec.structs.replace(race.proposal, session=b"2" * 16)), 4_096))
        assert await stream.receive_some(1) == b""


async def test_who_passes_anothers_proposals_on_gets_between_nobody(alice: Party, bob: Party) -> None:
    """Mallory is in the middle of two libp2p streams of her own: Alice means to talk to her, and so does Bob."""
    mallory = b"m" * 32
    alice.host.network[mallory] = bob.host  # Alice's stream to Mallory ends at Bob, unchanged
    await assert_refused(alice, bob, mallory)


@pytest.mark.parametrize("other", [{"run_id": b"x" * 32}, {"handshake_hash": b"x" * 32}])
async def test_ends_in_different_runs_or_on_different_connections_get_no_channel(other: dict[str, Any]) -> None:
    """A man in the middle would need this: proposals forwarded between two connections of its own."""
    async with two_parties(**other) as (alice, bob):
        await assert_refused(alice, bob)


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
