"""The log file, and a disk that does not take it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from farandole.node.identity import IdentityError
from farandole.node.logs import logging_to_file
from farandole.node.settings import NodeSettings

FULL_DISK = Path("/dev/full")


def test_lines_go_to_the_file(tmp_path: Path) -> None:
    settings = NodeSettings(home=tmp_path)
    with logging_to_file(settings):
        logging.getLogger("farandole.test").info("a line")
    assert "INFO farandole.test: a line" in settings.log.read_text()


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs /dev/full")
def test_a_full_disk_silences_the_log_and_stops_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = NodeSettings(home=tmp_path)
    with logging_to_file(settings):
        handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
        (handler,) = (handler for handler in handlers if handler.baseFilename == str(settings.log))
        assert handler.stream is not None
        full = os.open(FULL_DISK, os.O_WRONLY)
        os.dup2(full, handler.stream.fileno())
        os.close(full)
        logging.getLogger("farandole.test").info("a line")
        logging.getLogger("farandole.test").info("another")
    assert "Traceback" not in capfd.readouterr().err


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="--home"), logging_to_file(NodeSettings(home=tmp_path / "file" / "home")):
        pass
