"""The log file, and a disk that does not take it."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest

from farandole.node.base.identity import IdentityError
from farandole.node.base.logs import (
    CONSOLE,
    MAX_ALIKE_PER_MINUTE,
    MAX_KINDS,
    Throttle,
    is_for_machines,
    logging_to_file,
)
from farandole.node.base.settings import LogFormat, NodeSettings
from farandole.node.base.system.terminal import show_all_characters
from farandole.node.ui.console import Console

FULL_DISK = Path("/dev/full")


@pytest.mark.parametrize(
    ("log_format", "at_terminal", "elsewhere", "in_file"),
    [("auto", False, True, True), ("human", False, False, False), ("json", True, True, True)],
)
def test_lines_are_for_people_or_for_machines(
    log_format: LogFormat, at_terminal: bool, elsewhere: bool, in_file: bool
) -> None:
    main, terminal = os.openpty()
    with open(main, "rb"), open(terminal, "w", encoding="utf-8") as shown, io.StringIO() as piped:
        found = [is_for_machines(log_format, where) for where in (shown, piped, None)]
    assert found == [at_terminal, elsewhere, in_file]


def test_systemds_journal_is_read_by_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w", encoding="utf-8") as journal, io.StringIO() as other:
        told = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{told.st_dev}:{told.st_ino}")
        assert not is_for_machines("auto", journal)
        assert is_for_machines("auto", other)


def test_a_terminal_that_has_not_all_characters_is_told_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="cp1252"))
    show_all_characters()
    Console(as_json=False).say("Zoë → 名")
    assert written.getvalue().decode("cp1252").rstrip().endswith("Zoë ? ?")


def test_lines_go_to_the_file(tmp_path: Path) -> None:
    settings = NodeSettings(home=tmp_path, log_format="human")
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


def record(
    message: str, *arguments: object, name: str = "farandole.node.mesh.connection", level: int = logging.INFO
) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, message, arguments, None)


def test_lines_that_differ_in_their_arguments_only_are_few_a_minute() -> None:
    now = 0.0
    throttle = Throttle(lambda: now)
    passed = [throttle.filter(record("%s broke it", number)) for number in range(1_000)]
    assert passed == [True] * MAX_ALIKE_PER_MINUTE + [False] * (1_000 - MAX_ALIKE_PER_MINUTE)
    assert throttle.filter(record("another thing"))
    now = 60.0
    again = record("%s broke it", 7)
    assert throttle.filter(again)
    assert again.getMessage() == f"7 broke it (and {1_000 - MAX_ALIKE_PER_MINUTE} more like this)"


def test_what_people_are_told_or_have_asked_for_is_not_kept_back() -> None:
    throttle = Throttle(lambda: 0.0)
    assert all(throttle.filter(record("%s", number, name=CONSOLE)) for number in range(100))
    assert all(throttle.filter(record("%s", number, level=logging.DEBUG)) for number in range(100))


def test_the_kinds_of_line_that_are_told_apart_are_bounded() -> None:
    throttle = Throttle(lambda: 0.0)
    for number in range(2 * MAX_KINDS):
        throttle.filter(record(f"kind {number}"))
    assert throttle.num_kinds == MAX_KINDS
