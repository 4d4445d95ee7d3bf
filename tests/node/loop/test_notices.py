"""The creator's notices between real daemons: they pause, resume and stop all members except ones that ignore them."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.node.base.control import ControlError
from farandole.node.status.status import NodeStatus

from ..daemons import Daemon, joined
from ..small_runs import small_manifest, write_run


async def notify(daemon: Daemon, action: str, text: str = "") -> None:
    await daemon.ask("notice", action=action, text=text)


def rests(status: NodeStatus) -> bool:
    return status.phase == "paused" and status.trainer_pid is None


async def test_the_creator_pauses_resumes_and_stops_all_who_let_it(tmp_path: Path, texts: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(texts))
    run = write_run(tmp_path, small_manifest(), creator=home)
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
