"""Full disks under trainers and nodes in separate processes: training goes on, and saves succeed later."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trio

from farandole.node.base.exits import Exit
from farandole.node.base.settings import NodeSettings
from farandole.node.store.folder import CheckpointFolder
from farandole.node.trainer.trainer import open_trainer
from farandole.node.ui.headline import headline
from farandole.protocol.checkpoints.blocks import BLOCK_BYTES
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages

from ...patience import PATIENCE
from ..daemons import joined
from ..small_runs import TINY, small_manifest, write_run
from ..trainer_commands import prepare_for, save_after_round

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
