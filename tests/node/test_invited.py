"""A run of invited members, with real daemons: an invite lets one train, and a revocation ends that."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.control import ControlError
from farandole.node.base.exits import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.node.join.invites import own_invite
from farandole.node.mesh.host import open_host
from farandole.node.state.messenger import open_messenger
from farandole.protocol.run.invitations import InviteSecret, sign_witness
from farandole.protocol.run.invite import decode_invite
from farandole.protocol.run.manifest import sign_manifest
from farandole.protocol.state.entries import AdmissionProof, Kind, Signed, deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, PROTOCOL, Batch
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import public_bytes, public_key_of
from farandole.protocol.wire.messagepack import encode

from ..patience import PATIENCE
from .daemons import Daemon, joined
from .hosts import LOOPBACK
from .small_runs import small_manifest


async def invite_by(daemon: Daemon, quota: int = 0, uses: int = 1) -> str:
    return await trio.to_thread.run_sync(lambda: own_invite(daemon.home, daemon.addresses, quota=quota, uses=uses))


async def revoke(daemon: Daemon, key: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = await daemon.ask("admit", keys=[key.hex()], is_admitted=False, keeps_invites=False)
    return rows


async def ends(daemon: Daemon) -> int:
    with trio.fail_after(PATIENCE):
        return await daemon.process.wait()


async def test_who_is_invited_trains_and_nobody_else(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    home.mkdir(mode=0o700)
    inner = {"learning_rate": 3e-3, "warmup_steps": 2, "batch_size": 2}
    run = sign_manifest(small_manifest(inner=inner, admission="invited"), load_or_create_key(home / "key"))
    (tmp_path / "run.manifest").write_bytes(run.encode())
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = await invite_by(alice, quota=1, uses=2)
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            of_bob = await invite_by(bob)
            with pytest.raises(ControlError, match="0 more seats"):
                await invite_by(bob)

            visited = [sys.executable, "-m", "farandole.node", "checkpoint", "list", await invite_by(alice)]
            answer = await trio.run_process([*visited, "--listen", "/ip4/127.0.0.1/tcp/0"], check=False)
            assert answer.returncode == Exit.OK, "a visitor takes a seat, too"

            async with joined(tmp_path / "eve", alice.invite(run.run_id), *data) as eve:
                await eve.says("fetching the run's manifest")
                stranger = await eve.until(lambda status: status.connected_peers > 0)
                async with joined(tmp_path / "carol", of_bob, *data) as carol:
                    await carol.says("averaged with")
                assert not (await eve.status()).is_member
                assert stranger.peer_id not in {row["peer_id"] for row in await alice.ask("roster")}

            async with joined(tmp_path / "carol", "--data", str(texts)) as carol:
                await carol.says("averaged with")
                rows = {row["peer_id"][-8:]: row["invited_by"] for row in await alice.ask("roster")}
                assert set(rows) == {alice.name, bob.name, carol.name}
                assert (rows[bob.name] or "")[-8:] == alice.name
                assert (rows[carol.name] or "")[-8:] == bob.name
                with pytest.raises(ControlError, match="may not invite"):
                    await invite_by(carol)
                with pytest.raises(ControlError, match="only the run's creator"):
                    await revoke(bob, run.creator)

                (row,) = await revoke(alice, public_key_of((await bob.status()).peer_id))
                assert (row["peer_id"][-8:], row["invited_by"][-8:]) == (bob.name, alice.name)
                await alice.until(lambda status: status.run.members_live == 1)
                async with joined(tmp_path / "bob again", invite, *data) as again:  # the other seat of the invite
                    assert "revoked" in await again.says("do not admit")
                    assert await ends(again) == Exit.CANNOT_JOIN


def signed_by_thief(run_id: bytes, invite: InviteSecret, holders: list[bytes], thief: Ed25519PrivateKey) -> list[bytes]:
    """Return pushes of keys that are signed into every seat, each lower by its hash than the holders of all seats."""

    def rank(key: bytes) -> bytes:
        return hashlib.sha256(run_id + key).digest()

    entries = list[Signed]()
    first = invite.invitation.first_seat
    for seat in range(first, first + invite.invitation.num_seats):
        key = Ed25519PrivateKey.generate()
        while rank(public_bytes(key)) > min(map(rank, holders)):
            key = Ed25519PrivateKey.generate()
        plain = invite.admit(run_id, public_bytes(key), seat)
        witnessed = msgspec.structs.replace(plain, witness=sign_witness(thief, run_id, plain, 0))
        for admission in (plain, witnessed):
            writer = Writer(key, run_id)
            writer.marked(((0, 2**40),))
            entries.append(writer.write(Kind.ADMISSION, 0, AdmissionProof(encode(admission)), time.time()).signed)
    return [encode(Batch(False, delta)) for delta in deltas_of(entries, MAX_BATCH_BYTES)]


async def test_a_holder_of_an_invite_for_several_expels_nobody(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    home.mkdir(mode=0o700)
    run = sign_manifest(small_manifest(admission="invited"), load_or_create_key(home / "key"))
    (tmp_path / "run.manifest").write_bytes(run.encode())
    thief = Ed25519PrivateKey.generate()
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("step")
        invite = await invite_by(alice, uses=4)
        async with (
            joined(tmp_path / "bob", invite, *data) as bob,
            joined(tmp_path / "carol", invite, *data) as carol,
            joined(tmp_path / "dan", invite, *data) as dan,
            open_host(thief, LOOPBACK) as host,
            open_messenger(host) as messenger,
        ):
            daemons = (alice, bob, carol, dan)
            await bob.says("averaged with")
            for daemon in daemons:
                await daemon.until(lambda status: status.run.members_live == len(daemons) and status.exchanges_ok > 0)
            before = [await daemon.status() for daemon in daemons]
            holders = [public_key_of(status.peer_id) for status in before]
            secret = InviteSecret.decode(decode_invite(invite).admission)
            host.gate.show(run.run_id, b"", secret)
            await host.connect(holders[1], bob.addresses)
            (await host.open_stream(holders[1], PROTOCOL)).reset()  # it has an invite, and takes the free seat
            for payload in signed_by_thief(run.run_id, secret, holders, thief):
                messenger.send_nowait(holders[1], PROTOCOL, payload)
            for daemon, earlier in zip(daemons, before, strict=True):
                wanted = earlier.exchanges_ok + 3
                later = await daemon.until(lambda status, wanted=wanted: status.exchanges_ok >= wanted)  # type: ignore[misc]
                assert later.run.members_live == len(daemons)
                assert not any("no longer a member" in event.text for event in later.events)
                assert len(await daemon.ask("roster")) == len(daemons)
