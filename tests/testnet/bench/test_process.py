"""A benchmark's processes end with it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from farandole.testnet.bench.process import open_worker

DEAF = [sys.executable, "-c", "import time; time.sleep(1_000)"]


def test_an_interrupted_benchmark_kills_a_process_that_does_not_listen(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_worker("deaf", DEAF, tmp_path / "log") as worker:
        raise KeyboardInterrupt

    assert worker._process.returncode == -signal.SIGKILL


def test_what_a_process_has_started_is_killed_with_it(tmp_path: Path) -> None:
    """The child holds the other end of a pipe, which ends when both are gone."""
    reader, writer = os.pipe()
    starts_a_child = "import subprocess, sys; subprocess.Popen(sys.argv[1:-2], pass_fds=[int(sys.argv[-1])]).wait()"
    command = [sys.executable, "-c", starts_a_child, *DEAF]
    with open_worker("parent", command, tmp_path / "log", [writer]) as worker, open(reader, "rb") as pipe:
        os.close(writer)
        worker.kill()
        assert pipe.read() == b""
