"""A benchmark's processes end with it."""

from __future__ import annotations

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
