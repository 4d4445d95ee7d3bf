"""Hosts on loopback that meet over a relay and become direct. The lab has NAT (tests/testnet/natlab)."""

import contextlib
from functools import partial

import pytest
import trio
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh.libp2p_parts import encode_delimited
from farandole.node.mesh.reach.punching import meet
from farandole.node.mesh.reach.reachability import Dialback
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.dialling import DCUTR_PROTOCOL
from farandole.protocol.mesh.reachability import ReachabilityKind, Verdict

from ...hosts import open_node, open_relay, reserve, until

ECHO = "/echo/1"
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
