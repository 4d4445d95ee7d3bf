"""Real nodes with slow exchanges, so that faults can happen in the middle of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from pathlib import Path

import trio

from farandole.protocol.run.manifest import SignedManifest

from ...patience import PATIENCE
from ..daemons import POLL_INTERVAL, Daemon
from ..small_runs import small_manifest, write_run, write_text

ROUND_SECONDS = 2.0
EXCHANGE_SECONDS = 6.0
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
