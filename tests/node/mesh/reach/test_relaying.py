"""Circuits between real hosts, on loopback: data, refusals, breaks, and the way from them to direct connections."""

from __future__ import annotations

import contextlib
import os
from functools import partial

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Reservation, Status, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.streams import read_exactly
from farandole.node.mesh.addresses import MAX_ADDRESSES
from farandole.node.mesh.dialler import Circuit
from farandole.node.mesh.host import Host
from farandole.node.mesh.libp2p_parts import encode_delimited, receive_message
from farandole.node.mesh.reach.punching import meet
from farandole.node.mesh.reach.reachability import Dialback
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.dialling import DCUTR_PROTOCOL
from farandole.protocol.mesh.reachability import ReachabilityKind, Verdict
from farandole.protocol.mesh.relay import (
    HOP_PROTOCOL,
    MAX_MESSAGE_BYTES,
    STOP_PROTOCOL,
    STRANGERS_CIRCUIT_BYTES,
    Limits,
)
from farandole.protocol.wire.identity import peer_id_bytes, public_bytes

from ....patience import PATIENCE
from ...hosts import (
    ECHO,
    echo,
    echoed,
    hang,
    host_at_loopback,
    num_tasks,
    open_home,
    open_node,
    open_relay,
    relayed_pair,
    reserve,
    until,
)

RESERVE = encode_delimited(HopMessage(type=HopMessage.RESERVE))
AGREED = encode_delimited(HopMessage(type=HopMessage.STATUS, status=Status.OK))


async def hear(stream: Libp2pStream) -> HopMessage:
    return await receive_message(stream, HopMessage, MAX_MESSAGE_BYTES)


async def ask(host: Host, relay: Host, raw: bytes) -> HopMessage:
    stream = await host.open_stream(relay.author, HOP_PROTOCOL)
    try:
        await stream.send_all(raw)
        answer = await hear(stream)
        assert answer.type == HopMessage.STATUS
        return answer
    finally:
        stream.reset()


async def test_two_homes_talk_through_a_relay_which_sees_ciphertext_only() -> None:
    async with relayed_pair() as (relay, alice, bob):
        assert alice.connections.path(bob.author) == bob.connections.path(alice.author) == "relayed"
        await until(lambda: alice.connections.round_trip(bob.author) is not None)
        assert all(
            "/p2p-circuit" in a
            for a in alice.connections.remote_addresses(bob.author) + bob.connections.remote_addresses(alice.author)
        )
        assert relay.server.table.num_circuits == 1
        payload = os.urandom(8 * 2**20)
        is_intact = await echoed(await alice.open_stream(bob.author, ECHO), payload) == payload
        assert is_intact
        await alice.connections.disconnect(bob.author)
        await until(lambda: alice.author not in bob.connected and relay.server.table.num_circuits == 0)


async def test_direct_addresses_go_first() -> None:
    async with open_relay() as relay, open_home() as alice, host_at_loopback() as bob:
        address = await reserve(bob, relay.host)
        await alice.connect(bob.author, [address, *bob.addresses])
        assert alice.connections.path(bob.author) == "direct"
        assert relay.server.table.num_circuits == 0


async def test_without_a_reservation_nobody_is_reached() -> None:
    async with open_relay() as relay, open_home() as alice, open_home() as bob:
        await bob.connect(relay.host.author, relay.host.addresses)
        address = f"{relay.host.addresses[0]}/p2p-circuit/p2p/{bob.peer_id}"
        with pytest.raises(PeerUnreachableError):
            await alice.connect(bob.author, [address])
        await alice.connect(relay.host.author, relay.host.addresses)
        question = HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=peer_id_bytes(bob.author)))
        answer = await ask(alice, relay.host, encode_delimited(question))
        assert answer.status == Status.NO_RESERVATION


