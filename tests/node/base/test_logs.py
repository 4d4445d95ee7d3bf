"""The log file, also on a disk that refuses writes, and standard output where it is not a terminal."""

from __future__ import annotations

import io
import logging
import os
import re
from pathlib import Path

import pytest

from farandole.node.base import logs
from farandole.node.base.identity import IdentityError
from farandole.node.base.logs import CONSOLE, MAX_ALIKE_PER_MINUTE, MAX_KINDS, Throttle, logging_to_file
from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.terminal import show_all_characters, without_controls
from farandole.node.daemon import run_daemon
from farandole.node.member.parts import Daemon
from farandole.protocol.wire.errors import FarandoleError

FULL_DISK = Path("/dev/full")


def test_a_terminal_that_has_not_all_characters_is_told_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="cp1252"))
    show_all_characters()
    logs.say("Zoë → 名")
    assert written.getvalue().decode("cp1252").rstrip().endswith("Zoë ? ?")


def test_what_a_terminal_obeys_is_replaced_and_all_else_is_kept() -> None:
    obeyed = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\udc80"]
    assert without_controls("".join(obeyed)) == "".join(letter if letter in "\n\t" else "\ufffd" for letter in obeyed)
    shown = "def f():\n\treturn 'na\u00efve \u20ac \u05d0 \U0001f468\u200d\U0001f469'"
    assert without_controls(shown) == shown


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "home" / "log").mkdir(parents=True)
    for home in (tmp_path / "file" / "home", tmp_path / "home"):
        with pytest.raises(IdentityError, match="--home"), logging_to_file(NodeSettings(home=home)):
            pass


def test_text_of_a_peer_neither_begins_a_line_nor_controls_a_terminal(tmp_path: Path) -> None:
    settings = NodeSettings(home=tmp_path)
    with logging_to_file(settings):
        try:
            raise ValueError("Zoë\n2026-01-01 INFO farandole: left\x1b[2J\x9b\u202e\x0c")
        except ValueError:
            logging.getLogger("farandole.test").exception("it says: %s", "Zoë\n2026-01-01 INFO farandole: left\x1b[2J")
    line, *lines = settings.log.read_text().splitlines()
    assert line.endswith(r"it says: Zoë\n2026-01-01 INFO farandole: left\x1b[2J")
    assert all(line.startswith("  ") for line in lines)
    assert lines[-2:] == ["  ValueError: Zoë", r"  2026-01-01 INFO farandole: left\x1b[2J\x9b\u202e\x0c"]


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


def record(
    message: str, *arguments: object, name: str = "farandole.node.mesh.connections", level: int = logging.INFO
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
    assert len(throttle._minutes) == MAX_KINDS


async def greet(daemon: Daemon) -> None:
    daemon.journal.say("hello")


async def fail(daemon: Daemon) -> None:
    raise FarandoleError("no member was found")


async def test_piped_lines_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await run_daemon(NodeSettings(home=tmp_path), greet)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  hello\n", capsys.readouterr().out)
    await run_daemon(NodeSettings(home=tmp_path), fail)
    assert capsys.readouterr().err == "error: no member was found\n"


def test_what_a_peer_says_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.say("Zoë says: \x1b[2J\x9b2J\u202e")
    logs.complain("error: \x1b]0;title\x07\x9b2J")
    told = capsys.readouterr()
    assert "Zoë says: " in told.out
    assert told.out == without_controls(told.out)
    assert told.err == without_controls(told.err)
