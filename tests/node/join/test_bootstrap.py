"""Ways into a run: any answering peer is enough, a node never gives up, and keeps its ports, so invites stay valid."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import Exit, JoinError, NotAdmittedError
from farandole.node.base.settings import DEFAULT_LISTEN, NodeSettings
from farandole.node.join import bootstrap as joining
from farandole.node.join.address_book import keep_ports, load_ports
from farandole.node.join.bootstrap import Target, connect_to_run, find_target, obtain_manifest, serve_manifest
from farandole.node.mesh.host import Host, open_host
from farandole.node.state.store import StoreError, open_store
from farandole.node.status.journal import Journal
from farandole.protocol.run.invite import Invite, encode_invite, network_key_of
from farandole.protocol.run.manifest import Manifest, decode_manifest, sign_manifest
from farandole.protocol.run.roster import Roster
from farandole.protocol.wire.errors import UnknownManifestError
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ...patience import PATIENCE
from ..daemons import Daemon, started
from ..hosts import LOOPBACK, host_at_loopback, until
from ..small_runs import CREATOR, MODEL, SIGNED, NewerManifest

MANIFEST = Manifest("tiny", MODEL)
RUN = SIGNED.run_id
# Nothing listens on port 1, and no peer has these keys.
NOWHERE = "/ip4/127.0.0.1/tcp/1"
DEAD = {bytes([i]) * 32: [NOWHERE] for i in range(1, 5)}


@pytest.fixture
def journal() -> Journal:
    return Journal(lambda text: None)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "FIRST_REDIAL_PAUSE", 0.05)
    monkeypatch.setattr(joining, "MAX_REDIAL_PAUSE", 0.1)


@pytest.fixture
async def newcomer() -> AsyncIterator[Host]:
    with trio.fail_after(PATIENCE):
        async with host_at_loopback() as host:
            yield host


@contextlib.asynccontextmanager
async def open_member(listen: list[str] = LOOPBACK) -> AsyncIterator[Host]:
    """Open a host that has the run's manifest."""
    async with open_host(Ed25519PrivateKey.generate(), listen) as host:
        serve_manifest(host, RUN, SIGNED.encode())
        yield host


def test_who_was_named_comes_first_and_then_the_book(tmp_path: Path) -> None:
    alice, bob, carol = (bytes([i]) * 32 for i in range(3))
    key = Ed25519PrivateKey.generate()
    own = public_bytes(key)
    named = tuple(f"/ip4/1.1.1.{i}/tcp/1/p2p/{peer_id_of(bob)}" for i in (1, 2))
    settings = NodeSettings(home=tmp_path, invite=encode_invite(Invite(RUN, named)))
    book = {carol: ["/ip4/3.3.3.3/tcp/3"], bob: ["/ip4/2.2.2.2/tcp/2", named[1]], alice: [NOWHERE], own: [NOWHERE]}
    target = find_target(settings, key, None, book)
    assert list(target.peers) == [bob, carol, alice]
    assert target.peers[bob] == [*named, "/ip4/2.2.2.2/tcp/2"]


def test_the_key_of_a_private_run_is_of_the_invite_or_of_an_earlier_life_and_its_creator_knows_it(
    tmp_path: Path,
) -> None:
    creator, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    signed = sign_manifest(msgspec.structs.replace(MANIFEST, private=True), creator)
    key, raw = network_key_of(creator, signed.run_id), signed.encode()
    without = NodeSettings(home=tmp_path)
    assert find_target(without, creator, raw, {}).network_key == key
    assert find_target(without, other, raw, {}, key).network_key == key
    with pytest.raises(JoinError, match="private"):
        find_target(without, other, raw, {})
    invited = NodeSettings(home=tmp_path, invite=encode_invite(Invite(signed.run_id, network_key=key)))
    assert find_target(invited, other, None, {}).network_key == key
    assert find_target(without, creator, SIGNED.encode(), {}).network_key == b"", "not private"


async def test_one_member_of_the_book_is_enough_when_the_invites_peers_are_dead(
    newcomer: Host, journal: Journal
) -> None:
    async with open_member() as member:
        target = Target(RUN, None, {**DEAD, member.author: member.addresses})
        await connect_to_run(newcomer, target, journal)
        raw = await obtain_manifest(newcomer, target, journal)
        manifest, _ = decode_manifest(raw)
        assert (manifest.name, raw) == ("tiny", SIGNED.encode())


