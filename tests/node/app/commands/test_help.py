"""The help of commands that take settings: options in panels, and one sentence on environment variables."""

from __future__ import annotations

import re

import pytest

from farandole.node.base.config.file import SETTINGS
from farandole.node.base.config.setting import PANELS
from farandole.node.base.exits import Exit

from .conftest import Run


def panels_of(run: Run, *command: str) -> dict[str, str]:
    """Return the text of each panel of a command's help, by title."""
    code, out, _ = run(*command, "--help")
    assert code == Exit.OK
    _, *parts = re.split(r"^╭─ (.+?) ─+╮$", out, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_each_setting_is_in_the_panel_of_its_definition(run: Run) -> None:
    panels = panels_of(run, "join")
    assert list(panels) == ["Arguments", "Options", *PANELS]
    for setting in SETTINGS:
        if setting.flag and not setting.is_hidden:
            flag = setting.flag.split("/")[0]
            assert [title for title, text in panels.items() if f"│ {flag} " in text] == [setting.panel], flag
    assert all(f"│ {flag} " in panels["Options"] for flag in ("--home", "--config", "--help"))


@pytest.mark.parametrize("command", ["join", "relay", "doctor"])
def test_one_sentence_says_how_variables_are_called(run: Run, command: str) -> None:
    out = run(command, "--help")[1]
    assert re.findall(r"FARANDOLE_\w+", out) == ["FARANDOLE_UPLOAD_MBIT"]
    assert "env var" not in out
