"""Hosts over loopback TCP: dialling, streams, events, addresses, and multicast DNS."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import ListenError, PeerUnreachableError
from farandole.node.base.settings import DEFAULT_LISTEN
from farandole.node.mesh import host as host_module
from farandole.node.mesh import mdns
from farandole.node.mesh.addresses import MAX_ADDRESSES, MAX_KNOWN_PEERS, OwnAddresses, dial_target
from farandole.node.mesh.dialler import Dial
from farandole.node.mesh.host import open_host
from farandole.node.mesh.links import listen_at
from farandole.node.mesh.mdns import MAX_NAMES, MAX_PEERS, Mdns, neighbour_of
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.kademlia import local_name
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.wire.identity import peer_id_of, public_bytes
from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.namespace import Namespace, NamespaceError, open_namespace

from ..daemons import Daemon, running
from ..hosts import ECHO, assert_echo, connected_pair, echo, hang, has_ipv6, host_at_loopback, port_of, until
from ..small_runs import small_manifest, write_run, write_text


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


async def test_two_hosts_connect_and_answer_each_other_and_are_near_once_a_ping_was_answered() -> None:
    async with connected_pair() as (alice, bob):
        assert alice.connected == {bob.author}
        assert alice.connections.path(bob.author) == "direct"
        (dialled,), (dialler,) = (
            alice.connections.remote_addresses(bob.author),
            bob.connections.remote_addresses(alice.author),
        )
        assert dialled == bob.addresses[0].split("/p2p/")[0]
        assert dialler.startswith("/ip4/127.0.0.1/tcp/")
        async with await alice.open_stream(bob.author, ECHO) as stream:
            assert (stream.peer, stream.protocol) == (bob.author, ECHO)
            await stream.send_all(b"to and fro")
            assert await stream.receive_some() == b"to and fro"
            await stream.send_eof()
            assert await stream.receive_some() == b""
        await until(lambda: alice.connections.round_trip(bob.author) is not None)
        await alice.connections.disconnect(bob.author)
        assert bob.author not in alice.connected
        assert alice.connections.remote_addresses(bob.author) == []
        assert alice.connections.path(bob.author) == ""


async def test_a_connection_has_a_name_that_its_ends_share_and_no_other_connection_has() -> None:
    names: list[bytes] = []

    async def note(stream: Libp2pStream) -> None:
        names.append(stream.handshake_hash)

    async with host_at_loopback() as alice, host_at_loopback() as bob, host_at_loopback() as carol:
        alice.set_handler(ECHO, note)
        shared = set()
        for host in (bob, carol, bob):
            host.dialler.add_addresses(alice.author, alice.addresses)
            stream = await host.open_stream(alice.author, ECHO)
            assert await stream.receive_some() == b""
            shared.add(stream.handshake_hash)
        assert len(shared) == 2
        assert set(names) == shared
        assert {len(name) for name in names} == {32}


async def test_a_wait_that_is_cancelled_loses_nothing_and_breaks_nothing() -> None:
    async with connected_pair() as (alice, bob):
        stream = await alice.open_stream(bob.author, ECHO)
        stuck = await alice.open_stream(bob.author, ECHO)
        with trio.move_on_after(0.05):
            await stuck.send_all(bytes(64 * 1024 * 1024))  # no one reads the echo
        for _ in range(3):
            with trio.move_on_after(0.01) as impatient:
                await stream.receive_some()
            assert impatient.cancelled_caught
        await stream.send_all(b"still in step")
        assert await stream.receive_some() == b"still in step"


async def test_an_unknown_peer_and_a_silent_address_are_unreachable() -> None:
    stranger = public_bytes(new_key())
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = silent[0].socket.getsockname()[1]
    async with host_at_loopback() as alice:
        with pytest.raises(PeerUnreachableError, match="no address"):
            await alice.connect(stranger)
        with pytest.raises(PeerUnreachableError, match="did not answer"):
            await alice.connect(stranger, [f"/ip4/127.0.0.1/tcp/{port}"], timeout=0.3)
        with pytest.raises(PeerUnreachableError, match="myself"):
            await alice.connect(alice.author, alice.addresses)
    await silent[0].aclose()


async def test_a_good_address_wins_over_dead_and_silent_ones_and_at_once_after_a_failure() -> None:
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    silent_port = silent[0].socket.getsockname()[1]
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        dead = ["/ip4/127.0.0.1/tcp/1", f"/ip4/127.0.0.1/tcp/{silent_port}", "/ip4/127.0.0.1/udp/1/quic-v1"]
        with pytest.raises(PeerUnreachableError):
            await alice.connect(bob.author, dead, timeout=0.3)
        await alice.connect(bob.author, bob.addresses + dead, timeout=5)
        assert bob.author in alice.connected
    await silent[0].aclose()


async def test_a_dial_under_way_takes_addresses_that_are_learnt_meanwhile() -> None:
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with host_at_loopback() as alice, host_at_loopback() as bob, trio.open_nursery() as nursery:
        nursery.start_soon(alice.connect, bob.author, [f"/ip4/127.0.0.1/tcp/{silent[0].socket.getsockname()[1]}"])
        dialled = await silent[0].accept()
        alice.dialler.add_addresses(bob.author, bob.addresses)
    await dialled.aclose()
    await silent[0].aclose()


async def test_many_who_want_one_peer_share_one_connection() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        alice.dialler.add_addresses(bob.author, bob.addresses)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(alice.connect, bob.author)
        assert alice.connected == {bob.author}
        assert len(alice.connections.live) == 1


async def test_a_dial_that_is_cancelled_when_it_has_won_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        dial_one, won = alice.dialler.dial_one, list[Any]()

        async def dialled(peer: bytes, address: str) -> Any:
            won.append(await dial_one(peer, address))
            scope.cancel()
            return won[0]

        monkeypatch.setattr(alice.dialler, "dial_one", dialled)
        dial = alice.dialler._dials[bob.author, False] = Dial(False)
        alice.dialler.add_addresses(bob.author, bob.addresses)
        with trio.CancelScope() as scope:
            await alice.dialler._run(bob.author, dial)
        assert scope.cancelled_caught
        (muxed,) = won
        with pytest.raises(trio.BrokenResourceError):
            await muxed.link.write(b"nobody has closed this")


async def test_both_may_dial_at_once() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as bob:
        bob.set_handler(ECHO, echo)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alice.connect, bob.author, bob.addresses)
            nursery.start_soon(bob.connect, alice.author, alice.addresses)
        await assert_echo(alice, bob)


async def test_subscribers_hear_of_who_is_there_who_comes_and_who_goes() -> None:
    async with connected_pair() as (alice, bob), host_at_loopback() as carol:
        first, second, late = (alice.connections.events() for _ in range(3))
        assert await anext(first) == await anext(second) == (bob.author, True)
        await alice.connect(carol.author, carol.addresses)
        assert await anext(first) == (carol.author, True)
        await bob.connections.disconnect(alice.author)
        assert await anext(first) == (bob.author, False)
        assert {await anext(second), await anext(second)} == {(carol.author, True), (bob.author, False)}
        assert await anext(late) == (carol.author, True)
        with trio.move_on_after(0.01) as waiting:
            await anext(late)  # bob came and went before it was read
        assert waiting.cancelled_caught
        for each in (first, second):
            await each.aclose()


async def test_who_is_offline_has_no_connection_and_makes_none_until_he_is_online() -> None:
    async with connected_pair() as (alice, bob), host_at_loopback() as carol:
        bob.connections.is_offline = True
        await bob.connections.close()
        assert not bob.connected
        with pytest.raises(PeerUnreachableError, match="offline"):
            await bob.connect(carol.author, carol.addresses)
        with pytest.raises(PeerUnreachableError):
            await carol.connect(bob.author, bob.addresses, timeout=3.0)
        assert not bob.connected

        bob.connections.is_offline = False
        await carol.connect(bob.author, bob.addresses)
        await bob.connect(alice.author, alice.addresses)
        assert bob.connected == {alice.author, carol.author}


@pytest.mark.skipif(not has_ipv6(), reason="this system has no IPv6")
async def test_by_default_both_versions_of_ip_have_one_port() -> None:
    async with open_host(new_key(), DEFAULT_LISTEN) as host:
        assert {ip for ip, _ in host.own.listening} == {"0.0.0.0", "::"} == set(host.own.bound_ips)
        assert len(set(host.acceptor.ports.values())) == 1
        assert host.addresses
        assert not any("/0.0.0.0/" in address or "/::/" in address for address in host.addresses)
        with socket.socket() as other:
            other.bind(("0.0.0.0", 0))
            other.listen()
            kept = dict(zip(DEFAULT_LISTEN, (other.getsockname()[1], *host.acceptor.ports.values()), strict=False))
            async with open_host(new_key(), DEFAULT_LISTEN, first_ports=kept) as neighbour:
                assert not set(neighbour.acceptor.ports.values()) & set(kept.values()), "both ports are taken"


async def test_a_system_without_ipv6_listens_over_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen_without_ipv6(ip: str, port: int) -> socket.socket:
        if ":" in ip:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return listen_at(ip, port)

    monkeypatch.setattr(host_module, "listen_at", listen_without_ipv6)
    async with open_host(new_key(), DEFAULT_LISTEN) as host:
        assert list(host.acceptor.ports) == DEFAULT_LISTEN[:1]
    with pytest.raises(ListenError, match="no IPv6"):
        async with open_host(new_key(), DEFAULT_LISTEN[1:]):
            raise AssertionError
    with pytest.raises(ListenError):
        async with open_host(new_key(), ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"]):
            raise AssertionError("an address that its owner has named is not left out")


async def test_listening_elsewhere_or_where_the_port_is_taken_is_an_error_and_it_is_free_again_afterwards() -> None:
    async with host_at_loopback() as alice:
        taken = alice.addresses[0].partition("/p2p/")[0]
        for address in (taken, "/ip4/127.0.0.1/udp/1/quic-v1", "nonsense", "/ip4/127.0.0.1/tcp/99999"):
            with pytest.raises(ListenError):
                async with open_host(new_key(), [address]):
                    raise AssertionError
    async with open_host(new_key(), [taken]) as bob:
        assert bob.addresses[0].startswith(taken)


async def test_leaving_closes_the_listener_and_every_connection() -> None:
    async with host_at_loopback() as alice:
        async with host_at_loopback() as bob:
            bob.set_handler("/hold/1", hang)
            port = port_of(bob)
            await alice.connect(bob.author, bob.addresses)
            stream = await alice.open_stream(bob.author, "/hold/1")
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        assert alice.connected == frozenset()
        with pytest.raises(OSError, match="connect"):
            await trio.open_tcp_stream("127.0.0.1", port)


async def test_ipv6_and_ipv4_are_tried_in_turn_and_no_address_twice() -> None:
    peer = public_bytes(new_key())
    dial = Dial(is_direct=True)
    v4, v6 = ([form.format(i) for i in range(3)] for form in ("/ip4/1.2.3.{}/tcp/5", "/ip6/2a05::{}/tcp/5"))
    known = [*v4[:2], v6[0]]
    tried = [dial.next_address(peer, known, [], is_trying=True) for _ in range(2)]
    known += [*v6[1:], v4[2]]
    tried += [dial.next_address(peer, known, [], is_trying=True) for _ in range(5)]
    assert tried == [v6[0], v4[0], v6[1], v4[1], v6[2], v4[2], None]


def test_dial_targets() -> None:
    peer, other = public_bytes(new_key()), public_bytes(new_key())
    assert dial_target("/ip4/1.2.3.4/tcp/5", peer) == ("1.2.3.4", 5)
    assert dial_target(f"/ip6/::1/tcp/5/p2p/{peer_id_of(peer)}", peer) == ("::1", 5)
    assert dial_target("/dns4/example.org/tcp/443", peer) == ("example.org", 443)
    for bad in (
        f"/ip4/1.2.3.4/tcp/5/p2p/{peer_id_of(other)}",
        f"/ip4/1.2.3.4/tcp/5/p2p/{peer_id_of(other)}/p2p-circuit/p2p/{peer_id_of(peer)}",
        "/ip4/0.0.0.0/tcp/5",
        "/ip4/999.2.3.4/tcp/5",
        "/ip4/1.2.3.4/tcp/0",
        "/ip4/1.2.3.4/tcp/70000",
        "/ip4/1.2.3.4/udp/5/quic-v1",
        "",
    ):
        assert dial_target(bad, peer) is None


async def test_the_address_book_is_bounded_and_forgives_nonsense() -> None:
    async with open_host(new_key(), []) as host:
        peer = public_bytes(new_key())
        host.dialler.add_addresses(
            peer, ["", "nonsense", "/ip4/1.2.3", "/ip4/1.2.3.4/tcp/5" + "/x" * 1000, "/ip4/9.9.9.9/tcp/9"]
        )
        assert host.dialler.known.of(peer) == ["/ip4/9.9.9.9/tcp/9"]
        host.dialler.add_addresses(peer, [f"/ip4/1.2.3.4/tcp/{port}" for port in range(1, 100)])
        assert host.dialler.known.of(peer)[0] == "/ip4/1.2.3.4/tcp/99"
        assert len(host.dialler.known.of(peer)) == MAX_ADDRESSES
        for number in range(MAX_KNOWN_PEERS + 10):
            host.dialler.add_addresses(number.to_bytes(32, "big"), [])
        assert len(host.dialler.known._trusted) == MAX_KNOWN_PEERS
        assert host.dialler.known.of(peer) == []


RUN = b"r" * 32
ALICE, OWN = b"a" * 32, b"o" * 32
NETWORKS = [ipaddress.ip_network("192.168.7.0/24"), ipaddress.ip_network("fd00:7::/64")]


def answer(*ips: str, peer: object = peer_id_of(ALICE).encode(), port: object = 4001) -> tuple[bytes, list[str]] | None:
    return neighbour_of(peer, ips, port, NETWORKS, OWN)


def test_an_answer_leads_only_into_our_own_networks_and_to_a_few_addresses() -> None:
    found = answer("192.168.7.9", "8.8.8.8", "127.0.0.1", "192.168.8.9", "fd00:7::9", "fd00:8::9", "nonsense", "")
    assert found == (ALICE, ["/ip4/192.168.7.9/tcp/4001", "/ip6/fd00:7::9/tcp/4001"])
    assert answer("8.8.8.8") is answer() is None
    many = answer(*(f"192.168.7.{number}" for number in range(1, 200)))
    assert many is not None
    assert len(many[1]) == mdns.MAX_ADDRESSES


def test_an_answer_names_another_peer_and_a_port() -> None:
    for peer in (None, b"", b"\xff\xfe", b"12D3KooW", b"x" * 100_000, peer_id_of(OWN).encode(), 5):
        assert answer("192.168.7.9", peer=peer) is None
    for port in (None, 0, -1, 65_536, "80"):
        assert answer("192.168.7.9", port=port) is None


async def test_a_flood_of_answers_is_dropped() -> None:
    async with host_at_loopback() as host:
        mdns = Mdns(host, RUN)
        for number in range(10 * MAX_NAMES):
            mdns.note(f"{local_name(RUN)}-{number}")
            mdns.note(f"{local_name(OWN)}-{number}")  # of another run
            mdns.take(number.to_bytes(32, "big"), ["/ip4/192.168.7.9/tcp/1"])
        waiting = [mdns.unresolved.receive_nowait() for _ in range(mdns.unresolved.statistics().current_buffer_used)]
        assert len(waiting) == MAX_NAMES
        assert all(name.startswith(local_name(RUN)) for name in waiting)
        assert len(mdns.neighbours) == MAX_PEERS


@pytest.mark.parametrize(("port", "announced"), [(4001, ["192.168.7.9", "fd00:7::9"]), (5001, ["192.168.7.9"])])
async def test_an_announcement_names_the_addresses_that_have_its_port(
    monkeypatch: pytest.MonkeyPatch, port: int, announced: list[str]
) -> None:
    """An earlier node may have left the other version of IP another port; IPv4's is announced."""
    bound = property(lambda own: [("fd00:7::9", port), ("192.168.7.9", 4001)])
    monkeypatch.setattr(OwnAddresses, "interfaces", bound)
    async with open_host(Ed25519PrivateKey.generate(), []) as host:
        service = Mdns(host, RUN).announcement(["192.168.7.9", "fd00:7::9"])
    assert service is not None
    assert service.port == 4001
    assert sorted(service.parsed_addresses()) == announced


