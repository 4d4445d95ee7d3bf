"""The effect of one killed node of three, on averaging and on the member list. Prints its measurements."""

from __future__ import annotations

import signal
import statistics
import time
from pathlib import Path

import pytest

from farandole.node.status.status import NodeStatus

from .daemons import Daemon, joined, two_that_average
from .small_runs import small_manifest, write_run

ROUND_SECONDS, EXCHANGE_SECONDS = 1.0, 2.0
NUM_KILLS = 10


async def next_average(watcher: Daemon, partner: str, after: float) -> float:
    """Return the Unix time when the watcher's next committed exchange with the partner after ``after`` began."""

    def began_at(status: NodeStatus) -> float:
        last = status.last_exchange
        is_theirs = last is not None and last.verdict == "committed" and last.partner.endswith(partner)
        return last.ended_at - last.seconds if last is not None and is_theirs else 0.0

    return began_at(await watcher.until(lambda status: began_at(status) > after))


async def seconds_until_gone(watcher: Daemon, peer: str, since: float) -> float:
    """Return the seconds until the watcher's member list no longer shows the peer as live."""
    await watcher.until(lambda status: not any(each.is_live and each.peer_id.endswith(peer) for each in status.members))
    return time.time() - since


@pytest.mark.soak
async def test_one_of_three_is_killed_again_and_again(tmp_path: Path, texts: Path) -> None:
    rounds = {"inner_steps": 0, "round_seconds": ROUND_SECONDS, "exchange_seconds": EXCHANGE_SECONDS}
    signed = write_run(tmp_path, small_manifest(rounds=rounds))
    data = ("--data", str(texts), "--slow", "3")
    averages, lists = [], []
    async with two_that_average(tmp_path, signed.run_id, *data) as (alice, bob):
        for _ in range(NUM_KILLS):
            async with joined(tmp_path / "carol", alice.invite(signed.run_id), *data) as carol:
                await carol.says("averaged with")
                await alice.says("averaged with", carol.name)
                await carol.end(signal.SIGKILL)
                killed_at = time.time()
                averages.append(await next_average(alice, bob.name, killed_at) - killed_at)
                lists += [await seconds_until_gone(each, carol.name, killed_at) for each in (alice, bob)]
    deadline = ROUND_SECONDS + EXCHANGE_SECONDS
    print(
        f"\nkill -9 of one of three, {NUM_KILLS} times; rounds of {ROUND_SECONDS:g} s, "
        f"exchanges of at most {EXCHANGE_SECONDS:g} s: "
        f"the survivors' next averaging began after {statistics.median(averages):.2f} s in the median, "
        f"{max(averages):.2f} s at most (their deadline: {deadline:g} s); "
        f"the member list was right after {statistics.median(lists):.2f} s, {max(lists):.2f} s at most"
    )
    assert max(averages) <= deadline + 2.0
    assert max(lists) <= 10.0
