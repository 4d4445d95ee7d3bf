from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.node.store.disk_space import OTHER_BYTES, DiskError, DiskPlan, Room, plan_disk, text_room, used_bytes
from farandole.node.store.folder import CheckpointFolder, Saver, index_of
from farandole.protocol.trainer.trainer_messages import Saved
from farandole.training.base.durable import replacing
from farandole.training.engine.blocks import Content, content_of
from farandole.training.engine.checkpoint import Counters, load_checkpoint

from .killed_saver import LAYOUT, RUN_ID, prepare, snapshot

SCRIPT = Path(__file__).with_name("killed_saver.py")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed(folder: Path, case: str) -> tuple[list[CheckpointFolder], list[str]]:
    """Return the folders of children killed at each call in turn, and the calls of the last one, which completed."""
    subprocess.run([sys.executable, str(SCRIPT), str(folder), case], check=True, timeout=120)
    calls = (folder / "whole" / "calls").read_text().splitlines()
    return [CheckpointFolder(folder / f"{call}" / "checkpoints", 0) for call in range(len(calls))], calls


def loads(path: Path) -> None:
    """Assert that a checkpoint is fit, whatever its content: tensors, counters, values."""
    state = {name: tensor.clone() for name, tensor in snapshot(0).state.items()}
    counters, _ = load_checkpoint(path, state, LAYOUT, RUN_ID)
    assert counters.steps == 10 * counters.round
    assert len(torch.cat([tensor.flatten() for tensor in state.values()]).unique()) == 1


@pytest.mark.parametrize(("case", "old", "new"), [("new", 2, 3), ("again", 2, 2), ("fetched", 2, 7)])
def test_kill_at_every_call_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, case: str, old: int, new: int
) -> None:
    folders, calls = killed(tmp_path, case)
    before = files_of(tmp_path / "template" / "checkpoints")
    after = files_of(tmp_path / "whole" / "checkpoints")
    assert len(folders) == len(calls)
    seen = set()
    for folder in folders:
        folder.clean()
        newest, *others = folder.files()
        assert newest in (folder.file(old), folder.file(new))
        loads(newest)
        assert newest.read_bytes() in (before.get(newest.name), after.get(newest.name))
        seen.add(newest.read_bytes())
        assert others, "two at least"
        for name, content in files_of(folder.path).items():
            assert content in (before.get(name), after.get(name)), "never a third thing"
        if newest == folder.file(new) and newest.read_bytes() == after[newest.name]:
            assert not index_of(newest).exists(), "that of another file"
    assert seen == {before[folder.file(old).name], after[folder.file(new).name]}
    if case == "new":
        # The file is durable before it gets its name, and the name before the oldest goes, index first.
        kinds = [call.split()[0] for call in calls if not call.startswith("open")]
        first_write, last_write = kinds.index("write"), len(kinds) - 1 - kinds[::-1].index("write")
        assert set(kinds[first_write : last_write + 1]) == {"write"}
        assert kinds[last_write + 1 :] == ["fsync", "replace", "fsync", "unlink", "unlink"]
        removed = [call.split()[1] for call in calls[-2:]]
        assert removed == ["stage-0-round-1.safetensors.index", "stage-0-round-1.safetensors"]


class Story:
    """A node that has saved rounds 1 and 2."""

    def __init__(self, path: Path) -> None:
        self.folder = CheckpointFolder(path / "checkpoints", 0)
        prepare(self.folder)
        self.reports: list[Saved] = []
        self.saver = Saver(self.folder, self.reports.append)
        for round_index in (1, 2):
            path = self.folder.file(round_index)
            self.saver.note(path, content_of(path), snapshot(round_index).counters)

    def save(self, round_index: int) -> Saved:
        self.saver.save_behind(snapshot(round_index))
        self.saver.wait()
        return self.reports[-1]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


