"""Forks of the template differ in nothing from processes that are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import template

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forks on Linux alone")

ROOT = Path(__file__).parents[1]
PROBE = "tests.process_probe"


def both(monkeypatch: pytest.MonkeyPatch, command: list[str], **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run a command as a fork, and as a started process."""
    completed = []
    for is_fork in (True, False):
        monkeypatch.setattr(template, "is_enabled", is_fork)
        completed.append(subprocess.run(command, check=False, cwd=ROOT, text=True, **options))
    return completed


@pytest.mark.parametrize(
    "program", [["-m", PROBE], ["-P", "tests/process_probe.py"], ["-u", "-W", "always", "-m", PROBE]]
)
def test_a_fork_has_what_a_started_process_has(program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as kept:
        fork, started = both(
            monkeypatch,
            [sys.executable, *program, "about", "a word", "\u20ac"],
            input="text",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "A_NUMBER": "5", "PYTHONUNBUFFERED": "1"},
            pass_fds=[kept.fileno()],
            umask=0o27,
            start_new_session=True,
        )
    assert fork.returncode == started.returncode == 0
    (told, said), (expected, also_said) = ([*map(str, each.stdout.splitlines())] for each in (fork, started))
    assert json.loads(told) == json.loads(expected) | {"is fork": True}
    assert json.loads(expected)["is fork"] is False
    assert said == also_said == "to the other stream"


@pytest.mark.parametrize("end", ["words", "abort", "raise", "interrupt"])
def test_a_fork_ends_as_a_started_process_does(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = both(monkeypatch, [sys.executable, "-m", PROBE, end], capture_output=True)
    assert (fork.returncode, fork.stdout) == (started.returncode, started.stdout)
    assert fork.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_fork_leads_its_group_before_anybody_knows_its_number() -> None:
    command = [sys.executable, "-m", PROBE, "about"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_what_libraries_read_when_they_are_loaded_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = both(
        monkeypatch,
        [sys.executable, "-m", PROBE, "about"],
        input="",
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert json.loads(fork.stdout) == json.loads(started.stdout)
