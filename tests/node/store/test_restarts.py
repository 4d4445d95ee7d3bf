"""Trainers and nodes in separate processes, killed and restarted again and again, or on a full disk."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import trio

from farandole.node.base.errors import Exit
from farandole.node.base.identity import load_or_create_key
from farandole.node.base.settings import NodeSettings
from farandole.node.store.folder import CheckpointFolder
from farandole.node.trainer.trainer import open_trainer
from farandole.node.ui.headline import headline
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.protocol.wire.identity import public_bytes
from farandole.training.data.dataset import Bring
from farandole.training.engine.learner import Learner, build_learner

from ...patience import PATIENCE
from ..daemons import Daemon, joined
from ..small_runs import TINY, small_manifest, write_run
from ..trainer_commands import prepare_for, save_after_round

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


VECTORS = 4


@pytest.fixture
def manifest() -> Manifest:
    """Return a manifest whose checkpoint has a dozen blocks."""
    rounds = {"inner_steps": 1, "round_seconds": 0.0, "exchange_seconds": 5.0}
    return small_manifest(model=TINY | {"width": 256, "hidden": 512}, inner={"batch_size": 1}, rounds=rounds, data={})


@pytest.fixture
def prepare(manifest: Manifest, tmp_path: Path) -> messages.Prepare:
    return prepare_for(manifest, tmp_path / "checkpoints")


def write_starts(path: Path) -> list[int]:
    """Return the offsets of the writes that made the file: the starts of vectors and of blocks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    vectors = range(header, size, (size - header) // VECTORS)
    return sorted({0, *vectors, *range(0, size, BLOCK_BYTES)})


async def test_no_room_at_any_write_of_a_save(prepare: messages.Prepare) -> None:
    folder = CheckpointFolder(Path(prepare.settings.checkpoints), 0)
    async with open_trainer(prepare) as trainer:
        old = await save_after_round(trainer, 0)
        assert old.problem == ""
        content = folder.file(1).read_bytes()
        starts = write_starts(folder.file(1))
        assert len(starts) > 12
        for round_index, room in enumerate(starts, 1):
            resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            saved = await save_after_round(trainer, round_index)
            assert f"round {round_index + 1} is not written: File too large" in saved.problem
            assert "the last good one is kept, and the next save tries again" in saved.problem
            assert [path.name for path in folder.path.iterdir()] == [folder.file(1).name]
            assert folder.file(1).read_bytes() == content
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        last = await save_after_round(trainer, len(starts) + 1)
        assert last.problem == ""
        assert folder.files() == [Path(last.path), folder.file(1)]
    async with open_trainer(prepare) as again:
        assert again.prepared.resumed == msgspec.structs.replace(last, seconds=0.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a home whose checkpoints have their own disk, with room for two and a half."""
    folder = NodeSettings(home=tmp_path / "alice").checkpoints
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=28m", "none", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


async def test_a_node_without_room_trains_on_and_saves_later(
    manifest: Manifest, small_disk: Path, tmp_path: Path
) -> None:
    write_run(tmp_path, manifest)
    folder, home = CheckpointFolder(small_disk, 0), small_disk.parent
    options = ("--device", "cpu", "--checkpoint-seconds", "0.1")
    async with joined(home, str(tmp_path / "run.manifest"), *options) as alice:
        warning = await alice.says("warning: the checkpoint of round", "No space left on device; free ")
        assert f" MB in {small_disk}: " in warning
        assert "MB are free; the last good one is kept, and the next save tries again" in warning
        status = await alice.until(lambda status: bool(status.disk))
        found = headline(status, status.at)
        assert (found.level, found.text[:16], found.remedy[:5]) == ("trouble", "the checkpoint o", "free ")
        for _ in range(3):
            await alice.says("round", "inner step")
        assert await alice.end(signal.SIGKILL) == -signal.SIGKILL
    kept = folder.files()
    assert len(kept) == 2
    async with joined(home, *options) as alice:
        assert f"resumed at round {kept[0].stem.rpartition('-')[2]}" in await alice.says("trainer ready")
        await alice.says("warning: the checkpoint of round", "No space left on device")
        await trio.run_process(["mount", "-o", "remount,size=200m", str(small_disk)])
        with trio.fail_after(PATIENCE):
            while folder.files()[0] == kept[0]:  # over several rounds
                await alice.says("round", "inner step")
        await alice.until(lambda status: not status.disk)
        assert "No space left" not in str((await alice.status()).warnings), "that is over"
        assert await alice.end(signal.SIGTERM) == Exit.OK


async def test_a_newcomer_without_room_fetches_no_weights(manifest: Manifest, small_disk: Path, tmp_path: Path) -> None:
    signed = write_run(tmp_path, manifest)
    async with joined(tmp_path / "carol", str(tmp_path / "run.manifest"), "--device", "cpu") as carol:
        await carol.says("trainer ready")
        async with joined(small_disk / "bob", carol.invite(signed.run_id), "--device", "cpu") as bob:
            await bob.says("error: only", "more are needed at least; free some space")
            with trio.fail_after(PATIENCE):
                assert await bob.process.wait() == Exit.TRAINER_FAILED
