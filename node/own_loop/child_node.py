"""A node that a user's loop starts: `farandole join` in a process of its own, which leaves when the loop ends.

It outlives a loop that is killed, for `farandole.node.daemon.LINGER_SECONDS`, so that the next one continues
with it, and ends it. A loop never ends a node that a person has started, nor one to which it was never attached:
another loop may train there.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from farandole.protocol.wire.errors import FarandoleError

from ..base.control import call
from ..base.identity import is_locked, keep_private, make_home
from ..base.settings import NodeSettings
from ..trainer.script import has_started

# Leaving: the farewell is gossiped. A trainer that saves too has `farandole.node.member.run_member.MAX_LEAVE_TIMEOUT`.
LEAVE_SECONDS: Final = 60.0
KILL_SECONDS: Final = 5.0
# A node that has its folder's lock reads its store and gets its port before it answers.
START_SECONDS: Final = 60.0
# Interval of checks whether a node that an earlier loop started is gone, or one that starts answers.
LOOK_SECONDS: Final = 0.2
# The node's output, for people; its log is next to it.
OUTPUT_NAME: Final = "output"
# Of an error in a box: its heading and its text.
_BOXED_LINES: Final = 3
_MAX_QUOTED_BYTES: Final = 2_000


def status_of(home: Path) -> dict[str, Any]:
    """Return the status of the node that runs in this folder, without members; empty if none answers."""
    answer: dict[str, Any] = {}
    with contextlib.suppress(FarandoleError):
        answer = call(home, "status", max_members=0)
    return answer


def run_of_node(home: Path) -> str:
    """Return the run id of the node that runs in this folder, in hexadecimal; empty if none runs there."""
    return str(status["run"]["run_id"]) if (status := status_of(home)) else ""


def await_node(home: Path) -> str:
    """Return `run_of_node`; if a node is starting in this folder, once it answers, for `START_SECONDS` at most."""
    deadline = time.monotonic() + START_SECONDS
    lock = NodeSettings(home=home).lock
    while not (run_id := run_of_node(home)) and is_locked(lock) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)  # in the loop's own thread, before anything trains
    return run_id


class ChildNode:
    """The node in ``home``, started here or found there."""

    def __init__(self, home: Path, join: Sequence[str]) -> None:
        """``join``: arguments of ``farandole join`` in addition to the folder."""
        self.door = NodeSettings(home=home).door
        """The node's socket for a loop."""
        self.home = home
        self.was_attached = False
        """Whether the loop of this process was attached to it."""
        self._mark, self._output = NodeSettings(home=home).started_by_loop, home / OUTPUT_NAME
        self._join = join
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the node, unless one runs or starts there."""
        await_node(self.home)
        if status_of(self.home):
            return
        make_home(self.home)
        keep_private(self.home)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "farandole.node", "join", *self._join, "--home", str(self.home)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for the loop, which ends the node
            )
        with self._mark.open("a") as mark:
            mark.write(f"{self._process.pid}\n")

    def why_gone(self) -> tuple[str, bool]:
        """While the node does not listen, return why it never will, if that is known, and whether it is starting."""
        if self._process is None:
            return "", False
        if self._process.poll() is None:
            return "", True
        printed = self._output.read_bytes()[-_MAX_QUOTED_BYTES:].decode(errors="replace")
        lines = [words for line in printed.splitlines() if (words := line.strip("─│╭╮╰╯ "))]
        is_boxed = "╰" in printed  # a flag that it does not know, in a box of several lines
        last = " ".join(lines[-_BOXED_LINES:] if is_boxed else lines[-1:])
        code = self._process.returncode
        return f"the node ended with exit code {code}: {last}; its output is in {self._output}", False

    def end(self) -> None:
        """Make a node leave that this loop has started, or an earlier one if this one `was_attached`, and wait."""
        if self._process is None:
            is_ours = self.was_attached and has_started(self._mark, status_of(self.home).get("pid"))
        else:  # one that is over may have left the folder to another loop's
            is_ours = self._process.poll() is None
        if not is_ours:
            return
        with contextlib.suppress(FarandoleError):
            call(self.home, "leave")
        if self._process is None:
            deadline = time.monotonic() + LEAVE_SECONDS
            while status_of(self.home) and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)  # it is no child of this process, so there is nothing to wait on
        else:
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LEAVE_SECONDS)
                self._process.terminate()  # a second request to leave means now; nothing, if it is over
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(KILL_SECONDS)
            finally:  # interrupted, too
                self._process.kill()  # nothing, if it is over
                self._process.wait()
        self._mark.unlink(missing_ok=True)
