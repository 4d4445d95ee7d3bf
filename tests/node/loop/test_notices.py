"""The creator's notices between real daemons: they pause, resume and stop all members except ones that ignore them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from farandole.node.base.control import ControlError, call
from farandole.node.base.identity import load_or_create_key
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.manifest import sign_manifest
from farandole.protocol.state.entries import Kind, Notice

from ...patience import PATIENCE
from ..daemons import Daemon, joined
from ..outsiders import light_member
from ..small_runs import small_manifest


async def notify(daemon: Daemon, action: str, text: str = "") -> None:
    await trio.to_thread.run_sync(lambda: call(daemon.home, "notice", timeout=PATIENCE, action=action, text=text))


def rests(status: NodeStatus) -> bool:
    return status.phase == "paused" and status.trainer_pid is None


async def test_the_creator_pauses_resumes_and_stops_all_who_let_it(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    home.mkdir(mode=0o700)
    run = sign_manifest(small_manifest(), load_or_create_key(home / "key"))
    (tmp_path / "run.manifest").write_bytes(run.encode())
    async with joined(home, str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        invite = alice.invite(run.run_id)
        async with (
            joined(tmp_path / "bob", invite, *data) as bob,
            joined(tmp_path / "carol", invite, *data, "--ignore-notices") as carol,
        ):
            await bob.says("averaged with")
            await carol.says("averaged with")
            with pytest.raises(ControlError, match="only the run's creator"):
                await notify(bob, "stop")
            with pytest.raises(ControlError, match="ASCII"):
                await notify(alice, "say", "n\u00e4chste Woche")

            await notify(alice, "say", "a new release is out")
            assert "a new release is out" in await bob.says("creator says")
            await notify(alice, "pause", "back at noon")
            await carol.says("back at noon", "ignores it")
            resting = await bob.until(rests)
            assert "back at noon" in resting.notice
            assert "a new release is out" in resting.notice
            assert "--ignore-notices" in resting.phase_detail
            assert any("back at noon" in event.text for event in resting.events)
            await alice.until(rests)
            step = (await carol.status()).inner_steps
            await carol.until(lambda status: status.inner_steps > step + 5)

            async with light_member(tmp_path / "mallory", run, alice) as mallory:
                await mallory.publish(Kind.NOTICE, 0, Notice("resume"))  # hers stays in her own state
                await notify(alice, "resume")
                await bob.says("has resumed")
                await bob.until(lambda status: status.phase == "training")

            await notify(alice, "stop", "thank you all")
            stopped = await bob.until(lambda status: status.phase == "finished" and status.trainer_pid is None)
            assert "thank you all" in stopped.notice
            assert list((tmp_path / "bob" / "checkpoints").rglob("*.safetensors")), "its weights are saved"
            await alice.until(lambda status: status.phase == "finished")
            assert (await carol.status()).phase != "finished"
        async with joined(tmp_path / "bob", *data) as bob:
            assert "thank you all" in await bob.says("resting"), "in a next life it starts no trainer"
            await bob.until(rests)
