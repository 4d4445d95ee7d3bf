"""Real nodes whose exchanges last, so that something can befall them in the middle of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from pathlib import Path

import trio

from farandole.protocol.manifest import SignedManifest

from ...patience import PATIENCE
from ..daemons import POLL_INTERVAL, Daemon
from ..small_runs import small_manifest, write_run, write_text

ROUND_SECONDS = 2.0
EXCHANGE_SECONDS = 6.0
# 206,000 bytes each way in a second and a half.
SIZE_OF_MODEL = {"num_layers": 1, "width": 64, "num_heads": 2, "hidden": 96, "context": 16, "vocabulary": 256}
UPLOAD_MBIT = "1"
TRANSFER_SECONDS = 1.5


def make_run(folder: Path) -> tuple[SignedManifest, list[str]]:
    """A run of slow exchanges, with what each node is started with."""
    rounds = {"inner_steps": 0, "round_seconds": ROUND_SECONDS, "exchange_seconds": EXCHANGE_SECONDS}
    signed = write_run(folder, small_manifest(model=SIZE_OF_MODEL, rounds=rounds))
    # A trainer that rests leaves the two cores of a small machine to the others.
    return signed, ["--data", str(write_text(folder)), "--upload-mbit", UPLOAD_MBIT, "--slow", "20", "--no-mdns"]


async def next_round(daemon: Daemon) -> None:
    """Until it has finished the one that it is in."""
    now = (await daemon.status()).round
    await daemon.until(lambda status: status.round > now)


async def next_average(daemon: Daemon) -> None:
    """Until it has used the contribution of one more partner."""
    now = (await daemon.status()).exchanges_ok
    await daemon.until(lambda status: status.exchanges_ok > now)


async def for_each(daemons: Sequence[Daemon], do: Callable[[Daemon], Awaitable[object]]) -> None:
    """At the same time."""
    async with trio.open_nursery() as nursery:
        for daemon in daemons:
            nursery.start_soon(do, daemon)


async def both_or_neither(daemons: Sequence[Daemon]) -> None:
    """Until they agree, of all exchanges among themselves, in how many both used the other's contribution.

    They exchange meanwhile, so one may count what the other is about to. Where one used a contribution and the other
    did not, they never agree again. All are in their first life, from which they count.
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
