"""Loops of members' own over real nodes: they exchange, are killed, come back, and end in good order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from farandole.node.join.own_invite import own_invite
from farandole.node.own_loop.child_node import run_of_node

from .daemons import Daemon, started

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@asynccontextmanager
async def loop(home: Path, *arguments: str) -> AsyncIterator[Daemon]:
    """The example's loop in a process of its own; ``home`` is its node's, if one is on there."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-W", "always", str(EXAMPLE), *arguments],
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "FARANDOLE_HOME": str(home),
            "FARANDOLE_LISTEN": "/ip4/127.0.0.1/tcp/0",
            "FARANDOLE_STEP_SECONDS": "0.05",
            "FARANDOLE_HEARTBEAT_SECONDS": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Daemon(process, home)
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@asynccontextmanager
async def node_of_a_loop(home: Path) -> AsyncIterator[Daemon]:
    """The node that a loop has started in this folder: it is ended, whatever becomes of the loop."""
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


async def test_two_loops_train_together_and_one_is_killed(tmp_path: Path) -> None:
    """Alice's loop starts its own node; Bob's attaches to one that is on, which outlives it."""
    run, bobs = tmp_path / "run", tmp_path / "bob"
    create = ("--create", str(run), "--round-seconds", "1", "--steps", "1000000")
    async with loop(tmp_path / "alice", *create) as alice:
        await alice.says("step 0, round 0")
        async with node_of_a_loop(run) as alices_node:
            invite = await invite_to(run)
            join = ("join", invite, "--trainer", "external", "--heartbeat-seconds", "1", "--step-seconds", "0.05")
            async with started(bobs, *join, "--checkpoint-seconds", "1") as node:
                await node.says("waiting for a loop to attach")
                async with loop(bobs, invite, "--steps", "1000000") as bob:
                    await bob.says("step 0")
                    await node.says("averaged with")
                    await alices_node.until(lambda status: status.exchanges_ok > 0)
                    async with loop(bobs, invite) as second:
                        await second.says("another loop is attached to this node")
                    await bob.end(signal.SIGKILL)
                await node.says("the loop is gone")
                await node.says("waiting for a loop to attach")
                async with loop(bobs, invite, "--steps", "1000000") as bob:
                    await node.says("trainer ready", "resumed at round")
                    await node.says("averaged with")
                    # Alice's loop is interrupted: its node leaves with it.
                    assert await alice.end(signal.SIGINT) != 0
                    assert not await trio.to_thread.run_sync(run_of_node, run)
                    # Bob's node leaves: his loop goes on by itself.
                    assert await node.end(signal.SIGTERM) == 0
                    await bob.says("this node trains no more")
                    await bob.says("loss", "0 members")


async def test_a_loop_whose_node_is_gone_fails_in_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with loop(tmp_path / "alice", "--create", str(run), "--steps", "1000000") as alice:
        await alice.says("step 0")
        async with node_of_a_loop(run) as node:
            os.kill((await node.status()).pid, signal.SIGKILL)
            await alice.says("NodeError: the node ended with exit code -9")


async def test_a_node_that_a_killed_loop_has_started_is_taken_over_and_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with loop(tmp_path / "alice", "--create", str(run), "--round-seconds", "1", "--steps", "1000000") as alice:
        await alice.says("step 0")
        await alice.end(signal.SIGKILL)
    async with node_of_a_loop(run) as node:
        pid = (await node.status()).pid
        async with loop(tmp_path / "alice", str(run), "--steps", "2") as again:
            await again.says("step 0")
            assert (await node.status()).pid == pid
            assert await again.process.wait() == 0
        assert not await trio.to_thread.run_sync(run_of_node, run)


async def test_a_loop_waits_while_its_node_rests(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with loop(tmp_path / "alice", "--create", str(run), "--round-seconds", "1", "--steps", "1000000") as alice:
        await alice.says("step 0")
        async with node_of_a_loop(run) as node:
            resting = await node.until(lambda status: status.round > 0)
            assert resting.trainer_pid == alice.process.pid
            await node.ask("pause")
            resting = await node.until(lambda status: status.phase == "paused")
            await node.ask("resume")
            await node.until(lambda status: status.phase == "training" and status.inner_steps > resting.inner_steps)


async def test_a_node_that_trains_by_itself_says_what_is_missing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with loop(tmp_path / "alice", "--create", str(run), "--steps", "1") as alice:
        assert await alice.process.wait() == 0
    async with started(
        tmp_path / "bob", "join", str(run / "start" / "manifest"), "--start", str(run / "start")
    ) as node:
        await node.says("--trainer external")
