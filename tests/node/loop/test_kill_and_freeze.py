"""Rows 1 and 4 of the reliability goals: nodes are killed, or freeze, in the middle of slow exchanges."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import combinations
from pathlib import Path

import pytest
import trio

from farandole.node.base.errors import Exit
from farandole.protocol.rounds.pairing import MAX_ROUNDS_BEHIND
from farandole.protocol.run.manifest import SignedManifest

from ...patience import PATIENCE
from ..daemons import POLL_INTERVAL, Daemon, joined, two_that_average
from ..small_runs import small_manifest, write_run, write_text

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


ROUND_SECONDS = 1.0
EXCHANGE_SECONDS = 4.0
# 206,000 bytes in each direction in a second and a half.
SIZE_OF_MODEL = {"num_layers": 1, "width": 64, "num_heads": 2, "hidden": 96, "context": 16, "vocabulary": 256}
UPLOAD_MBIT = "1"
TRANSFER_SECONDS = 1.5


def make_run(folder: Path) -> tuple[SignedManifest, list[str]]:
    """Return a run of slow exchanges, and the options with which each node is started."""
    rounds = {"inner_steps": 0, "round_seconds": ROUND_SECONDS, "exchange_seconds": EXCHANGE_SECONDS}
    signed = write_run(folder, small_manifest(model=SIZE_OF_MODEL, rounds=rounds))
    # A slowed trainer leaves the two cores of a small machine to the others.
    return signed, ["--data", str(write_text(folder)), "--upload-mbit", UPLOAD_MBIT, "--slow", "20", "--no-mdns"]


async def next_round(daemon: Daemon) -> None:
    """Wait until the node has finished its current round."""
    now = (await daemon.status()).round
    await daemon.until(lambda status: status.round > now)


async def next_average(daemon: Daemon) -> None:
    """Wait until the node has used one more partner's contribution."""
    now = (await daemon.status()).exchanges_ok
    await daemon.until(lambda status: status.exchanges_ok > now)


async def for_each(daemons: Sequence[Daemon], do: Callable[[Daemon], Awaitable[object]]) -> None:
    """Do something for all daemons at the same time."""
    async with trio.open_nursery() as nursery:
        for daemon in daemons:
            nursery.start_soon(do, daemon)


async def both_or_neither(daemons: Sequence[Daemon]) -> None:
    """Wait until the daemons agree on the number of exchanges among them in which both used the other's contribution.

    They go on exchanging, so one may already count an exchange that the other is about to count. If one used a
    contribution and the other did not, they never agree again. All must be in their first process, since they count
    from its start.
    """
    with trio.fail_after(PATIENCE):
        while True:
            statuses = [await daemon.status() for daemon in daemons]
            if all(
                one.partners.get(other.peer_id, 0) == other.partners.get(one.peer_id, 0)
                for one, other in combinations(statuses, 2)
            ):
                return
            await trio.sleep(POLL_INTERVAL)


BACK_WITHIN = 10.0


async def freeze(node: Daemon, seconds: float, other: Daemon) -> None:
    """Stop a node's processes in the middle of its next exchange, then resume them: the other soon sees it as live."""
    status = await node.until(lambda status: status.phase == "exchanging")
    assert status.trainer_pid is not None
    pids = (node.process.pid, status.trainer_pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await trio.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    with trio.fail_after(BACK_WITHIN + SLACK):
        await other.until(lambda status: status.run.members_live == 2)


@pytest.mark.parametrize("lengths", [(6.0,), pytest.param((1.0, 100.0), marks=pytest.mark.soak)])
async def test_a_node_that_stands_still_costs_nobody_more_than_a_deadline(
    lengths: tuple[float, ...], tmp_path: Path
) -> None:
    signed, options = make_run(tmp_path)
    async with two_that_average(tmp_path, signed.run_id, *options) as (alice, bob):
        for seconds in lengths:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(freeze, bob, seconds, alice)
                nursery.start_soon(keep_finishing_rounds, alice, seconds)
            if seconds > 2 * MAX_ROUNDS_BEHIND * (ROUND_SECONDS + TRANSFER_SECONDS):
                await bob.says("rounds behind the others: taking newer weights")
            await next_average(bob)
        await both_or_neither((alice, bob))


async def keep_finishing_rounds(node: Daemon, seconds: float) -> None:
    """Assert that none of its rounds takes longer than its inner steps and the deadline of its exchange."""
    until_at = trio.current_time() + seconds + EXCHANGE_SECONDS
    while trio.current_time() < until_at:
        with trio.fail_after(1.5 * ROUND_SECONDS + EXCHANGE_SECONDS + SLACK):
            await next_round(node)