async def test_a_newcomer_tries_until_somebody_is_there_and_says_so(
    newcomer: Host, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", joining.__name__)
    two_addresses = {**DEAD, bytes([9]) * 32: [NOWHERE, "/ip4/127.0.0.1/tcp/2"]}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connect_to_run, newcomer, Target(RUN, None, two_addresses), journal)
        told = "no known address answers: 6 addresses of 5 peers tried ([3-9]|..+) times, again in"
        await until(lambda: bool(re.search(told, journal.state.phase_detail)))
        assert journal.state.waits_for == "a bootstrap peer"
        async with open_member() as member:  # another peer that connects is enough
            await member.connect(newcomer.author, newcomer.addresses)
            await until(lambda: not nursery.child_tasks)
    refused = [record.message for record in caplog.records if "/ip4/127.0.0.1/tcp/1: " in record.message]
    assert len(refused) == len(two_addresses), "the log has each reason once, however often it tries"


async def test_an_invite_of_another_homes_network_is_told_from_one_whose_peers_are_off(
    newcomer: Host, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "DIAL_TIMEOUT", 0.1)
    private = {bytes([9]) * 32: ["/ip4/192.168.1.10/tcp/1", "/ip4/10.0.0.7/tcp/1"]}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connect_to_run, newcomer, Target(RUN, None, private), journal)
        told = f"{joining.ONLY_PRIVATE} (192.168.1.10, 10.0.0.7), none answers: 2 addresses of 1 peer tried"
        await until(lambda: journal.state.phase_detail.startswith(told))
        nursery.cancel_scope.cancel()


async def test_a_newcomer_among_strangers_waits_for_a_member(newcomer: Host, journal: Journal) -> None:
    async with host_at_loopback() as stranger, trio.open_nursery() as nursery:
        await newcomer.connect(stranger.author, stranger.addresses)
        found: list[bytes] = []

        async def obtain() -> None:
            found.append(await obtain_manifest(newcomer, Target(RUN, None, DEAD), journal))

        nursery.start_soon(obtain)
        await until(lambda: "no member found; looking again" in journal.state.phase_detail)
        async with open_member() as member:
            await member.connect(newcomer.author, newcomer.addresses)
            await until(lambda: not nursery.child_tasks)
    assert found == [SIGNED.encode()]


@pytest.mark.parametrize("is_named", [True, False])
async def test_who_has_an_invite_without_an_admission_is_told_so_by_whom_it_names_alone(
    is_named: bool, newcomer: Host, journal: Journal
) -> None:
    """The attack: a stranger says that a run is for invited members, and a newcomer to an open run gives up."""
    invited = sign_manifest(msgspec.structs.replace(MANIFEST, admission="invited"), CREATOR)
    async with open_host(CREATOR, LOOPBACK) as member, trio.open_nursery() as nursery:
        member.gate.show(invited.run_id, b"", None)
        member.gate.close(invited.run_id, Roster(invited.run_id, member.author))
        serve_manifest(member, invited.run_id, invited.encode())
        await newcomer.connect(member.author, member.addresses)
        newcomer.gate.show(invited.run_id, b"", None)
        if is_named:
            with pytest.raises(NotAdmittedError, match=r"do not admit this node: .*for invited members.*invite"):
                await obtain_manifest(newcomer, Target(invited.run_id, None, {member.author: []}), journal)
            return
        nursery.start_soon(obtain_manifest, newcomer, Target(invited.run_id, None, DEAD), journal)
        await until(lambda: "no member found; looking again" in journal.state.phase_detail)
        nursery.cancel_scope.cancel()


async def test_a_node_that_is_too_old_for_the_run_is_told_so(newcomer: Host, journal: Journal) -> None:
    newer = sign_manifest(NewerManifest("tiny", MODEL), Ed25519PrivateKey.generate())
    async with host_at_loopback() as member:
        serve_manifest(member, newer.run_id, newer.encode())
        await newcomer.connect(member.author, member.addresses)
        with pytest.raises(UnknownManifestError, match=r"does not know.*colour.*upgrade this node"):
            await obtain_manifest(newcomer, Target(newer.run_id, None, DEAD), journal)