async def test_a_reservation_ends_with_its_connection() -> None:
    async with open_relay() as relay, open_home() as bob:
        await bob.connect(relay.host.author, relay.host.addresses)
        answer = await ask(bob, relay.host, RESERVE)
        assert answer.status == Status.OK
        assert len(relay.server.table.reservations) == 1
        await bob.connections.disconnect(relay.host.author)
        await until(lambda: not relay.server.table.reservations)
        assert bob.relays.reservations == []


async def test_a_reservation_is_refused_beyond_the_limit_and_through_a_relay() -> None:
    limits = Limits(max_reservations_per_address=1)
    async with open_relay(limits) as relay, open_relay() as second, open_home() as alice, open_home() as bob:
        address = await reserve(second.host, relay.host)
        with pytest.raises(PeerUnreachableError, match="200"):
            await reserve(bob, relay.host)
        await alice.connect(second.host.author, [address])
        assert alice.connections.path(second.host.author) == "relayed"
        answer = await ask(alice, second.host, RESERVE)
        assert answer.status == Status.PERMISSION_DENIED


@pytest.mark.parametrize("member", ["source", "target", None])
async def test_strangers_get_a_little_and_members_what_they_need_also_with_a_newcomer(member: str | None) -> None:
    payload = bytes(16_384)
    num_pieces = 4 * STRANGERS_CIRCUIT_BYTES // len(payload)
    async with open_relay() as relay, open_home() as alice, open_home() as bob:
        who = {"source": alice.author, "target": bob.author}
        relay.host.relays.members = frozenset((who[member],) if member else ())
        bob.set_handler(ECHO, echo)
        await alice.connect(bob.author, [await reserve(bob, relay.host)])
        stream = await alice.open_stream(bob.author, ECHO)
        num_echoed = 0
        with contextlib.suppress(trio.BrokenResourceError):
            for _ in range(num_pieces):
                await stream.send_all(payload)
                await read_exactly(stream.receive_some, len(payload))
                num_echoed += 1
        if member is None:
            await until(lambda: relay.server.table.num_circuits == 0)
            assert 0 < 2 * num_echoed * len(payload) < STRANGERS_CIRCUIT_BYTES
        else:
            assert num_echoed == num_pieces


async def test_circuits_come_and_go_and_leave_nothing() -> None:
    async with open_relay() as relay, open_home() as alice, open_home() as bob:
        address = await reserve(bob, relay.host)

        async def come_and_go(times: int) -> None:
            for _ in range(times):
                await alice.connect(bob.author, [address])
                await alice.connections.disconnect(bob.author)
            await until(lambda: relay.server.table.num_circuits == 0)

        await come_and_go(1)
        await trio.sleep(0.5)
        before = num_tasks()
        await come_and_go(30)
        with trio.fail_after(PATIENCE):
            await until(lambda: num_tasks() <= before)


@pytest.mark.parametrize("limits", [Limits(circuit_seconds=1), Limits(idle_seconds=0.3)])
async def test_circuits_end_with_their_time_or_when_idle(limits: Limits) -> None:
    async with relayed_pair(limits) as (relay, alice, bob):
        await until(lambda: bob.author not in alice.connected and alice.author not in bob.connected)
        await until(lambda: relay.server.table.num_circuits == 0)


async def test_a_relay_that_dies_takes_its_circuits_and_reservations_along_and_nothing_else() -> None:
    async with open_home() as alice, open_home() as bob:
        async with open_relay() as relay:
            await alice.connect(bob.author, [await reserve(bob, relay.host)])
            assert len(bob.relays.reservations) == 1
        await until(lambda: bob.author not in alice.connected and alice.author not in bob.connected)
        assert bob.relays.reservations == []
        async with open_relay() as other:
            await alice.connect(bob.author, [await reserve(bob, other.host)])
            assert alice.connections.path(bob.author) == "relayed"


async def test_a_target_that_is_frozen_costs_the_caller_its_dial_and_the_relay_no_place() -> None:
    async with open_relay() as relay, open_home() as alice, open_home() as bob:
        address = await reserve(bob, relay.host)
        bob.set_handler(STOP_PROTOCOL, hang)
        with pytest.raises(PeerUnreachableError):
            await alice.connect(bob.author, [address])
        await until(lambda: relay.server.table.num_circuits == 0)


