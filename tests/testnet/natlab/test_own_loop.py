"""Members' own training loops in two homes: they meet through one home's router, and recover from being killed."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

from farandole.node.status.status import NodeStatus
from farandole.testnet.natlab.lab import Lab

from ...node.daemons import Daemon
from ...node.loops import invite_to, loop, node_of_a_loop

FOR_EVER = ("--steps", "1000000")


def has_exchanged_since(exchanges: int, status: NodeStatus) -> bool:
    return status.exchanges_ok > exchanges


async def exchange_again(*nodes: Daemon) -> None:
    """Wait until each node has averaged with another once more."""
    for node in nodes:
        before = (await node.status()).exchanges_ok
        await node.until(partial(has_exchanged_since, before))


async def test_loops_in_two_homes_train_together_and_come_back_when_they_are_killed(lab: Lab, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    at_first, at_second = (
        partial(loop, enter=lab.add_home(kind).host.enter, listen="/ip4/0.0.0.0/tcp/0")
        for kind in ("open", "port-restricted")
    )
    async with at_first(first, "--create", str(first), "--round-seconds", "1", *FOR_EVER) as one:
        await one.says("step 0")
        async with node_of_a_loop(first) as node:
            invite = await invite_to(first)
            async with at_second(second, invite, *FOR_EVER) as other:
                await other.says("step 0")
                [home] = (second / "runs").iterdir()  # of the node that a loop starts for an invite
                async with node_of_a_loop(home) as others_node:
                    await exchange_again(node, others_node)
                    await other.end(signal.SIGKILL)
                    async with at_second(second, invite, *FOR_EVER) as other_again:
                        await other_again.says("step 0", "2 members")
                        await exchange_again(node, others_node)
                        await one.end(signal.SIGKILL)
                        async with at_first(first, str(first), *FOR_EVER) as one_again:
                            await one_again.says("step 0", "2 members")
                            await exchange_again(node, others_node)
                            assert await other_again.end(signal.SIGINT) != 0
                            assert await one_again.end(signal.SIGINT) != 0
