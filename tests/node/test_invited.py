"""A run of invited members, with real daemons: an invite lets one train, and a revocation ends that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from farandole.node.base.control import ControlError, call
from farandole.node.base.exits import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.node.join.invites import own_invite
from farandole.protocol.run.manifest import sign_manifest
from farandole.protocol.wire.identity import public_key_of

from ..patience import PATIENCE
from .daemons import Daemon, joined
from .small_runs import small_manifest


async def invite_by(daemon: Daemon, quota: int = 0) -> str:
    return await trio.to_thread.run_sync(lambda: own_invite(daemon.home, daemon.addresses, quota=quota))


async def revoke(daemon: Daemon, key: bytes) -> None:
    await trio.to_thread.run_sync(
        lambda: call(daemon.home, "admit", timeout=PATIENCE, keys=[key.hex()], is_admitted=False)
    )


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
        invite = await invite_by(alice, quota=1)
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            of_bob = await invite_by(bob)
            with pytest.raises(ControlError, match="0 more seats"):
                await invite_by(bob)

            visited = [sys.executable, "-m", "farandole.node", "checkpoint", "list", await invite_by(alice)]
            answer = await trio.run_process([*visited, "--listen", "/ip4/127.0.0.1/tcp/0"], check=False)
            assert answer.returncode == Exit.OK, "a visitor takes a seat, too"

            async with joined(tmp_path / "mallory", invite, *data) as mallory:
                assert "has been used" in await mallory.says("do not admit")
                assert await ends(mallory) == Exit.CANNOT_JOIN
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

                await revoke(alice, public_key_of((await bob.status()).peer_id))
                await alice.until(lambda status: status.run.members_live == 1)
