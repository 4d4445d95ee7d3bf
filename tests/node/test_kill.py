"""The effect of one killed node of three, on averaging and on the member list. Prints its measurements."""

from __future__ import annotations

import signal
import statistics
import time
from pathlib import Path

import pytest
import trio

from .daemons import Daemon, joined
from .small_runs import small_manifest, write_run

ROUND_SECONDS, EXCHANGE_SECONDS = 1.0, 2.0
NUM_KILLS = 10


async def wait_until_gone(watcher: Daemon, peer_name: str) -> float:
    """Return the Unix time at which the watcher's member list no longer shows the peer as live."""
    while True:
        status = await watcher.ask("status")
        if not any(member["is_live"] for member in status["members"] if member["peer_id"].endswith(peer_name)):
            return time.time()
        await trio.sleep(0.02)


async def next_average(watcher: Daemon, partner_name: str, after: float) -> float:
    """Return the Unix time when the watcher's next committed exchange with the partner after ``after`` began."""
    while True:
        status = await watcher.ask("status")
        last = status["last_exchange"]
        if last and last["verdict"] == "committed" and last["partner"].endswith(partner_name):
            began_at = last["ended_at"] - last["seconds"]
            if began_at > after:
                return float(began_at)
        await trio.sleep(0.02)


@pytest.mark.soak
async def test_one_of_three_is_killed_again_and_again(tmp_path: Path, texts: Path) -> None:
    rounds = {"inner_steps": 0, "round_seconds": ROUND_SECONDS, "exchange_seconds": EXCHANGE_SECONDS}
    signed = write_run(tmp_path, small_manifest(rounds=rounds))
    data = ("--data", str(texts), "--slow", "3")
    averages, lists = [], []
    async with joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice:
        await alice.says("trainer ready")
        invite = alice.invite(signed.run_id)
        async with joined(tmp_path / "bob", invite, *data) as bob:
            await bob.says("averaged with", alice.name)
            for _ in range(NUM_KILLS):
                async with joined(tmp_path / "carol", invite, *data) as carol:
                    await carol.says("averaged with")
                    await alice.says("averaged with", carol.name)
                    await carol.end(signal.SIGKILL)
                    killed_at = time.time()
                    with trio.fail_after(60):
                        averages.append(await next_average(alice, bob.name, killed_at) - killed_at)
                        lists.append(await wait_until_gone(alice, carol.name) - killed_at)
                        lists.append(await wait_until_gone(bob, carol.name) - killed_at)
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
