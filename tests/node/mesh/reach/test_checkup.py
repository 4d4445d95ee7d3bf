"""Checks between nodes of clocks, datagrams and speed, over real hosts on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.errors import PeerUnreachableError
from farandole.node.mesh.host import Host
from farandole.node.mesh.reach import checkup
from farandole.node.mesh.reach.checkup import MAX_AT_ONCE, CheckupService, ask_echo, ask_time, measure
from farandole.protocol.mesh.checkup import SPEED_SECONDS

from ....patience import PATIENCE
from ...hosts import host_at_loopback

NOON = 1_800_000_000.0


@contextlib.asynccontextmanager
async def open_pair(shaping: Shaping | None = None) -> AsyncIterator[tuple[Host, Host]]:
    """Open the asker, and the witness, whose clock is at noon."""
    async with (
        host_at_loopback() as asker,
        host_at_loopback() as witness,
    ):
        CheckupService(witness, shaping or Shaping(), lambda: NOON)
        await asker.connect(witness.author, witness.addresses)
        with trio.fail_after(PATIENCE):
            yield asker, witness


async def test_a_clock_is_compared_to_within_half_the_round_trip() -> None:
    async with open_pair() as (asker, witness):
        offset = await ask_time(asker, witness.author, lambda: NOON + 3_600)
        assert offset.error < 5
        assert abs(offset.seconds - 3_600) <= offset.error + 0.001


async def test_a_datagram_comes_back() -> None:
    async with open_pair() as (asker, witness):
        assert await ask_echo(asker, witness.author)


async def test_who_echoes_for_many_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "MAX_ECHOING", 0)
    async with open_pair() as (asker, witness):
        with pytest.raises(PeerUnreachableError, match="echoes nothing"):
            await ask_echo(asker, witness.author)


@pytest.mark.parametrize("is_up", [True, False])
async def test_a_capped_line_is_measured_as_it_is(is_up: bool) -> None:
    async with open_pair(Shaping.of_mbit(8, 8)) as (asker, witness):
        rate = await measure(asker, witness.author, is_up=is_up)
        assert 0 < rate < 8_000_000 / SPEED_SECONDS


async def test_nobody_measures_again_and_again() -> None:
    async with open_pair() as (asker, witness):
        for _ in range(MAX_AT_ONCE):
            assert await measure(asker, witness.author, is_up=False) > 0
        with pytest.raises(PeerUnreachableError, match="no time"):
            await measure(asker, witness.author, is_up=False)
