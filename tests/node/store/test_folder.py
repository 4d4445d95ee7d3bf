"""The checkpoints in a node's folder, and which of them are kept."""

from __future__ import annotations

from pathlib import Path

from farandole.node.store.folder import CheckpointFolder, index_of


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


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
    assert names(tmp_path) == {
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