@pytest.mark.parametrize("failing", [0, 1])
def test_after_a_failed_fsync_the_next_save_has_another_file(
    story: Story, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The first fsync of a save is the file's, the second its folder's."""
    synced: list[str] = []
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(synced) == failing + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    before = files_of(story.folder.path)
    monkeypatch.setattr("os.fsync", fail)
    assert "Input/output error" in story.save(3).problem
    now = files_of(story.folder.path)
    assert {name: now[name] for name in before} == before, "the old ones stay"
    assert now.keys() - before.keys() == ({story.folder.file(3).name} if failing else set())
    assert story.save(4).problem == ""
    assert story.folder.files() == [story.folder.file(4), story.folder.file(2)]
    files = [name for name in synced if name != str(story.folder.path)]
    assert len(files) == len(set(files)) == 2
    loads(story.folder.file(4))


def test_two_are_kept_and_which_has_just_been_found_good_is_one(story: Story) -> None:
    assert story.save(9).problem == ""
    assert story.folder.files() == [story.folder.file(9), story.folder.file(2)]
    saved = story.save(5)  # a damaged one was skipped
    assert story.folder.files() == [story.folder.file(9), story.folder.file(5)]
    assert content_of(Path(saved.path)).hashes == saved.hashes
    assert story.saver.newest == saved


def test_a_save_for_which_there_is_no_memory_is_told_of_and_not_waited_for_ever(story: Story) -> None:
    def want_memory() -> None:
        raise MemoryError

    story.saver.save_behind(dataclasses.replace(snapshot(3), copied=[want_memory]))
    story.saver.wait()
    assert "the checkpoint of round 3 is not written: MemoryError" in story.reports[-1].problem
    assert story.save(4).problem == ""


GB = 10**9


ENOUGH = 4 * GB + OTHER_BYTES


@pytest.mark.parametrize(
    ("limit", "text_bytes", "num_kept", "has_copy"),
    [
        (0, 0, 2, True),
        (ENOUGH, 0, 2, True),
        (ENOUGH - 1, 0, 2, False),
        (ENOUGH - GB - 1, 0, 1, False),
        (ENOUGH, 1, 2, False),
        (ENOUGH, GB, 2, False),
        (ENOUGH, GB + 1, 1, False),
        (ENOUGH, 100 * GB, 1, False),  # other runs' text stops no node
    ],
)
def test_text_comes_before_the_copy_and_the_copy_is_given_up_before_the_second_newest(
    limit: int, text_bytes: int, num_kept: int, has_copy: bool
) -> None:
    assert plan_disk(limit, GB, GB // 2, text_bytes) == DiskPlan(num_kept, has_copy)
    assert text_room(ENOUGH, GB) == 2 * GB
    assert text_room(0, GB) is None


@given(st.integers(1, 100 * GB), st.integers(1, 10 * GB), st.integers(1, 10 * GB), st.floats(0, 1))
def test_whatever_is_planned_fits(limit: int, own: int, copy: int, share: float) -> None:
    text = int(share * (text_room(limit, own) or 0))
    try:
        plan = plan_disk(limit, own, copy, text)
    except DiskError:
        assert limit < OTHER_BYTES + 2 * own
    else:
        assert (plan.num_kept + 1) * own + 2 * plan.has_copy * copy + text + OTHER_BYTES <= limit


def test_it_measures_as_du_does(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "file").write_bytes(os.urandom(300_000))
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 30)
        file.write(os.urandom(10_000))
    os.link(tmp_path / "holes", tmp_path / "again")
    du = int(subprocess.run(["du", "-s", "-B1", tmp_path], capture_output=True, check=True).stdout.split()[0])
    folders = 3 * os.lstat(tmp_path).st_blocks * 512
    assert abs(used_bytes(tmp_path) - (du - folders)) <= folders


def test_no_room_is_the_disks_or_the_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    Room(tmp_path, 3_000_000).check(tmp_path, 1_900_000)
    with pytest.raises(OSError, match="--disk leaves 2 MB"):
        Room(tmp_path, 3_000_000).check(tmp_path, 2_100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(OSError, match="are free"):
        Room().check(tmp_path, 1)


class Growing:
    """A replica's snapshot of a megabyte, which measures its folder while it is written."""

    num_bytes = 1_000_000

    def __init__(self, round_index: int, folder: Path, measured: list[int]) -> None:
        self.counters = Counters(round_index, round_index, 8 * round_index)
        self._folder = folder
        self._measured = measured

    def save(self, path: Path) -> Content:
        with replacing(path) as file:
            file.write(os.urandom(self.num_bytes))
            self._measured.append(used_bytes(self._folder))
        return Content(self.num_bytes, b"h" * 32)


@pytest.mark.parametrize("num_kept", [1, 2])
def test_saves_never_take_more_than_was_planned(tmp_path: Path, num_kept: int) -> None:
    folder, measured = tmp_path / "checkpoints", list[int]()
    saver = Saver(CheckpointFolder(folder, 0), lambda saved: None, num_kept)
    for round_index in range(1, 6):
        growing: Any = Growing(round_index, folder, measured)
        saver.save(growing)
    assert max(measured) <= (num_kept + 1) * 1.05e6
    assert used_bytes(folder) <= num_kept * 1.05e6
    assert len(CheckpointFolder(folder, 0).files()) == num_kept
    checkpoints = CheckpointFolder(folder, 0)
    checkpoints.keep(checkpoints.files()[:1])
    assert [path.name for path in CheckpointFolder(folder, 0).files()] == ["stage-0-round-5.safetensors"]


def test_a_stages_checkpoints_come_newest_first_and_what_else_lies_there_is_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", 1)
    assert folder.files() == []
    folder.clean()
    folder.path.mkdir()
    for round_index in (9, 100, 11):
        folder.file(round_index).touch()
    index_of(folder.file(9)).touch()
    CheckpointFolder(folder.path, 0).file(500).touch()
    for other in ("stage-1-round-.safetensors", "stage-1-round-7.safetensors.part", "a stage-1-round-7.safetensors"):
        (folder.path / other).touch()
    assert folder.files() == [folder.file(100), folder.file(11), folder.file(9)]


def test_older_ones_go_with_their_index_and_other_stages_stay(tmp_path: Path) -> None:
    folder, other = CheckpointFolder(tmp_path, 1), CheckpointFolder(tmp_path, 0)
    for path in (folder.file(1), folder.file(2), folder.file(3), other.file(1)):
        path.touch()
        index_of(path).touch()
    folder.keep([folder.file(1), folder.file(3)])
    assert {path.name for path in tmp_path.iterdir()} == {
        name for path in (folder.file(1), folder.file(3), other.file(1)) for name in (path.name, index_of(path).name)
    }


def test_what_killed_trainers_left_half_saved_is_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 1)
    kept = {folder.file(1), index_of(folder.file(1)), tmp_path / ".stage-0-round-1.safetensors.x.tmp", tmp_path / "own"}
    left = {tmp_path / ".stage-1-round-2.safetensors.a1b2.tmp", index_of(folder.file(2))}
    for path in kept | left:
        path.touch()
    folder.clean()
    assert set(tmp_path.iterdir()) == kept
