"""Row 1 of the reliability goals: half of the nodes are killed in the middle of their exchanges."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import trio

from farandole.node.base.exits import Exit

from ..daemons import Daemon, joined
from .slow_exchanges import (
    TRANSFER_SECONDS,
    both_or_neither,
    for_each,
    make_run,
    next_average,
    next_round,
)

NEXT_ROUND_WITHIN, GONE_WITHIN = 30.0, 10.0
# Additional time that a busy machine may need.
SLACK = 60.0


async def kill_in_the_middle(victim: Daemon, rng: random.Random) -> None:
    """Kill the whole node, at a random point of its next exchange."""
    status = await victim.until(lambda status: status.phase == "exchanging")
    await trio.sleep(rng.uniform(0, TRANSFER_SECONDS))
    victim.process.kill()
    if status.trainer_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(status.trainer_pid, signal.SIGKILL)
    await victim.process.wait()


@pytest.mark.parametrize(("num_nodes", "num_times"), [(4, 1), pytest.param(16, 20, marks=pytest.mark.soak)])
async def test_half_of_the_nodes_are_killed_in_their_exchanges(num_nodes: int, num_times: int, tmp_path: Path) -> None:
    rng = random.Random(1)
    signed, options = make_run(tmp_path)
    async with AsyncExitStack() as stack:

        async def start(home: Path, source: str) -> Daemon:
            return await stack.enter_async_context(joined(home, source, *options))

        first = await start(tmp_path / "0", str(tmp_path / "run.manifest"))
        await first.says("listening on")
        invite = first.invite(signed.run_id)
        nodes = [first, *[await start(tmp_path / str(index), invite) for index in range(1, num_nodes)]]
        await for_each(nodes, lambda node: node.says("trainer ready"))
        were_killed: set[Path] = set()
        for _ in range(num_times):
            await for_each(nodes, lambda node: node.until(lambda status: status.run.members_live == num_nodes))
            await for_each(nodes, next_average)
            victims = rng.sample(nodes[num_nodes // 4 :], num_nodes // 2)  # the first quarter counts from the start
            were_killed |= {victim.home for victim in victims}
            survivors = [node for node in nodes if node not in victims]
            await for_each(victims, lambda victim: kill_in_the_middle(victim, rng))
            await check(survivors, 0.0 if num_times > 1 else SLACK)
            await both_or_neither([node for node in nodes if node.home not in were_killed])
            if num_times > 1:
                again = [await start(victim.home, invite) for victim in victims]
                await for_each(again, lambda node: node.says("trainer ready"))
                nodes = survivors + again
        await for_each(survivors, ends_well)


async def ends_well(node: Daemon) -> None:
    assert await node.end(signal.SIGTERM) == Exit.OK
    told = "\n".join(node.said) + (node.home / "log").read_text()
    assert not re.search("Traceback|out of turn", told)


async def check(survivors: Sequence[Daemon], slack: float) -> None:
    """Check that the survivors know that the others are gone, and go on as before."""
    killed_at = trio.current_time()

    async def notice(node: Daemon) -> None:
        with trio.fail_at(killed_at + GONE_WITHIN + slack):
            await node.until(lambda status: status.run.members_live == len(survivors))
        with trio.fail_at(killed_at + NEXT_ROUND_WITHIN + slack):
            await next_round(node)

    await for_each(survivors, notice)
    gone_on_after = trio.current_time() - killed_at
    await for_each(survivors, next_average)
    statuses = [await node.status() for node in survivors]
    assert not any(status.trainer_restarts for status in statuses)
    failed = sum(status.exchanges_failed for status in statuses)
    alone = sum(status.exchanges_alone for status in statuses)
    print(
        f"\nhalf of {2 * len(survivors)} nodes killed: {gone_on_after:.1f} s after the last, all others knew and were "
        f"in their next round; so far {failed} exchanges failed, {alone} rounds alone"
    )
