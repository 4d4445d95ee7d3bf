"""Ways into a run, between real hosts on loopback: any answering peer is enough, and a node never gives up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import JoinError, NotAdmittedError
from farandole.node.base.settings import NodeSettings
from farandole.node.join import bootstrap as joining
from farandole.node.join.bootstrap import Target, connect_to_run, find_target, obtain_manifest, serve_manifest
from farandole.node.mesh.host import Host, open_host
from farandole.node.status.journal import Journal
from farandole.protocol.run.invite import Invite, encode_invite, network_key_of
from farandole.protocol.run.manifest import Manifest, decode_manifest, sign_manifest
from farandole.protocol.run.roster import Roster
from farandole.protocol.wire.errors import UnknownManifestError
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ...patience import PATIENCE
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
