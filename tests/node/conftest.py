from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from trio.testing import MockClock

from farandole.node.cli import main
from farandole.protocol.run.manifest import SignedManifest

from .small_runs import small_manifest, write_run, write_texts


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of small files to train on."""
    return write_texts(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> SignedManifest:
    """Write a small run to ``run.manifest``."""
    return write_run(tmp_path, small_manifest())


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    """Return virtual time that jumps to whatever is waited for."""
    return autojump_clock


Cli = Callable[..., tuple[int, str, str]]


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
def cli(capsys: pytest.CaptureFixture[str], home: Path) -> Cli:
    """Run a command in this process; return exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
