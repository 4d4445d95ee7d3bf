from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import pytest

from farandole.node.base.exits import Exit

# Modules that take longer than the tenth of a second in which help must appear.
HEAVY = {"torch", "libp2p", "numpy", "trio", "cryptography", "transformers", "zeroconf", "asyncio"}


@pytest.mark.parametrize("line", ["--help", "join --help", "testnet run --help", "config show"])
def test_help_and_settings_need_nothing_heavy(line: str) -> None:
    code = (
        "import sys\n"
        "from farandole.node.cli import main\n"
        "try:\n"
        f"    main({line.split()!r})\n"
        "except SystemExit:\n"
        f"    print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


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
