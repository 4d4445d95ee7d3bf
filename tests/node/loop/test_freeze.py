"""Row 4 of the reliability goals: a node freezes in the middle of an exchange, and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from farandole.protocol.rounds.pairing import MAX_ROUNDS_BEHIND

from ..daemons import Daemon, joined
from .slow_exchanges import (
    EXCHANGE_SECONDS,
    ROUND_SECONDS,
    TRANSFER_SECONDS,
    both_or_neither,
    make_run,
    next_average,
    next_round,
)

BACK_WITHIN = 10.0
# Time that a busy machine needs for a round's other parts, and for its answers.
SLACK = 60.0


async def freeze(node: Daemon, seconds: float, others: Sequence[Daemon]) -> None:
    """Stop a node's processes in the middle of its next exchange, then resume them: the others soon see it as live."""
    status = await node.until(lambda status: status.phase == "exchanging")
    assert status.trainer_pid is not None
    pids = (node.process.pid, status.trainer_pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await trio.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    with trio.fail_after(BACK_WITHIN + SLACK):
        for other in others:
            await other.until(lambda status: status.run.members_live == 1 + len(others))


@pytest.mark.parametrize("lengths", [(10.0,), pytest.param((1.0, 100.0), marks=pytest.mark.soak)])
async def test_a_node_that_stands_still_costs_nobody_more_than_a_deadline(
    lengths: tuple[float, ...], tmp_path: Path
) -> None:
    signed, options = make_run(tmp_path)
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *options) as alice:
        await alice.says("listening on")
        invite = alice.invite(signed.run_id)
        async with (
            joined(tmp_path / "bob", invite, *options) as bob,
            joined(tmp_path / "carol", invite, *options) as carol,
        ):
            for node in (bob, alice, carol):
                await node.says("averaged with")
            for seconds in lengths:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(freeze, bob, seconds, (alice, carol))
                    for node in (alice, carol):
                        nursery.start_soon(keep_finishing_rounds, node, seconds)
                if seconds > 2 * MAX_ROUNDS_BEHIND * (ROUND_SECONDS + TRANSFER_SECONDS):
                    await bob.says("rounds behind the others: taking newer weights")
                await next_average(bob)
            await both_or_neither((alice, bob, carol))


async def keep_finishing_rounds(node: Daemon, seconds: float) -> None:
    """Assert that none of its rounds takes longer than its inner steps and the deadline of its exchange."""
    until_at = trio.current_time() + seconds + EXCHANGE_SECONDS
    while trio.current_time() < until_at:
        with trio.fail_after(1.5 * ROUND_SECONDS + EXCHANGE_SECONDS + SLACK):
            await next_round(node)
