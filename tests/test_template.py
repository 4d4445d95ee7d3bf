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
@pytest.mark.parametrize("is_leader", [False, True])
def test_a_fork_has_what_a_started_process_has(
    program: list[str], is_leader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "A_NUMBER": "5", "PYTHONUNBUFFERED": "1"}
    with open(os.devnull) as kept:
        fork, started = both(
            monkeypatch,
            [sys.executable, *program, "about", "a word", "\u20ac"],
            input="text",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[kept.fileno()],
            umask=0o27,
            start_new_session=is_leader,
        )
    assert fork.returncode == started.returncode == 0
    (told, said), (expected, also_said) = ([*map(str, each.stdout.splitlines())] for each in (fork, started))
    about_fork, about_started = json.loads(told), json.loads(expected)
    assert (about_fork.pop("is fork"), about_started.pop("is fork")) == (True, False)
    assert about_fork == about_started
    assert said == also_said == "to the other stream"
    assert (about_fork["parent"], about_fork["mask"]) == (os.getpid(), 0o27)


@pytest.mark.parametrize("words", ["exit 3", "words", "abort", "raise", "interrupt", "child"])
def test_a_fork_ends_as_a_started_process_does(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = both(monkeypatch, [sys.executable, "-m", PROBE, *words.split()], capture_output=True)
    assert (fork.returncode, fork.stdout) == (started.returncode, started.stdout)
    assert fork.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_fork_leads_its_group_before_anybody_knows_its_number() -> None:
    command = [sys.executable, "-m", PROBE, "about"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_what_libraries_read_when_they_are_loaded_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "is_enabled", True)
    command = [sys.executable, "-m", PROBE, "about"]
    for variables, is_fork in (({"A_NUMBER": "5"}, True), ({"PYTHONHASHSEED": "1"}, False)):
        environment = {**os.environ, **variables}
        done = subprocess.run(command, input="", capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
        about = json.loads(done.stdout)
        assert variables.items() <= about["environment"].items()
        assert about["is fork"] == is_fork
