"""The screen in a real terminal, with real daemons: Linux's pseudo-terminals."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from farandole.node.base.exits import Exit

from ....patience import PATIENCE
from ...daemons import joined
from ...small_runs import small_manifest, write_run, write_text

# A hang, not a duration.
# Makes the terminal at its standard output /dev/tty, and becomes the command.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
COMMAND = [sys.executable, "-m", "farandole.node", "status", "--watch"]


class Terminal:
    """A program on a terminal of 80 columns and 24 lines."""

    def __init__(self, process: subprocess.Popen[bytes], near: int) -> None:
        self.process = process
        self._near = near
        self._drawn = b""

    def shows(self, word: str) -> None:
        """Wait until the program has drawn this word, and forget all output before it."""
        deadline = time.monotonic() + PATIENCE
        while word.encode() not in self._drawn:
            assert time.monotonic() < deadline, f"no {word!r} in {self._drawn.decode(errors='replace')}"
            if select.select([self._near], [], [], 1.0)[0]:
                self._drawn += os.read(self._near, 65_536)
        self._drawn = b""

    def press(self, key: str) -> int:
        """Press a key that ends the program; return its exit code."""
        os.write(self._near, key.encode())
        drain = threading.Thread(target=self._drain, daemon=True)
        drain.start()
        code = self.process.wait(PATIENCE)
        drain.join()
        return code

    def _drain(self) -> None:
        while self.process.poll() is None:
            if select.select([self._near], [], [], 0.1)[0]:
                try:
                    os.read(self._near, 65_536)
                except OSError:  # the other end is closed
                    return


@contextmanager
def on_terminal(command: list[str]) -> Iterator[Terminal]:
    near, far = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, *command],
        stdin=far,
        stdout=far,
        stderr=far,
        env=environment,
        start_new_session=True,
    )
    os.close(far)
    try:
        yield Terminal(process, near)
    finally:
        process.kill()
        process.wait()
        os.close(near)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    write_text(tmp_path)
    write_run(tmp_path, small_manifest())
    return tmp_path / "run.manifest"


async def test_a_daemon_is_watched_while_it_trains_is_gone_and_comes_back(tmp_path: Path, manifest: Path) -> None:
    home, data = tmp_path / "alice", ("--data", str(tmp_path / "text.txt"))
    with on_terminal([*COMMAND, "--home", str(home)]) as terminal:
        await trio.to_thread.run_sync(terminal.shows, "no node runs in")
        async with joined(home, str(manifest), *data) as alice:
            await alice.says("round 1")
            await trio.to_thread.run_sync(terminal.shows, "training alone: there is no other live member")
            assert await alice.end(signal.SIGTERM) == Exit.OK
        await trio.to_thread.run_sync(terminal.shows, "the node does not answer; what is below is")
        async with joined(home, *data):
            await trio.to_thread.run_sync(terminal.shows, "the node was started anew")
        assert terminal.press("q") == Exit.OK


def test_where_there_is_no_terminal_it_names_the_lines_for_scripts(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--home", str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode, b"--json" in done.stderr) == (Exit.BAD_INPUT, True)
