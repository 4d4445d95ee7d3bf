"""Programs with a training loop of their own, each in its own process, and the nodes that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from farandole.node.join.invites import own_invite
from farandole.node.own_loop.child_node import run_of_node

from ..patience import PATIENCE
from .daemons import Daemon

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@asynccontextmanager
async def loop(
    home: Path,
    *arguments: str,
    program: Sequence[str] = (str(EXAMPLE),),
    enter: Sequence[str] = (),
    listen: str = "/ip4/127.0.0.1/tcp/0",
    step_seconds: float = 0.05,
) -> AsyncIterator[Daemon]:
    """Run a program with a loop in its own process; ``home`` is its node's, if a node is running there.

    ``enter``: a command before it, which enters the place where it runs.
    """
    process = await trio.lowlevel.open_process(
        [*enter, sys.executable, "-W", "always", *program, *arguments],
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "FARANDOLE_HOME": str(home),
            "FARANDOLE_LISTEN": listen,
            "FARANDOLE_STEP_SECONDS": str(step_seconds),
            "FARANDOLE_HEARTBEAT_SECONDS": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see training.ranks.restarts_meet_the_dead
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Daemon(process, home)
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None and program[0] != str(EXAMPLE):
                process.terminate()  # torchrun then ends its ranks
                with trio.move_on_after(PATIENCE):
                    await process.wait()
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def node_of_a_loop(home: Path) -> AsyncIterator[Daemon]:
    """Yield the node that a loop has started in this folder; end it, whatever happens to the loop."""
    pid = None
    try:
        node = Daemon.__new__(Daemon)
        node.home = home
        pid = (await node.status()).pid
        yield node
    finally:
        if pid is not None and run_of_node(home):
            os.kill(pid, signal.SIGKILL)


async def invite_to(home: Path) -> str:
    return await trio.to_thread.run_sync(own_invite, home)


def ranks_of(torchrun: int) -> list[int]:
    """Return the processes started by torchrun, the first rank first."""
    return [int(pid) for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()]
