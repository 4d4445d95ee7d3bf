"""Real nodes whose trainers crash or hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from farandole.node.base.exits import Exit
from farandole.protocol.run.manifest import SignedManifest

from ..daemons import Daemon, joined
from ..small_runs import small_manifest, write_run, write_text


@pytest.fixture
def run(tmp_path: Path) -> SignedManifest:
    write_text(tmp_path)
    return write_run(tmp_path, small_manifest())


async def signal_trainer(daemon: Daemon, number: signal.Signals) -> None:
    status = await daemon.ask("status")
    os.kill(status["trainer_pid"], number)


async def test_trainers_crash_and_hang_and_a_node_is_told_twice_to_leave(tmp_path: Path, run: SignedManifest) -> None:
    options = ("--data", str(tmp_path / "text.txt"), "--hung-seconds", "2")
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *options) as alice:
        await alice.says("trainer ready")
        invite = alice.invite(run.run_id)
        async with joined(tmp_path / "bob", invite, *options) as bob:
            await bob.says("averaged with", alice.name)

            await signal_trainer(bob, signal.SIGSEGV)
            await bob.says("killed by signal 11 (SIGSEGV)", "starting it again in 1 s")
            await alice.says("alone")
            await bob.says("averaged with", alice.name)
            assert "Segmentation fault" in (bob.home / "log").read_text()

            await alice.says("averaged with", bob.name)
            await signal_trainer(alice, signal.SIGSTOP)
            await alice.says("no sign of life")
            await alice.says("trainer ready", "resumed at round")
            await alice.says("averaged with", bob.name)

            for daemon in (alice, bob):
                status = await daemon.until(lambda status: status.run.members_live == 2)
                assert status.trainer_restarts == 1

            await signal_trainer(bob, signal.SIGSTOP)
            trainer = (await bob.ask("status"))["trainer_pid"]
            bob.process.send_signal(signal.SIGTERM)
            await bob.says("leaving")
            assert await bob.end(signal.SIGTERM) == Exit.INTERRUPTED
            with pytest.raises(ProcessLookupError):
                os.kill(trainer, 0)
            await alice.says(bob.name, "is gone")
            assert await alice.end(signal.SIGTERM) == Exit.OK