@pytest.mark.parametrize(
    "raw", [b"\xff\xff\xff\x7f", b"\x00", b"\x05hello", b"\x7f", bytes(100), b"\x80" * 40, b"\x02\x08\x09"]
)
async def test_hostile_bytes_to_a_relay_cost_their_stream_alone(raw: bytes) -> None:
    async with open_relay() as relay, open_home() as mallory, open_home() as bob, open_home() as alice:
        await mallory.connect(relay.host.author, relay.host.addresses)
        stream = await mallory.open_stream(relay.host.author, HOP_PROTOCOL)
        await stream.send_all(raw)
        await stream.send_eof()
        answer = await hear(stream)
        assert answer.type == HopMessage.STATUS
        assert answer.status == Status.MALFORMED_MESSAGE
        await alice.connect(bob.author, [await reserve(bob, relay.host)])


async def test_hostile_answers_of_a_relay_are_its_fault() -> None:
    for raw in (b"\xff\xff\xff\x7f", b"\x05hello", RESERVE, b"", AGREED):
        with trio.fail_after(PATIENCE):
            async with host_at_loopback() as mallory, open_home() as bob:

                async def answer(stream: Libp2pStream, raw: bytes = raw) -> None:
                    await stream.receive_some()
                    await stream.send_all(raw)

                mallory.set_handler(HOP_PROTOCOL, answer)
                await bob.connect(mallory.author, mallory.addresses)
                with pytest.raises(PeerUnreachableError):
                    await bob.relays.reserve(mallory.author)
                with pytest.raises(PeerUnreachableError):
                    address = f"{mallory.addresses[0]}/p2p-circuit"
                    await bob.connect(public_bytes(Ed25519PrivateKey.generate()), [address])
                assert mallory.author in bob.connected


async def test_nobody_is_passed_on_by_whom_was_not_asked_to() -> None:
    async with host_at_loopback() as mallory, open_home() as bob:
        await bob.connect(mallory.author, mallory.addresses)
        with pytest.raises((trio.BrokenResourceError, PeerUnreachableError)):
            stream = await mallory.open_stream(bob.author, STOP_PROTOCOL)
            call = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=peer_id_bytes(mallory.author)))
            await stream.send_all(encode_delimited(call))
            await stream.receive_some()


async def test_a_relay_cannot_pass_itself_off_as_another_peer() -> None:
    """The relay accepts the call and speaks for the peer itself; the handshake reveals it."""
    async with host_at_loopback() as mallory, open_home() as alice, open_home() as bob:

        async def speak_for_bob(stream: Libp2pStream) -> None:
            await hear(stream)
            await stream.send_all(AGREED)
            circuit = Circuit(stream, f"{mallory.addresses[0]}/p2p-circuit")
            await mallory.upgrader.upgrade(circuit, None, is_initiator=False)

        mallory.set_handler(HOP_PROTOCOL, speak_for_bob)
        with pytest.raises(PeerUnreachableError):
            await alice.connect(bob.author, [f"{mallory.addresses[0]}/p2p-circuit"])
        assert bob.author not in alice.connected


async def test_a_capped_relay_keeps_to_its_cap_and_still_lets_the_circuit_live() -> None:
    async with relayed_pair(shaping=Shaping.of_mbit(8, 8)) as (_, alice, bob):
        stream = await alice.open_stream(bob.author, ECHO)
        began = trio.current_time()
        size = 1_000_000
        received = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(size))
            while received < size:
                received += len(await stream.receive_some())
        # To bob and back: two megabytes over a line of one megabyte a second.
        assert trio.current_time() - began > 1.5


