"""A daemon's standard output where it is not a terminal: a pipe, a file, a container's log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farandole.node.base.settings import NodeSettings
from farandole.node.base.system.terminal import without_controls
from farandole.node.daemon import run_daemon
from farandole.node.member.parts import Daemon
from farandole.node.ui import console
from farandole.protocol.wire.errors import FarandoleError


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
    console.say("Zoë says: \x1b[2J\x9b2J\u202e")
    console.complain("error: \x1b]0;title\x07\x9b2J")
    told = capsys.readouterr()
    assert "Zoë says: " in told.out
    assert told.out == without_controls(told.out)
    assert told.err == without_controls(told.err)
