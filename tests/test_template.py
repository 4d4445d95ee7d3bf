"""A fork of the template has what a process that is started has."""

from __future__ import annotations

import json
import os
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
def test_a_fork_has_what_a_started_process_has(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['CUSTOM'] = 'yes'")
    with open(os.devnull) as kept:
        fork, started = both(
            monkeypatch,
            [sys.executable, *program, "about", "a word", "\u20ac"],
            input="text",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "A_NUMBER": "5", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(tmp_path)},
            pass_fds=[kept.fileno()],
            umask=0o27,
            start_new_session=True,
        )
    assert fork.returncode == started.returncode == 0
    (told, said), (expected, also_said) = ([*map(str, each.stdout.splitlines())] for each in (fork, started))
    assert json.loads(told) == json.loads(expected) | {"is fork": True}
    assert json.loads(expected)["is fork"] is False
    assert json.loads(expected)["environment"]["CUSTOM"] == "yes"
    assert said == also_said == "to the other stream"
