"""Plays of a benchmark are returned by name and in order, and end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from farandole.testnet.simulate.plays import play_all

from ...patience import PATIENCE

PROGRAM = """
import os, sys, time
from functools import partial
from pathlib import Path
from farandole.testnet.simulate.plays import play_all

def endless(name, folder):
    (folder / f"{name}-{os.getpid()}").touch()
    time.sleep(3600)

folder = Path(sys.argv[1])
play_all(print, [(name, partial(endless, name, folder)) for name in "ab"])
"""


def late(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_outcomes_are_in_the_order_of_the_plays() -> None:
    said: list[str] = []
    plays = [("x", partial(late, 0.5)), ("y", partial(late, 0.0)), ("x", partial(late, 0.1))]
    assert play_all(said.append, plays) == {"x": [0.5, 0.1], "y": [0.0]}
    assert said[-1].startswith("3 of 3 plays")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="whether a process runs is read as on Linux")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two plays at once need two cores")
def test_plays_end_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)]) as benchmark:
        give_up_at = time.monotonic() + PATIENCE
        while len(begun := list(tmp_path.glob("[ab]-*"))) < 2:
            assert benchmark.poll() is None
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        benchmark.send_signal(signal.SIGKILL)
    for play in begun:
        while is_running(int(play.name[2:])):
            assert time.monotonic() < give_up_at, f"{play.name} goes on"
            time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
