from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.node.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a node, without any settings from this machine's environment."""
    for name in os.environ:
        if name.startswith("FARANDOLE_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("FARANDOLE_HOME", str(folder))
    monkeypatch.setenv("COLUMNS", "200")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], home: Path) -> Run:
    """Run a command in this process; return exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
