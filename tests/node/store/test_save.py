"""Saves that are killed, or that the disk refuses: afterwards there is the old checkpoint or the new one."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farandole.node.store.folder import CheckpointFolder, Saver, index_of
from farandole.protocol.trainer.trainer_messages import Saved
from farandole.training.engine.blocks import content_of
from farandole.training.engine.checkpoint import load_checkpoint

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
