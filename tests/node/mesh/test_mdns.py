"""Multicast DNS: effects of an answer, and two machines on one cable that train without any internet."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.mesh.addresses import OwnAddresses
from farandole.node.mesh.host import open_host
from farandole.node.mesh.mdns import MAX_ADDRESSES, MAX_NAMES, MAX_PEERS, Mdns, neighbour_of
from farandole.protocol.mesh.kademlia import local_name
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.wire.identity import peer_id_of
from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.namespace import Namespace, NamespaceError, open_namespace

from ..daemons import Daemon, running
from ..hosts import host_at_loopback
from ..small_runs import small_manifest, write_run, write_text

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
    assert len(many[1]) == MAX_ADDRESSES


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
