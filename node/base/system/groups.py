"""A child process that is ended together with the processes that it has started itself.

Where there are process groups it has one of its own, so Ctrl-C at the terminal does not reach it. On Windows its
children are not ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import trio


async def start_group(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> trio.Process:
    """Run ``python -m module *arguments`` with three pipes; the caller ends it with `end_group`. Raises `OSError`."""
    options: dict[str, Any] = {}
    if sys.platform == "win32":
        options["creationflags"] = subprocess.IDLE_PRIORITY_CLASS
    else:
        options["start_new_session"] = True
    return await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        **options,
    )


async def end_group(process: trio.Process) -> None:
    """Kill the process and its children if it still runs, and close its pipes; a cancelled caller waits for it."""
    if process.returncode is None:
        if sys.platform == "win32":
            process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    with trio.CancelScope(shield=True):
        await process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                await stream.aclose()
