"""What libp2p 0.8.1 does wrong, and node/mesh does not."""

import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import cast

import pytest
import trio
from libp2p.abc import IRawConnection
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.rsa import create_new_key_pair as create_new_rsa_key_pair
from libp2p.crypto.secp256k1 import create_new_key_pair as create_new_secp256k1_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.peer.id import ID
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID
from libp2p.security.noise.transport import Transport
from trio.testing import wait_all_tasks_blocked

from farandole.node.base.streams import read_exactly
from farandole.node.mesh import yamux
from farandole.node.mesh.connections import IDENTIFY_PROTOCOL, MAX_CONNECTIONS_PER_PEER
from farandole.node.mesh.links import Negotiation, Socket
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.kademlia import KAD_PROTOCOL
from farandole.protocol.wire.errors import RemoteProtocolError

from ...patience import PATIENCE
from ..hosts import ECHO, Line, assert_answers, assert_echo, connected_pair, echo, hang, host_at_loopback, port_of

MULTISTREAM = "/multistream/1.0.0"


def message(text: str) -> bytes:
    """Return one multistream message."""
    return bytes((len(text) + 1,)) + text.encode() + b"\n"


# Silent sockets kept all other peers out


async def test_an_unfinished_handshake_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "HANDSHAKE_TIMEOUT", 0.05)
    async with host_at_loopback() as bob, await trio.open_tcp_stream("127.0.0.1", port_of(bob)) as socket:
        while await socket.receive_some():
            pass


# False lengths, before authentication

LIE_OF_256_MIB = b"\x80\x80\x80\x80\x01"


async def test_a_lying_length_costs_less_than_a_megabyte_a_connection_and_ends_it() -> None:
    async with host_at_loopback() as bob:
        bob.set_handler(ECHO, echo)
        async with AsyncExitStack() as stack:
            dials = [await trio.open_tcp_stream("127.0.0.1", port_of(bob)) for _ in range(8)]
            sockets = [await stack.enter_async_context(socket) for socket in dials]
            tracemalloc.start(1)
            try:
                for socket in sockets:
                    await socket.send_all(message(MULTISTREAM) + LIE_OF_256_MIB + bytes(100))
                await wait_all_tasks_blocked(0.1)
                assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
            finally:
                tracemalloc.stop()
        async with await trio.open_tcp_stream("127.0.0.1", port_of(bob)) as socket:
            await socket.send_all(message(MULTISTREAM) + LIE_OF_256_MIB)
            while await socket.receive_some():
                pass
        await assert_answers(bob)


async def test_a_handshake_may_not_be_long() -> None:
    async with host_at_loopback() as bob, await trio.open_tcp_stream("127.0.0.1", port_of(bob)) as socket:
        await socket.send_all(message(MULTISTREAM))
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await socket.send_all(message("/none") * 1000)


# Plaintext


async def test_nothing_but_noise_is_accepted() -> None:
    async with host_at_loopback() as bob:
        for protocol in (PLAINTEXT_PROTOCOL_ID, "/secio/1.0.0", "/tls/1.0.0", "/noise"):
            async with await trio.open_tcp_stream("127.0.0.1", port_of(bob)) as socket:
                await socket.send_all(message(MULTISTREAM) + message(protocol))
                answer = message(MULTISTREAM) + message(protocol if protocol == "/noise" else "na")
                assert await read_exactly(socket.receive_some, len(answer)) == answer


# Handlers that fail


async def test_a_handler_that_fails_costs_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(stream: Libp2pStream) -> None:
        await stream.receive_some()
        raise ZeroDivisionError

    async with connected_pair() as (alice, bob):
        bob.set_handler("/fail/1", fail)
        stream = await alice.open_stream(bob.author, "/fail/1")
        await stream.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        assert bob.author in alice.connected
        await assert_answers(bob)
    assert "/fail/1" in caplog.text


@pytest.mark.parametrize("protocol", [IDENTIFY_PROTOCOL, KAD_PROTOCOL])
async def test_garbage_to_what_the_library_serves_costs_streams_only(protocol: str) -> None:
    rng = random.Random(protocol)
    async with connected_pair() as (alice, bob):
        for number in range(60):
            stream = await alice.open_stream(bob.author, protocol)
            body = rng.randbytes(rng.randrange(1, 200))
            # half of the time well framed, so that it reaches the next parser
            framed = bytes((len(body) % 128,)) + body[: len(body) % 128] if number % 2 else body
            try:
                await stream.send_all(framed)
                await stream.send_eof()
                with trio.move_on_after(0.05):
                    await stream.receive_some()
            except trio.BrokenResourceError:
                pass
            stream.reset()
        await assert_answers(bob)


# Frozen peers