def test_no_message_is_longer_than_allowed() -> None:
    addresses = [Multiaddr(f"/dns4/{'a' * 60}.{'b' * 60}.example/tcp/4001").to_bytes()] * MAX_ADDRESSES
    longest = HopMessage(
        type=HopMessage.STATUS, status=Status.OK, reservation=Reservation(expire=2**31, addrs=addresses)
    )
    assert len(encode_delimited(longest)) <= MAX_MESSAGE_BYTES


SYNC, CONNECT = (encode_delimited(HolePunch(type=kind)) for kind in (HolePunch.SYNC, HolePunch.CONNECT))


# Opens a host that listens, and does not announce its addresses.
open_puncher = partial(open_node, verdict=Verdict(ReachabilityKind.PUNCHABLE))


async def test_a_relayed_pair_becomes_direct_and_lets_the_relay_go() -> None:
    async with open_relay() as relay, open_puncher() as (alice, _), open_puncher() as (bob, _):
        Dialback(relay.host)

        async def echo(stream: Libp2pStream) -> None:
            stream.is_bulk = True
            while data := await stream.receive_some():
                await stream.send_all(data)

        bob.set_handler(ECHO, echo)
        await alice.connect(relay.host.author, relay.host.addresses)
        await alice.connect(bob.author, [await reserve(bob, relay.host)])
        old = await alice.open_stream(bob.author, ECHO)
        old.is_bulk = True
        await until(lambda: alice.connections.path(bob.author) == bob.connections.path(alice.author) == "punched")
        assert alice.connections.is_direct(bob.author)
        # On connections that both have dialled, the caller of the relayed one is the client (libp2p specs, DCUtR).
        assert all(conn.muxed.is_initiator for conn in alice.connections.of(bob.author))
        assert not any(conn.muxed.is_initiator for conn in bob.connections.of(alice.author))
        async with await alice.open_stream(bob.author, ECHO) as stream:
            assert not stream.is_relayed
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
        await old.send_all(b"still under way")
        assert await old.receive_some() == b"still under way"
        old.reset()
        await until(lambda: relay.server.table.num_circuits == 0)


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\x7f", b"\x05hello", SYNC, CONNECT, b""])
async def test_hostile_bytes_cost_their_stream_alone(raw: bytes) -> None:
    async with open_relay() as relay, open_puncher() as (alice, _), open_puncher() as (mallory, _):
        mallory.handlers.remove(DCUTR_PROTOCOL)
        await alice.connect(mallory.author, [await reserve(mallory, relay.host)])
        stream = await mallory.open_stream(alice.author, DCUTR_PROTOCOL)
        await stream.send_all(raw)
        await stream.send_eof()
        with contextlib.suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass
        assert mallory.author in alice.connected


async def test_who_dials_as_others_do_from_where_a_peer_is_expected_is_let_in() -> None:
    async with open_puncher() as (alice, _), open_puncher() as (bob, _), open_puncher() as (carol, _):
        with bob.acceptor.expecting(carol.author, ["127.0.0.1"]):
            await alice.connect(bob.author, bob.addresses)
            assert bob.connections.path(alice.author) == "direct"


async def test_who_is_expected_may_leave_the_beginning_to_us() -> None:
    async with open_puncher() as (alice, _), open_puncher() as (bob, _):
        with bob.acceptor.expecting(alice.author, ["127.0.0.1"]):
            await meet(alice, bob.author, bob.own.listening[0], is_initiator=False)
            await until(lambda: alice.connections.path(bob.author) == bob.connections.path(alice.author) == "punched")


async def test_nobody_punches_over_a_direct_connection() -> None:
    async with open_puncher() as (alice, _), open_puncher() as (bob, _):
        await alice.connect(bob.author, bob.addresses)
        with pytest.raises((trio.BrokenResourceError, PeerUnreachableError)):
            addresses = [Multiaddr("/ip4/127.0.0.1/tcp/4001").to_bytes()]
            stream = await bob.open_stream(alice.author, DCUTR_PROTOCOL)
            await stream.send_all(encode_delimited(HolePunch(type=HolePunch.CONNECT, ObsAddrs=addresses)))
            await stream.receive_some()
