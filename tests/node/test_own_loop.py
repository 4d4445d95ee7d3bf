"""Users' own loops with real nodes: they exchange, are killed, come back, and end properly."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from farandole.node.own_loop.attachment import NodeError
from farandole.node.own_loop.child_node import run_of_node
from farandole.node.own_loop.noloco import NoLoCo

from .daemons import EXAMPLE, TORCHRUN, Daemon, loop, node_of_a_loop, ranks_of, started

ENDLESS = ("--round-seconds", "1", "--steps", "1000000")


@asynccontextmanager
async def node_for_a_loop(home: Path, invite: str) -> AsyncIterator[Daemon]:
    """Run a node to which a loop can attach."""
    settings = ("--heartbeat-seconds", "1", "--step-seconds", "0.05", "--checkpoint-seconds", "1")
    async with started(home, "join", invite, "--trainer", "external", *settings) as node:
        await node.says("waiting for a loop to attach")
        yield node


async def test_two_loops_train_together_and_one_is_killed(tmp_path: Path) -> None:
    """Alice's loop starts its own node; Bob's attaches to a running one, which outlives it."""
    run, bobs = tmp_path / "run", tmp_path / "bob"
    async with loop(tmp_path / "alice", "--create", str(run), *ENDLESS) as alice:
        await alice.says("step 0, round 0")
        async with node_of_a_loop(run) as alices_node:
            invite = await alices_node.own_invite()
            async with node_for_a_loop(bobs, invite) as node:
                async with loop(bobs, invite, "--steps", "1000000") as bob:
                    await bob.says("step 0")
                    await node.says("averaged with")
                    await alices_node.until(lambda status: status.exchanges_ok > 0)
                    async with loop(bobs, invite) as second:
                        await second.says("another loop is attached to this node")
                    await node.until(lambda _: any(bobs.glob("checkpoints/stage-*")))
                    await bob.end(signal.SIGKILL)
                await node.says("the loop is gone")
                await node.says("waiting for a loop to attach")
                async with loop(bobs, invite, "--steps", "1000000") as bob:
                    await node.says("trainer ready", "resumed at round")
                    await node.says("averaged with")
                    # Alice's loop is interrupted: its node leaves with it.
                    assert await alice.end(signal.SIGINT) != 0
                    assert not await trio.to_thread.run_sync(run_of_node, run)
                    # Bob's node leaves: his loop continues alone.
                    assert await node.end(signal.SIGTERM) == 0
                    await bob.says("this node trains no more")
                    await bob.says("loss", "0 members")


# Its inner steps take three quarters of an exchange's time, as on a machine with other work.
SLOW_LOOP = """
import sys, time, torch, farandole
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if sys.argv[1] == "run":
    farandole.create_run(model, "run", rounds={"round_seconds": 4, "exchange_seconds": 4})
with farandole.NoLoCo(model, optimizer, run=sys.argv[1], tokens_per_step=1):
    print("begins", flush=True)
    while True:
        model(torch.randn(4, 8)).square().mean().backward()
        time.sleep(3)
        optimizer.step()
"""


async def test_slow_steps_cost_no_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither partner fails an exchange because the other is in the middle of an inner step."""
    monkeypatch.chdir(tmp_path)
    async with loop(tmp_path / "alice", "run", program=("-c", SLOW_LOOP)) as alice:
        await alice.says("begins")
        async with (
            node_of_a_loop(tmp_path / "run") as node,
            loop(tmp_path / "bob", await node.own_invite(), program=("-c", SLOW_LOOP)) as bob,
        ):
            await bob.says("begins")
            async with node_of_a_loop(*(tmp_path / "bob" / "runs").iterdir()) as bobs:
                for each in (node, bobs):
                    status = await each.until(lambda status: status.exchanges_ok + status.exchanges_failed > 1)
                    assert status.exchanges_failed == 0


async def test_a_loop_whose_node_is_gone_fails_in_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with loop(tmp_path / "alice", "--create", str(run), "--steps", "1000000") as alice:
        await alice.says("step 0")
        async with node_of_a_loop(run) as node:
            os.kill((await node.status()).pid, signal.SIGKILL)
            await alice.says("NodeError: the node ended with exit code -9")


async def test_a_node_that_a_killed_loop_has_started_is_taken_over_and_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with loop(tmp_path / "alice", "--create", str(run), *ENDLESS) as alice:
        await alice.says("step 0")
        await alice.end(signal.SIGKILL)
    async with node_of_a_loop(run) as node:
        pid = (await node.status()).pid
        async with loop(tmp_path / "alice", str(run), "--steps", "2") as again:
            await again.says("step 0")
            assert (await node.status()).pid == pid
            assert await again.ends() == 0
        assert not await trio.to_thread.run_sync(run_of_node, run)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="ranks are found as Linux lists a process's children")
async def test_ranks_are_one_member_that_averages_with_a_plain_loop_and_comes_back_when_a_rank_is_lost(
    tmp_path: Path,
) -> None:
    run, bobs = tmp_path / "run", tmp_path / "bob"
    async with loop(tmp_path / "alice", "--create", str(run), *ENDLESS) as alice:
        await alice.says("step 0, round 0")
        async with node_of_a_loop(run) as alices_node:
            invite = await alices_node.own_invite()
            async with node_for_a_loop(bobs, invite) as node:
                program = (*TORCHRUN, "--max-restarts", "1", str(EXAMPLE.with_name("cluster.py")))
                async with loop(bobs, invite, "--steps", "1000000", program=program) as bob:
                    await node.says("averaged with")
                    status = await alices_node.until(lambda status: status.exchanges_ok > 0)
                    assert len([member for member in status.members if not member.has_left]) == 2, "two ranks are one"
                    await node.until(lambda _: any(bobs.glob("checkpoints/stage-*")))
                    os.kill(ranks_of(bob.process.pid)[1], signal.SIGKILL)
                    # The node's message depends on which is faster: the first rank reports that it has lost the second,
                    # or torchrun ends the first rank before that.
                    await node.says("waiting for the next one")
                    await node.says("trainer ready", "resumed at round")
                    await node.says("averaged with")
                    assert await node.end(signal.SIGTERM) == 0
                    await bob.says("this node trains no more")
                    await bob.says("loss", "0 members")


def test_a_rank_on_another_machine_than_the_node_says_whom_to_ask(tmp_path: Path) -> None:
    loop: Any = object.__new__(NoLoCo)
    loop._ranks = SimpleNamespace(is_leader=False)
    loop.home = tmp_path
    loop._member = SimpleNamespace(is_over=False)
    for ask in (loop.status, loop.invite, lambda: loop.members, lambda: loop.partner):
        with pytest.raises(NodeError, match="rank 0"):
            ask()
