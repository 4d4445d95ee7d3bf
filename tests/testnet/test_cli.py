"""Commands of testnet, and how shells complete all commands by the script of `farandole --show-completion`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from farandole.node.base.errors import Exit

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


PROGRAM = Path(sys.executable).with_name("farandole")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("farandole jo", ["join"]),
        ("farandole testnet compa", ["compare"]),
        ("farandole join --log-level w", ["warning"]),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None or not PROGRAM.exists(), reason="needs bash, and farandole installed")
def test_bash_completes(line: str, completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("a wrong file, which is not looked at")
    *words, last = line.split(" ")
    script = (
        'eval "$(_FARANDOLE_COMPLETE=source_bash farandole)"\n'
        f"COMP_WORDS=({' '.join([*words, repr(last)])}); COMP_CWORD={len(words)}\n"
        '_farandole_completion farandole; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "FARANDOLE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (result.stdout.split(), result.stderr) == (completed, "")
