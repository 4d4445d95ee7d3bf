"""Defects of libp2p 0.8.1 and node/mesh's workarounds: the defect, where cheap to show, and the workaround."""

import os
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from typing import Any, cast

import libp2p
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import IRawConnection
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.rsa import create_new_key_pair as create_new_rsa_key_pair
from libp2p.crypto.secp256k1 import create_new_key_pair as create_new_secp256k1_key_pair
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID
from libp2p.security.noise.transport import Transport
from multiaddr import Multiaddr
from trio.testing import wait_all_tasks_blocked

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.base.streams import read_exactly
from farandole.node.mesh import upgrading
from farandole.node.mesh.admission import MAX_HANDSHAKES_PER_ADDRESS
from farandole.node.mesh.connections import MAX_CONNECTIONS_PER_PEER
from farandole.node.mesh.dht import Dht
from farandole.node.mesh.host import MAX_IDENTIFY_BYTES, Host
from farandole.node.mesh.libp2p_parts import receive_message
from farandole.node.mesh.links import Socket
from farandole.node.mesh.upgrading import IDENTIFY_PROTOCOL, PING_PROTOCOL, Negotiation
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.kademlia import KAD_PROTOCOL
from farandole.protocol.mesh.yamux import MAX_WAITING_STREAMS
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import public_bytes, public_key_of

from ...patience import PATIENCE
from ..hosts import ECHO, LOOPBACK, assert_answers, assert_echo, connected_pair, echo, host_at_loopback

MULTISTREAM = "/multistream/1.0.0"
SERVED_BY_LIBRARY = ["/ipfs/id/1.0.0", "/ipfs/id/push/1.0.0", "/ipfs/ping/1.0.0", KAD_PROTOCOL]


@asynccontextmanager
async def open_library_host() -> AsyncIterator[Any]:
    """Open the library's own host, unchanged."""
    host = libp2p.new_host(key_pair=create_new_key_pair())
    async with host.run([Multiaddr(LOOPBACK[0])]):
        try:
            yield host
        finally:
            await host.close()


def port_of(host: Any) -> int:
    address = host.addresses[0] if isinstance(host, Host) else str(host.get_addrs()[0])
    return int(address.split("/")[4])


def message(text: str) -> bytes:
    """Return one multistream message."""
    return bytes((len(text) + 1,)) + text.encode() + b"\n"


# An inbound connection's slot and task were never freed


async def test_the_library_keeps_the_slot_of_a_closed_connection() -> None:
    with trio.fail_after(PATIENCE):
        async with open_library_host() as library, host_at_loopback() as alice:
            peer = public_key_of(library.get_id().to_base58())
            for _ in range(10):
                await alice.connect(peer, [str(library.get_addrs()[0])])
                await alice.connections.disconnect(peer)
            assert library.get_network()._inbound_limiter.borrowed_tokens == 10


async def test_five_hundred_connections_come_and_go_and_leave_no_task() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        bob.set_handler(ECHO, echo)

        async def come_and_go(times: int) -> None:
            with alice.connections.events() as at_alice, bob.connections.events() as at_bob:
                for number in range(times):
                    with trio.fail_after(PATIENCE):
                        await alice.connect(bob.author, bob.addresses)
                        assert await anext(at_alice) == (bob.author, True)
                        assert await anext(at_bob) == (alice.author, True)
                        one, other = (bob, alice) if number % 2 else (alice, bob)
                        await one.connections.disconnect(other.author)
                        assert await anext(at_alice) == (bob.author, False)
                        assert await anext(at_bob) == (alice.author, False)

        await come_and_go(20)
        before = _num_tasks()
        await come_and_go(500)
        with trio.fail_after(PATIENCE):  # for streams that are still ending
            while _num_tasks() > before:
                await wait_all_tasks_blocked(0.05)
        await assert_answers(bob)


def _num_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


# Silent sockets kept all other peers out


@asynccontextmanager
async def silent_sockets(port: int, number: int) -> AsyncIterator[list[trio.SocketStream]]:
    async with AsyncExitStack() as stack:
        sockets = []
        for _ in range(number):
            sockets.append(await trio.open_tcp_stream("127.0.0.1", port))
            stack.push_async_callback(sockets[-1].aclose)
        yield sockets


async def test_the_library_refuses_everybody_while_250_sockets_are_silent() -> None:
    with trio.fail_after(PATIENCE):
        async with open_library_host() as library, silent_sockets(port_of(library), 260), host_at_loopback() as alice:
            with pytest.raises(PeerUnreachableError):
                peer = public_key_of(library.get_id().to_base58())
                await alice.connect(peer, [str(library.get_addrs()[0])])