# A network of two


@pytest.fixture
def laptops() -> Iterator[tuple[Namespace, Namespace]]:
    """Create two machines on one cable, with no router and no other route."""
    with contextlib.ExitStack() as stack:
        try:
            leash = stack.enter_context(open_leash())
            one, two = (stack.enter_context(open_namespace(leash)) for _ in range(2))
            one.run(f"ip link add eth0 type veth peer name eth0 netns {two.holder}")
        except (NamespaceError, OSError) as error:
            pytest.skip(str(error))
        for number, laptop in enumerate((one, two), 1):
            laptop.run(f"ip address add 192.168.7.{number}/24 dev eth0; ip link set eth0 up")
        yield one, two


def joined_at(place: Namespace, home: Path, *arguments: str) -> contextlib.AbstractAsyncContextManager[Daemon]:
    command = [*place.enter, sys.executable, "-m", "farandole.node", "join", *arguments, "--home", str(home)]
    return running(home, [*command, "--heartbeat-seconds", "1", "--validate-every", "0"], {})


async def test_two_laptops_without_internet_find_each_other_and_train(
    tmp_path: Path, laptops: tuple[Namespace, Namespace]
) -> None:
    text = write_text(tmp_path)
    signed = write_run(tmp_path, small_manifest(inner={"learning_rate": 3e-3, "warmup_steps": 2, "batch_size": 2}))
    manifest = tmp_path / "run.manifest"
    # Its only address cannot be reached from here.
    invite = encode_invite(Invite(signed.run_id, (f"/ip4/8.8.8.8/tcp/4001/p2p/{peer_id_of(ALICE)}",)))
    data = ("--data", str(text))
    async with (
        joined_at(laptops[0], tmp_path / "alice", str(manifest), *data) as alice,
        joined_at(laptops[1], tmp_path / "bob", invite, *data) as bob,
    ):
        await alice.says("this node is")
        await bob.says("manifest", "verified")
        await bob.says("averaged with", alice.name)
        await alice.says("averaged with", bob.name)
