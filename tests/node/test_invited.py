"""Runs of invited members and private ones, with real daemons: an invite lets one train, a revocation ends that."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.control import ControlError
from farandole.node.base.errors import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.node.control_methods import admission_handlers
from farandole.node.mesh.host import open_host
from farandole.node.state.messenger import open_messenger
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.invitations import Admission, InviteSecret, decode_admission, decode_secret, sign_witness
from farandole.protocol.run.invite import Invite, decode_invite, encode_invite
from farandole.protocol.state.entries import AdmissionProof, Kind, Member, Payload, Signed, deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, PROTOCOL, Batch
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import peer_id_of, public_bytes, public_key_of
from farandole.protocol.wire.messagepack import encode

from .daemons import Daemon, farandole, joined, started
from .hosts import LOOPBACK
from .small_runs import small_manifest, write_run


async def revoke(daemon: Daemon, key: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = await daemon.ask("admit", keys=[key.hex()], is_admitted=False, keeps_invites=False)
    return rows


async def test_a_node_that_is_not_in_its_run_invites_nobody(autojump_clock: trio.testing.MockClock) -> None:
    handlers = admission_handlers(lambda: None)
    for deed in ("invite", "network_key", "admit", "notice"):
        with pytest.raises(ControlError, match="not in its run yet"):
            await handlers[deed]({})
    assert trio.current_time() < 4 * 10.0, "a command waits for 10 s"


async def test_who_is_invited_trains_and_nobody_else(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    run = write_run(tmp_path, small_manifest(admission="invited"), creator=home)
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("this node is")
        invite = await alice.own_invite(quota=1, uses=2)  # it may not be in its run yet
        await alice.says("step")
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            of_bob = await bob.own_invite()
            with pytest.raises(ControlError, match="0 more seats"):
                await bob.own_invite()

            assert await does_pull(tmp_path / "visitor", await alice.own_invite()), "a visitor takes a seat, too"

            async with joined(tmp_path / "eve", alice.invite(run.run_id), *data) as eve:
                assert "ask one of them for an invite" in await eve.says("do not admit this node")
                assert await eve.ends() == Exit.CANNOT_JOIN

            async with joined(tmp_path / "carol", of_bob, *data, "--name", "Carol") as carol:
                await carol.says("averaged with")
            async with joined(tmp_path / "carol", *data, "--name", "Carol") as carol:
                await carol.says("averaged with")
                rows = {row["peer_id"][-8:]: row["invited_by"] for row in await alice.ask("roster")}
                assert set(rows) == {alice.name, bob.name, carol.name}
                assert f'{carol.name} "Carol"  live' in (await farandole(home, "run", "members")).out
                assert (rows[bob.name] or "")[-8:] == alice.name
                assert (rows[carol.name] or "")[-8:] == bob.name
                with pytest.raises(ControlError, match="may not invite"):
                    await carol.own_invite()
                with pytest.raises(ControlError, match="only the run's creator"):
                    await revoke(bob, run.creator)

                (row,) = await revoke(alice, public_key_of((await bob.status()).peer_id))
                assert (row["peer_id"][-8:], row["invited_by"][-8:]) == (bob.name, alice.name)
                await alice.until(lambda status: status.run.members_live == 1)
                async with joined(tmp_path / "bob again", invite, *data) as again:  # the other seat of the invite
                    assert "revoked" in await again.says("do not admit")
                    assert await again.ends() == Exit.CANNOT_JOIN


async def test_who_has_an_invite_trains_and_comes_back_and_nobody_else_connects(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    write_run(tmp_path, small_manifest(private=True), creator=home)
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("trainer ready")
        invite = await alice.own_invite()
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await alice.until(lambda status: status.run.members_live == 2)
            assert decode_invite(await bob.own_invite()).network_key == decode_invite(invite).network_key != b""
        async with joined(tmp_path / "bob", *data) as bob:
            await bob.says("connected to 1 peer")
        right = decode_invite(invite)
        wrong = Invite(right.run_id, right.addresses, network_key=bytes(32))
        for guest, code in ((right, Exit.OK), (wrong, Exit.BAD_INPUT)):
            to = tmp_path / f"model {code}"
            visit = await farandole(tmp_path / "guest", "checkpoint", "pull", encode_invite(guest), "--to", str(to))
            assert visit.code == code


async def does_pull(home: Path, *invite: str) -> bool:
    to = home.parent / f"model-{len(list(home.parent.iterdir()))}"
    answer = await farandole(home, "checkpoint", "pull", *invite, "--to", str(to))
    assert answer.code == Exit.OK, answer.err
    return (to / "checkpoint.safetensors").exists()


async def refusal(home: Path, *words: str) -> str:
    answer = await farandole(home, *words)
    assert answer.code == Exit.BAD_INPUT, answer.out
    return answer.err


async def members_of(daemon: Daemon) -> set[str]:
    return {row["peer_id"] for row in await daemon.ask("roster")}


async def test_a_relay_with_an_invite_of_its_own_finds_members_that_it_cannot_dial(tmp_path: Path, texts: Path) -> None:
    write_run(tmp_path, small_manifest(admission="invited"), creator=tmp_path / "alice")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), "--data", str(texts)) as alice:
        await alice.says("step")
        invite = decode_invite(await alice.own_invite())
        text = encode_invite(Invite(invite.run_id, (), invite.admission))
        async with started(tmp_path / "relay", "relay", text, "--no-mdns") as relay:
            dial = await relay.says("farandole dial")
            await alice.ask("dial", address=dial.split()[-1])
            await relay.says("found", alice.name)


async def test_an_invited_member_pulls_and_audits_by_its_data_directory_and_a_stranger_reads_what_to_do(
    tmp_path: Path, texts: Path
) -> None:
    data = ("--data", str(texts))
    run = write_run(tmp_path, small_manifest(admission="invited"), creator=tmp_path / "alice")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = await alice.own_invite()
        async with joined(tmp_path / "carol", invite, *data) as carol:
            await carol.says("averaged with", alice.name)
            assert await does_pull(carol.home), "by its node, which may not invite others"
            assert await does_pull(carol.home, invite), "by the invite that it has used, beside its node"
            members = await members_of(alice)
        home = tmp_path / "carol"
        assert await does_pull(home, invite), "without its node"
        assert "this run has no audits" in await refusal(home, "run", "audit", invite, *data)

        stranger, anybodys = tmp_path / "eve", encode_invite(Invite(run.run_id, alice.addresses))
        for words in (("checkpoint", "pull"), ("run", "audit")):
            said = await refusal(stranger, *words, anybodys)
            assert "run the command with --home of a member's node, or ask for an invite of your own" in said
        assert "has been used" in await refusal(stranger, "checkpoint", "pull", invite)
        assert await members_of(alice) == members, "visitors are no members"
        assert len(members) == 2


async def test_a_listed_member_pulls_by_its_data_directory_and_a_stranger_reads_what_to_do(
    tmp_path: Path, texts: Path
) -> None:
    data = ("--data", str(texts))
    (tmp_path / "bob").mkdir(mode=0o700)
    bobs = peer_id_of(public_bytes(load_or_create_key(tmp_path / "bob" / "key")))
    run = write_run(tmp_path, small_manifest(admission=[bobs]), creator=tmp_path / "alice")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = encode_invite(Invite(run.run_id, alice.addresses))
        assert await does_pull(tmp_path / "bob", invite)
        said = await refusal(tmp_path / "eve", "checkpoint", "pull", invite)
        assert "for the members that its manifest lists" in said
        assert "run the command with --home of a member's node" in said


def signed_by_thief(
    run_id: bytes, invite: InviteSecret, holders: list[bytes], thief: Ed25519PrivateKey, own: Admission
) -> list[bytes]:
    """Return pushes of keys signed into each seat but the thief's own, and at last the thief's own entries.

    By its hash each key is lower than the holders of all seats, and it comes without a witness and with one.
    """

    def rank(key: bytes) -> bytes:
        return hashlib.sha256(run_id + key).digest()

    def told_by(key: Ed25519PrivateKey, kind: Kind, payload: Payload) -> Signed:
        writer = Writer(key, run_id)
        writer.marked(((0, 2**40),))
        return writer.write(kind, 0, payload, time.time()).signed

    entries = list[Signed]()
    first = invite.invitation.first_seat
    for seat in {*range(first, first + invite.invitation.num_seats)} - {own.seat}:
        key = Ed25519PrivateKey.generate()
        while rank(public_bytes(key)) > min(map(rank, holders)):
            key = Ed25519PrivateKey.generate()
        plain = invite.admit(run_id, public_bytes(key), seat)
        witnessed = msgspec.structs.replace(plain, witness=sign_witness(thief, run_id, plain, 0))
        entries += [told_by(key, Kind.ADMISSION, AdmissionProof(encode(each))) for each in (plain, witnessed)]
    entries += [told_by(thief, Kind.ADMISSION, AdmissionProof(encode(own))), told_by(thief, Kind.MEMBER, Member())]
    return [encode(Batch(False, delta)) for delta in deltas_of(entries, MAX_BATCH_BYTES)]


async def test_a_holder_of_an_invite_for_several_expels_nobody(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    run = write_run(tmp_path, small_manifest(admission="invited"), creator=home)
    thief = Ed25519PrivateKey.generate()
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = await alice.own_invite(uses=2)
        async with (
            joined(tmp_path / "bob", invite, *data) as bob,
            open_host(thief, LOOPBACK) as host,
            open_messenger(host) as messenger,
        ):
            await bob.says("averaged with", alice.name)
            before = await bob.status()
            key = public_key_of(before.peer_id)
            secret = decode_secret(decode_invite(invite).admission)
            host.gate.show(run.run_id, b"", secret)
            await host.connect(key, bob.addresses)
            (await host.open_stream(key, PROTOCOL)).reset()  # it has an invite, and takes the free seat
            own = decode_admission(host.gate.admission)
            for payload in signed_by_thief(run.run_id, secret, [key, host.author], thief, own):
                messenger.send_nowait(key, PROTOCOL, payload)

            def is_expelled(status: NodeStatus) -> bool:
                return any("no longer a member" in event.text for event in status.events)

            later = await bob.until(lambda status: is_expelled(status) or status.exchanges_ok > before.exchanges_ok + 1)
            assert not is_expelled(later), "the thief's key has bob's seat"
            members = {alice.name, bob.name, peer_id_of(host.author)[-8:]}
            for daemon in (alice, bob):  # what the thief said last comes after the keys
                await daemon.until(lambda status: {member.peer_id[-8:] for member in status.members} == members)
            assert not is_expelled(await bob.status())