async def test_an_honest_dial_succeeds_while_a_thousand_sockets_are_silent() -> None:
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    number = min(1000, most_files // 2 - 100)  # both ends are in this process
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as bob:
            bob.set_handler(ECHO, echo)
            async with silent_sockets(port_of(bob), number):
                await assert_answers(bob)
                assert len(bob.acceptor.handshakes) <= MAX_HANDSHAKES_PER_ADDRESS


async def test_an_unfinished_handshake_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrading, "HANDSHAKE_TIMEOUT", 0.05)
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as bob, silent_sockets(port_of(bob), 1) as (socket,):
            while await socket.receive_some():
                pass


# False lengths, before authentication

LIE_OF_256_MIB = b"\x80\x80\x80\x80\x01"


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


async def _lie(port: int) -> int:
    """Send a large false length on eight connections; return the highest use of memory."""
    async with silent_sockets(port, 8) as sockets:
        with traced():
            for socket in sockets:
                await socket.send_all(message(MULTISTREAM) + LIE_OF_256_MIB + bytes(100))
            await wait_all_tasks_blocked(0.1)
            return tracemalloc.get_traced_memory()[1]


async def test_the_library_allocates_what_a_stranger_says() -> None:
    async with open_library_host() as library:
        assert await _lie(port_of(library)) >= 256 * 1024 * 1024


async def test_a_lying_length_costs_less_than_a_megabyte_a_connection_and_ends_it() -> None:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as bob:
            bob.set_handler(ECHO, echo)
            assert await _lie(port_of(bob)) < 8 * 1024 * 1024
            async with silent_sockets(port_of(bob), 1) as (socket,):
                await socket.send_all(message(MULTISTREAM) + LIE_OF_256_MIB)
                while await socket.receive_some():
                    pass
            await assert_answers(bob)


async def test_a_handshake_may_not_be_long() -> None:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as bob, silent_sockets(port_of(bob), 1) as (socket,):
            await socket.send_all(message(MULTISTREAM))
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await socket.send_all(message("/none") * 1000)


# Plaintext


async def _propose(port: int, protocol: str) -> bytes:
    """Return the answer to a proposal of a security protocol."""
    async with silent_sockets(port, 1) as (socket,):
        await socket.send_all(message(MULTISTREAM) + message(protocol))
        expected = len(message(MULTISTREAM))
        answer = b""
        while len(answer) <= expected or not answer.endswith(b"\n"):
            answer += await socket.receive_some()
        return answer[expected:]


async def test_the_library_accepts_plaintext_and_we_do_not() -> None:
    with trio.fail_after(PATIENCE):
        async with open_library_host() as library, host_at_loopback() as bob:
            assert await _propose(port_of(library), PLAINTEXT_PROTOCOL_ID) == message(PLAINTEXT_PROTOCOL_ID)
            for insecure in (PLAINTEXT_PROTOCOL_ID, "/secio/1.0.0", "/tls/1.0.0"):
                assert await _propose(port_of(bob), insecure) == message("na")
            assert await _propose(port_of(bob), "/noise") == message("/noise")


async def test_a_peer_must_be_who_was_dialled() -> None:
    stranger = public_bytes(Ed25519PrivateKey.generate())
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as alice, host_at_loopback() as bob:
            bare = bob.addresses[0].partition("/p2p/")[0]
            with pytest.raises(PeerUnreachableError):
                await alice.connect(stranger, [bare])
            assert not alice.connected
            await alice.connect(bob.author, [bare])


# Handlers that fail


async def test_the_library_ends_with_its_handler() -> None:
    async def fail(stream: Any) -> None:
        raise ZeroDivisionError

    with trio.fail_after(PATIENCE), pytest.raises(BaseExceptionGroup) as caught:
        async with open_library_host() as library, host_at_loopback() as alice:
            library.set_stream_handler("/fail/1", fail)
            peer = public_key_of(library.get_id().to_base58())
            alice.dialler.add_addresses(peer, [str(library.get_addrs()[0])])
            await alice.open_stream(peer, "/fail/1")
            await trio.sleep_forever()
    assert caught.group_contains(ZeroDivisionError)


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


@pytest.mark.parametrize("protocol", SERVED_BY_LIBRARY)
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


async def test_garbage_instead_of_a_handshake_costs_the_connection_only() -> None:
    rng = random.Random(23)
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as bob:
            bob.set_handler(ECHO, echo)
            openings = [b"", message(MULTISTREAM), message(MULTISTREAM) + message("/noise")]
            for number in range(150):
                async with silent_sockets(port_of(bob), 1) as (socket,):
                    await socket.send_all(openings[number % 3] + rng.randbytes(rng.randrange(300)))
            await assert_answers(bob)


