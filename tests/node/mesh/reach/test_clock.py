"""Nodes compare their clocks, over real hosts on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio

from farandole.node.mesh.host import Host
from farandole.node.mesh.reach.dialback import ask_time, tell_time

from ....patience import PATIENCE
from ...hosts import host_at_loopback

NOON = 1_800_000_000.0


@contextlib.asynccontextmanager
async def open_pair() -> AsyncIterator[tuple[Host, Host]]:
    """Open the asker, and the witness, whose clock is at noon."""
    async with host_at_loopback() as asker, host_at_loopback() as witness:
        tell_time(witness, lambda: NOON)
        await asker.connect(witness.author, witness.addresses)
        with trio.fail_after(PATIENCE):
            yield asker, witness


async def test_a_clock_is_compared_to_within_half_the_round_trip() -> None:
    async with open_pair() as (asker, witness):
        offset = await ask_time(asker, witness.author, lambda: NOON + 3_600)
        assert offset.error < 5
        assert abs(offset.seconds - 3_600) <= offset.error + 0.001
