"""A node that is killed and restarted, again and again, is the same node, with exactly its last checkpoint's bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import trio

from farandole.node.base.identity import load_or_create_key
from farandole.node.base.settings import NodeSettings
from farandole.node.store.folder import CheckpointFolder
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.protocol.wire.identity import public_bytes
from farandole.training.data.dataset import Bring
from farandole.training.engine.learner import Learner, build_learner

from ...patience import PATIENCE
from ..daemons import Daemon, joined
from ..small_runs import small_manifest, write_run

INNER_STEPS = 3
CHECKPOINT_SECONDS = 0.1
UNPACED = ("--step-seconds", "0")
# A save that is due is on the disk within this time, even if many tests run on the machine.
SAVE_SECONDS = 60.0
MANIFEST = small_manifest(
    outer={"codec": "int8"}, rounds={"inner_steps": INNER_STEPS, "round_seconds": 0.0, "exchange_seconds": 5.0}
)


class Twin:
    """A replica in this process with the same inner and outer steps: the weights that the node must have."""

    def __init__(self, manifest: Manifest, run_id: bytes, home: Path, texts: Path) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._author = public_bytes(load_or_create_key(home / "key"))
        self._texts = texts

    def goes_on(self, start: Path | None, end: Path, folder: Path) -> None:
        """Go from one checkpoint (None: the seed) to another, which must be equal in every bit."""
        goal, learner = self._load(end), self._load(start)
        while learner.totals.round < goal.totals.round:
            for _ in range(INNER_STEPS):
                learner.learn()
            learner.round_end.apply(None)
        while learner.totals.steps < goal.totals.steps:
            learner.learn()
        learner.checkpoint.save(folder / "twin")
        assert (folder / "twin").read_bytes() == end.read_bytes()

    def _load(self, path: Path | None) -> Learner:
        learner = build_learner(
            self._manifest,
            run_id=self._run_id,
            author=self._author,
            settings=TrainerSettings(device="cpu"),
            bring=Bring((self._texts,)),
        )
        if path is not None:
            learner.checkpoint.load(path)
        return learner


async def live(daemon: Daemon, num_rounds: int, *, with_trainer: bool) -> tuple[dict[int, float], float]:
    """Play some rounds, then kill the node, its trainer with it or later; return the times of outer steps and death."""
    said: dict[int, float] = {}
    for _ in range(num_rounds):
        line = await daemon.says("round", "inner step")
        said[int(line.partition("round ")[2].partition(":")[0])] = time.monotonic()
    trainers = [os.pidfd_open(child.pid) for child in psutil.Process(daemon.process.pid).children()]
    assert trainers
    killed_at = time.monotonic()
    daemon.process.kill()
    for trainer in trainers:
        if with_trainer:
            signal.pidfd_send_signal(trainer, signal.SIGKILL)
    await daemon.process.wait()
    with trio.fail_after(PATIENCE):
        for trainer in trainers:
            await trio.lowlevel.wait_readable(trainer)  # until it is gone
            os.close(trainer)
    return said, killed_at


@pytest.mark.parametrize("num_kills", [4, pytest.param(100, marks=pytest.mark.soak)])
async def test_a_node_that_is_killed_comes_back_with_its_last_checkpoints_bits(
    num_kills: int, tmp_path: Path, texts: Path
) -> None:
    signed = write_run(tmp_path, MANIFEST)
    home, rng = tmp_path / "alice", random.Random(1)
    folder = CheckpointFolder(NodeSettings(home=home).checkpoints, 0)
    options = ("--data", str(texts), "--device", "cpu", "--checkpoint-seconds", str(CHECKPOINT_SECONDS), *UNPACED)
    source: tuple[str, ...] = (str(tmp_path / "run.manifest"),)
    names: set[str] = set()
    newest: Path | None = None
    for life in range(num_kills + 1):
        async with joined(home, *source, *options) as alice:
            ready = await alice.says("trainer ready")
            expected = "from the run's seed" if newest is None else f"resumed at round {int(newest.stem)}"
            assert ready.endswith(expected)
            names.add(alice.name)
            if life == num_kills:
                break
            said, killed_at = await live(alice, rng.randint(1, 60), with_trainer=life % 2 == 0)
        before, source = newest, ()
        files = folder.files()
        newest = tmp_path / f"{int(files[0].stem.rpartition('-')[2])}.safetensors" if files else None
        if newest is not None and newest != before:
            shutil.copy(files[0], newest)
            Twin(MANIFEST, signed.run_id, home, texts).goes_on(before, newest, tmp_path)
        lost = min((at for done, at in said.items() if newest is None or done >= int(newest.stem)), default=killed_at)
        assert killed_at - lost < CHECKPOINT_SECONDS + SAVE_SECONDS
    assert len(names) == 1