# Frozen peers

HOLD = """
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from farandole.node.mesh.host import open_host
async def main():
    async with open_host(Ed25519PrivateKey.generate(), ["/ip4/127.0.0.1/tcp/0"]) as host:
        async def hold(stream):
            await trio.sleep_forever()
        host.set_handler("/hold/1", hold)
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


async def test_a_frozen_peer_is_given_up_even_with_a_full_pipe() -> None:
    process = await trio.lowlevel.open_process([sys.executable, "-c", HOLD], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        with trio.fail_after(PATIENCE):
            address = await first_line(process.stdout)
            peer = public_key_of(address.rpartition("/")[2])
            async with host_at_loopback(ping_interval=0.1, ping_timeout=5.0) as alice:
                await alice.connect(peer, [address])
                streams = [await alice.open_stream(peer, "/hold/1") for _ in range(40)]
                with alice.connections.events() as events:
                    assert await anext(events) == (peer, True)
                    process.send_signal(signal.SIGSTOP)
                    async with trio.open_nursery() as nursery:
                        for stream in streams:
                            nursery.start_soon(_send_until_broken, stream)
                        assert await anext(events) == (peer, False)
    finally:
        process.kill()
        await process.wait()


async def first_line(stdout: trio.abc.ReceiveStream) -> str:
    line = b""
    while not line.endswith(b"\n"):
        line += await stdout.receive_some()
    return line.decode().strip()


async def _send_until_broken(stream: Libp2pStream) -> None:
    with pytest.raises(trio.BrokenResourceError):
        while True:
            await stream.send_all(os.urandom(65536))


async def test_a_living_peer_is_not_given_up() -> None:
    with trio.fail_after(PATIENCE):
        async with (
            host_at_loopback(ping_interval=0.01, ping_timeout=PATIENCE) as alice,
            host_at_loopback(ping_interval=0.01, ping_timeout=PATIENCE) as bob,
        ):
            await alice.connect(bob.author, bob.addresses)
            (connection,) = alice.connections.of(bob.author)
            before = connection.muxed.num_received
            while connection.muxed.num_received < before + 20 * 12:
                await connection.muxed.ping()
            assert bob.author in alice.connected


# Which peers may open which streams


async def test_strangers_make_room_the_idle_first_and_who_is_needed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_refresh(dht: Dht) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Dht, "_refresh_if_due", no_refresh)  # it would make the idle one busy
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as bob, AsyncExitStack() as stack:
            bob.connections.max_connections = 3
            bob.set_handler(ECHO, echo)
            needed, busy, idle, third, fourth = [await stack.enter_async_context(host_at_loopback()) for _ in range(5)]
            bob.connections.protect(lambda peer: peer == needed.author)
            for other in (busy, third, fourth):
                other.dialler.add_addresses(bob.author, bob.addresses)
            await needed.connect(bob.author, bob.addresses)
            await _keep_busy(busy, bob)
            await idle.connect(bob.author, bob.addresses)
            await wait_all_tasks_blocked(0.1)  # until the library has identified them
            await _keep_busy(third, bob)
            assert bob.connected == {needed.author, busy.author, third.author}
            await _keep_busy(fourth, bob)
            assert bob.connected == {needed.author, third.author, fourth.author}
            bob.connections.protect(lambda peer: peer != busy.author)
            with pytest.raises((PeerUnreachableError, trio.BrokenResourceError)):
                await _keep_busy(busy, bob)
            assert bob.connected == {needed.author, third.author, fourth.author}


async def _keep_busy(host: Host, peer: Host) -> None:
    stream = await host.open_stream(peer.author, ECHO)
    await stream.send_all(b"x")
    assert await stream.receive_some() == b"x"


async def test_connections_of_one_peer_are_bounded() -> None:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as alice, host_at_loopback() as bob:
            bob.set_handler(ECHO, echo)
            for _ in range(MAX_CONNECTIONS_PER_PEER + 3):
                stream = await trio.open_tcp_stream("127.0.0.1", port_of(bob))
                muxed = await alice.upgrader.upgrade(Socket(stream), bob.author, is_initiator=True)
                await alice.connections.add(muxed, is_outbound=True)
            await assert_echo(alice, bob)
            assert len(bob.connections.of(alice.author)) <= MAX_CONNECTIONS_PER_PEER


@pytest.mark.parametrize("create", [create_new_secp256k1_key_pair, create_new_rsa_key_pair])
async def test_a_peer_whose_key_is_not_ed25519_is_refused_and_both_ends_learn_why(
    create: Callable[[], KeyPair], caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(PATIENCE), caplog.at_level("DEBUG", "farandole"):
        pair = create()
        noise = Transport(pair, noise_privkey=create_new_x25519_key_pair().private_key)
        async with host_at_loopback() as bob:
            async with await trio.open_tcp_stream("127.0.0.1", port_of(bob)) as stream:
                link = Socket(stream)
                await Negotiation(link.read, link.write).propose("/noise")
                session = await noise.secure_outbound(cast("IRawConnection", link), ID.from_base58(bob.peer_id))
                with pytest.raises(RemoteProtocolError, match="peers here need Ed25519 keys"):
                    await Negotiation(session.read, session.write).propose("/yamux/1.0.0")
            while "has no Ed25519 key" not in caplog.text:
                await trio.lowlevel.checkpoint()
            assert bob.connected == frozenset()


async def test_the_librarys_host_with_another_kind_of_key_is_refused() -> None:
    with trio.fail_after(PATIENCE):
        library = libp2p.new_host(key_pair=create_new_secp256k1_key_pair())
        async with host_at_loopback() as bob, library.run([Multiaddr(LOOPBACK[0])]):
            with pytest.raises(SwarmException):
                await library.connect(info_from_p2p_addr(Multiaddr(bob.addresses[0])))
                await library.new_stream(ID.from_base58(bob.peer_id), [TProtocol("/ipfs/ping/1.0.0")])
            assert bob.connected == frozenset()
            await library.close()


async def test_an_honest_peer_that_opens_200_streams_at_once_keeps_its_connection() -> None:
    async with connected_pair() as (alice, bob):
        answers = list[bytes]()

        async def ask() -> None:
            with suppress(PeerUnreachableError, trio.BrokenResourceError):  # excess streams are reset
                async with await alice.open_stream(bob.author, ECHO, PATIENCE) as stream:
                    await stream.send_all(b"x")
                    answers.append(await stream.receive_some())

        while not (before := bob.connections.of(alice.author)):
            await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(ask)
        assert bob.connections.of(alice.author) == before
        assert len(answers) >= MAX_WAITING_STREAMS // 2  # next to streams of identify and the DHT
        assert set(answers) == {b"x"}


async def test_identify_names_farandole_and_its_version() -> None:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as alice, host_at_loopback() as bob:
            bob.set_handler(ECHO, echo)
            await alice.connect(bob.author, bob.addresses)
            async with await alice.open_stream(bob.author, IDENTIFY_PROTOCOL) as stream:
                message = await receive_message(stream, Identify, MAX_IDENTIFY_BYTES)
            own_addresses = bob.addresses
        assert message.agent_version == f"farandole/{version('farandole')}"
        assert message.protocol_version == "farandole/1.0.0"
        assert [f"{Multiaddr(address)}/p2p/{bob.peer_id}" for address in message.listen_addrs] == own_addresses
        assert {ECHO, KAD_PROTOCOL, PING_PROTOCOL} <= set(message.protocols)
        assert str(Multiaddr(message.observed_addr)).startswith("/ip4/127.0.0.1/tcp/")
        assert ID.from_pubkey(deserialize_public_key(message.public_key)).to_base58() == bob.peer_id


async def test_what_a_peer_says_of_its_addresses_is_remembered_after_connecting() -> None:
    async with connected_pair() as (alice, bob):
        while not bob.dialler.known.of(alice.author):  # alice has dialled: bob asks her
            await wait_all_tasks_blocked(0.01)
        assert bob.dialler.known.of(alice.author) == [address.partition("/p2p/")[0] for address in alice.addresses]


async def test_pings_are_echoed() -> None:
    async with connected_pair() as (alice, bob), await alice.open_stream(bob.author, PING_PROTOCOL) as stream:
        for number in range(3):
            await stream.send_all(bytes([number]) * 32)
            assert await read_exactly(stream.receive_some, 32) == bytes([number]) * 32


@pytest.mark.parametrize("protocol", SERVED_BY_LIBRARY[1:])
async def test_nobody_sends_the_library_megabytes(protocol: str) -> None:
    announced = b"\x80\x80\x80\x02"  # 4 MiB
    async with connected_pair() as (alice, bob):
        stream = await alice.open_stream(bob.author, protocol)
        num_sent = 0
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(announced)
            while True:
                await stream.send_all(bytes(16 * 1024))
                num_sent += 16 * 1024
                await wait_all_tasks_blocked()
        assert num_sent <= 2 * 128 * 1024
