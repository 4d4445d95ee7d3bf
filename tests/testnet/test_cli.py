from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from farandole.node.base.exits import Exit

# A testnet command that has to clean up when it ends.
WAITING = """
import time
from farandole.node.cli import main
from farandole.testnet.cli import testnet_app

@testnet_app.command("wait")
def wait() -> None:
    try:
        print("begun", flush=True)
        time.sleep(600)
    finally:
        print("ended", flush=True)

main(["testnet", "wait"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM there ends a process without asking it")
@pytest.mark.parametrize("interrupt", ["SIG_IGN", "default_int_handler"])  # a shell's background, and its foreground
def test_a_benchmark_that_is_told_to_end_ends_what_it_has_begun(interrupt: str) -> None:
    code = f"import signal; signal.signal(signal.SIGINT, signal.{interrupt})\n{WAITING}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == "begun\n"
        # Python drops an interrupt that is raised in a finaliser, as each import has; people repeat it.
        for _ in range(6):
            bench.terminate()
            with suppress(subprocess.TimeoutExpired):
                bench.wait(10)
                break
        assert bench.returncode == Exit.INTERRUPTED
        assert bench.stdout.readline() == "ended\n"