async def test_who_knows_the_run_goes_on_alone(newcomer: Host, journal: Journal) -> None:
    await connect_to_run(newcomer, Target(RUN, SIGNED.encode(), DEAD), journal)
    told = "no known address answers; going on alone until one does; if a member's public address changed: `farandole"
    assert any(told in warning for warning in journal.warnings)


TO_NOBODY = encode_invite(Invite(RUN, (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(bytes(32))}",)))
ANY = "/ip4/127.0.0.1/tcp/0"


def port_of(daemon: Daemon) -> int:
    """Return the port of the node's only address."""
    (address,) = daemon.addresses
    return int(address.split("/")[4])


async def test_a_port_that_is_taken_is_replaced_with_a_warning_and_used_again_when_it_is_free(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with trio.fail_after(PATIENCE):
        async with started(home, "relay", TO_NOBODY, "--no-mdns") as relay:
            await relay.says("listening on")
            kept = port_of(relay)
            await relay.end(signal.SIGKILL)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # earlier connections are not quite over
            other.bind(("127.0.0.1", kept))
            other.listen()
            async with started(home, "relay", "--no-mdns") as relay:
                warning = await relay.says("warning:", f"port {kept}", "is taken")
                assert "may not find this node" in warning
                await relay.says("listening on")
                assert port_of(relay) != kept
                assert f"listens on {port_of(relay)} now" in warning
                assert await relay.end(signal.SIGTERM) == Exit.OK
        async with started(home, "relay", "--no-mdns") as relay:
            await relay.says("listening on")
            assert port_of(relay) == kept
            assert not [line for line in relay.said if "is taken" in line]


async def test_only_a_port_that_was_left_open_is_kept_and_each_address_has_its_own(
    tmp_path: Path, journal: Journal
) -> None:
    fixed, other = "/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/0"
    async with open_store(tmp_path / "store.sqlite") as store:
        assert await load_ports(store, [ANY, fixed, other]) == {}
        await keep_ports(store, {}, {ANY: 40_001, fixed: 4_001, other: 40_002}, journal)
        assert await load_ports(store, [ANY, fixed, other]) == {ANY: 40_001, other: 40_002}
        assert await load_ports(store, ["/ip4/0.0.0.0/tcp/0"]) == {}
        await keep_ports(store, {ANY: 40_001}, {ANY: 40_001, fixed: 4_002}, journal)
    assert not journal.warnings


@pytest.mark.parametrize("damaged", [b"", b"0", b"65536", b"-1", b"9" * 5_000, b"\xff", b"4001 "])
async def test_a_damaged_port_is_none(tmp_path: Path, journal: Journal, damaged: bytes) -> None:
    async with open_store(tmp_path / "store.sqlite") as store:
        await keep_ports(store, {}, {ANY: 40_001}, journal)
        await store._write(("UPDATE facts SET value = ?", [(damaged,)]))
        assert await load_ports(store, [ANY]) == {}


async def test_a_disk_that_does_not_take_the_port_stops_no_node(tmp_path: Path, journal: Journal) -> None:

    async with open_store(tmp_path / "store.sqlite") as store:
        await store._write(("DROP TABLE facts", [()]))
        with pytest.raises(StoreError):
            await store.put_fact("manifest", b"")
        await keep_ports(store, {}, {ANY: 40_001}, journal)
    (warning,) = journal.warnings
    assert "another port than 40001" in warning


async def test_a_port_that_is_taken_for_both_versions_of_ip_is_warned_about_once(
    tmp_path: Path, journal: Journal
) -> None:
    async with open_store(tmp_path / "store.sqlite") as store:
        kept = dict.fromkeys(DEFAULT_LISTEN, 4001)
        await keep_ports(store, kept, dict.fromkeys(DEFAULT_LISTEN, 5001), journal)
    (warning,) = journal.warnings
    assert "--port PORT" in warning


def test_a_port_replaces_any_port_and_leaves_the_ports_that_are_named() -> None:
    assert NodeSettings(port=4001).listening == ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"]
    assert NodeSettings(port=4001, listen=[ANY, "/ip4/10.0.0.1/tcp/80"]).listening == [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/10.0.0.1/tcp/80",
    ]
    assert NodeSettings().listening == DEFAULT_LISTEN
