"""What durable means to each system; that files are whole or not there is tested with the checkpoints."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from farandole.training.base.durable import replacing

fcntl = pytest.importorskip("fcntl", reason="Windows has no fcntl")
FULL_FSYNC = 51  # sys/fcntl.h of macOS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a system that says it is macOS is asked for."""
    asked = []

    def fsync(descriptor: int) -> None:
        asked.append("fsync")

    def control(descriptor: int, command: int) -> None:
        assert command == FULL_FSYNC
        asked.append("F_FULLFSYNC")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_FSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", fsync)
    return asked


def save(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def test_a_macs_drive_is_told_to_write_what_it_has(tmp_path: Path, asked: list[str]) -> None:
    save(tmp_path / "file")

    assert (tmp_path / "file").read_bytes() == b"new"
    assert asked == ["F_FULLFSYNC"] * 2  # the file, and the folder with its name


@pytest.mark.parametrize(("code", "is_saved"), [(errno.ENOTSUP, True), (errno.EIO, False)])
def test_only_a_file_system_that_cannot_tell_its_drive_is_asked_for_less(
    code: int, is_saved: bool, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    if is_saved:
        save(tmp_path / "file")
        assert asked == ["fsync"] * 2
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            save(tmp_path / "file")
        assert not (tmp_path / "file").exists()
        assert asked == []
