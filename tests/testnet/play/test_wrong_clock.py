from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.testnet.play.wrong_clock import environment, set_clock

from ...patience import PATIENCE

SAY = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


@pytest.mark.usefixtures("faketime")
def test_a_clock_is_set_while_its_process_runs_and_time_outs_do_not_move(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAY],
        env={**os.environ, **environment(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def is_off_by(offset: float) -> bool:
            """Return whether the process's clock is off by ``offset``, and its monotonic clock is right."""
            assert process.stdin is not None
            assert process.stdout is not None
            before = time.time(), time.monotonic()
            process.stdin.write("?\n")
            unix, monotonic = map(float, process.stdout.readline().split())
            assert before[1] - 1.0 <= monotonic <= time.monotonic() + 1.0
            return before[0] - 1.0 <= unix - offset <= time.time() + 1.0

        assert is_off_by(0.0)
        for offset in (3_600.0, -30 * 86_400.0, 0.0):
            set_clock(tmp_path, offset)
            deadline = time.monotonic() + PATIENCE
            while not is_off_by(offset):  # until it has read the file again
                assert time.monotonic() < deadline
                time.sleep(0.1)
        process.stdin.close()