@pytest.mark.parametrize("end", ["freezes", "is cut"])
async def test_a_peer_whose_line_freezes_or_is_cut_is_given_up_even_with_a_full_pipe(end: str) -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob, trio.open_nursery() as nursery:
        alice.connections.ping_interval, alice.connections.ping_timeout = 0.1, 2.0
        bob.set_handler("/hold/1", hang)
        line = Line(nursery, port_of(bob))
        await alice.connect(bob.author, [f"/ip4/127.0.0.1/tcp/{await line.open()}"])
        streams = [await alice.open_stream(bob.author, "/hold/1") for _ in range(40)]
        assert alice.connected == {bob.author}
        line.is_frozen = True
        if end == "is cut":
            for each in line.ends:
                await each.aclose()
        async with trio.open_nursery() as sending:
            for stream in streams:
                sending.start_soon(_send_until_broken, stream)
            while alice.connected:
                await alice.connections.changed.park()
        nursery.cancel_scope.cancel()


async def _send_until_broken(stream: Libp2pStream) -> None:
    with pytest.raises(trio.BrokenResourceError):
        while True:
            await stream.send_all(os.urandom(65536))


async def test_a_living_peer_is_not_given_up() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        for pool in (alice.connections, bob.connections):
            pool.ping_interval, pool.ping_timeout = 0.01, PATIENCE
        await alice.connect(bob.author, bob.addresses)
        (connection,) = alice.connections.of(bob.author)
        before = connection.muxed.num_received
        while connection.muxed.num_received < before + 20 * 12:
            await connection.muxed.ping()
        assert bob.author in alice.connected


# Which peers may open which streams


async def test_of_strangers_the_idle_make_room_first() -> None:
    async with host_at_loopback() as bob, AsyncExitStack() as stack:
        bob.connections.max_connections = 2
        bob.set_handler(ECHO, echo)
        busy, idle, newcomer = [await stack.enter_async_context(host_at_loopback()) for _ in range(3)]
        await busy.connect(bob.author, bob.addresses)
        held = await busy.open_stream(bob.author, ECHO)
        await idle.connect(bob.author, bob.addresses)
        while any(conn.is_in_use for conn in bob.connections.of(idle.author)):
            await wait_all_tasks_blocked(0.05)
        await newcomer.connect(bob.author, bob.addresses)
        await wait_all_tasks_blocked(0.1)
        assert bob.connected == {busy.author, newcomer.author}
        await held.send_all(b"x")
        assert await held.receive_some() == b"x"


async def test_connections_of_one_peer_are_bounded() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        bob.set_handler(ECHO, echo)
        for _ in range(MAX_CONNECTIONS_PER_PEER + 3):
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(bob))
            muxed = await alice.upgrader.upgrade(Socket(stream), bob.author, is_initiator=True)
            await alice.connections.add(muxed, is_outbound=True)
        await assert_echo(alice, bob)
        assert len(bob.connections.of(alice.author)) <= MAX_CONNECTIONS_PER_PEER


@pytest.mark.parametrize("create", [create_new_secp256k1_key_pair, create_new_rsa_key_pair])
async def test_a_peer_whose_key_is_not_ed25519_is_refused(
    create: Callable[[], KeyPair], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "farandole"):
        pair = create()
        noise = Transport(pair, noise_privkey=create_new_x25519_key_pair().private_key)
        async with host_at_loopback() as bob:
            async with await trio.open_tcp_stream("127.0.0.1", port_of(bob)) as stream:
                link = Socket(stream)
                await Negotiation(link.read, link.write).propose("/noise")
                session = await noise.secure_outbound(cast("IRawConnection", link), ID.from_base58(bob.peer_id))
                with pytest.raises((RemoteProtocolError, trio.BrokenResourceError)):
                    await Negotiation(session.read, session.write).propose("/yamux/1.0.0")
            while "has no Ed25519 key" not in caplog.text:
                await trio.lowlevel.checkpoint()
            assert bob.connected == frozenset()


async def test_what_a_peer_says_of_its_addresses_is_remembered_after_connecting() -> None:
    async with connected_pair() as (alice, bob):
        while not bob.dialler.known.of(alice.author):  # alice has dialled: bob asks her
            await wait_all_tasks_blocked(0.01)
        assert bob.dialler.known.of(alice.author) == [address.partition("/p2p/")[0] for address in alice.addresses]


async def test_nobody_sends_the_library_megabytes() -> None:
    announced = b"\x80\x80\x80\x02"  # 4 MiB
    async with connected_pair() as (alice, bob):
        stream = await alice.open_stream(bob.author, KAD_PROTOCOL)
        num_sent = 0
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(announced)
            while True:
                await stream.send_all(bytes(16 * 1024))
                num_sent += 16 * 1024
                await wait_all_tasks_blocked()
        assert num_sent <= 2 * 128 * 1024


def test_a_daemon_loads_no_http_or_dns_client_and_neither_tls_nor_yamux_of_libp2p() -> None:
    code = "import sys, farandole.node.daemon; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "libp2p.security.noise.transport" in loaded
    unwanted = {"httpx", "requests", "dns", "libp2p.host.basic_host"}
    assert (unwanted | {"libp2p.security.tls", "libp2p.stream_muxer.yamux"}).isdisjoint(loaded)
