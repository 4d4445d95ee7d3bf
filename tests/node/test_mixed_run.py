"""Nodes that train by themselves and a user's own loop in one run, each with weights from the other."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

from .cluster_member import MODEL
from .daemons import TORCHRUN, joined, loop, started
from .small_runs import small_manifest, write_run

PROGRAM = str(Path(__file__).with_name("cluster_member.py"))


async def test_a_cluster_and_built_in_trainers_average_and_newcomers_take_weights_from_either(
    tmp_path: Path, texts: Path
) -> None:
    """Alice trains by herself, Bob is a cluster of two ranks that comes later, Carol comes when Alice is gone."""
    run = write_run(tmp_path, small_manifest(model=msgspec.to_builtins(MODEL)))
    bobs, data = tmp_path / "bob", ("--data", str(texts))
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("listening on")
        await alice.until(lambda status: status.round > 0)
        settings = ("--trainer", "external", "--heartbeat-seconds", "1", "--step-seconds", "0.05")
        async with started(bobs, "join", alice.invite(run.run_id), *settings, "--checkpoint-seconds", "1") as bob:
            await bob.says("waiting for a loop to attach")
            await bob.hears_of_a_round(alice.name)
            async with loop(bobs, program=(*TORCHRUN, PROGRAM)) as ranks:
                await bob.says("weights of round", alice.name, "hashes verified")
                await bob.says("trainer ready", "resumed at round")
                await ranks.says("rank 0 begins at round")
                await bob.says("averaged with", alice.name)
                await alice.says("averaged with", bob.name)
                await alice.end(signal.SIGKILL)
                await bob.says(alice.name, "is gone")
                await bob.says("alone")
                async with joined(tmp_path / "carol", bob.invite(run.run_id), *data) as carol:
                    await carol.says("the weights of round", f"from {bob.name} are not compared")
                    await carol.says("weights of round", bob.name, "hashes verified")
                    await carol.says("trainer ready", "resumed at round", "with fresh means of the optimizer")
                    await carol.says("averaged with", bob.name)
                    await bob.says("averaged with", carol.name)
