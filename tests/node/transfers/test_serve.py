"""A donor respects its cap, and gives priority to its exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaper, Shaping
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.transfers import giver as giving
from farandole.node.transfers.giver import BlockService
from farandole.node.transfers.receiver import Conditions, fetch_checkpoint
from farandole.protocol.checkpoints.block_transfer import BLOCK_TIMEOUT, Want
from farandole.protocol.exchange.pipe import Route

from ..parties import Faults, MemoryStream
from .files import NOBODY, RUN, ToDonor, checkpoint_bytes, finder, hold, run_here
from .test_liars import QUESTION, say_in_pipe

CONTENT = checkpoint_bytes(100_000)  # 1.6 MB
RATE = 200_000.0


class Exchanging(ExchangeService):
    """An exchange service with an exchange until the time ``until``."""

    def __init__(self, until: float) -> None:
        self.until = until

    @property
    def is_exchanging(self) -> bool:
        return trio.current_time() < self.until

    async def wait_quiet(self) -> None:
        await trio.sleep_until(self.until)


@pytest.mark.parametrize("exchange_seconds", [0.0, 40.0, 4_000.0])
async def test_while_an_exchange_goes_on_blocks_get_a_tenth_of_the_time(
    tmp_path: Path,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    clock: MockClock,
    exchange_seconds: float,
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    holding = hold(tmp_path / "theirs", CONTENT)
    up = Shaper(RATE, trio.current_time)
    began_at = trio.current_time()
    conditions = Conditions(NOBODY, RUN, Shaping(up, Shaper()))
    service = BlockService(conditions, finder(holding), Exchanging(began_at + exchange_seconds))
    host: Any = ToDonor(nursery, service.serve)
    donors = [b"d" * 32]
    await fetch_checkpoint(
        Conditions(host, RUN), holding.signed, holding.index, lambda: donors, lambda name: True, tmp_path / "ours"
    )
    seconds = trio.current_time() - began_at
    assert (tmp_path / "ours").read_bytes() == CONTENT
    usual = len(CONTENT) / RATE
    left = max(0.0, usual - exchange_seconds / (1 + giving.REST))
    expected = exchange_seconds + left if left else usual * (1 + giving.REST)
    assert 0.8 * expected <= seconds <= 1.2 * expected + 1.0


async def test_who_takes_nothing_of_what_he_wants_is_left(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, clock: MockClock
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    holding = hold(tmp_path / "theirs", CONTENT)
    ours, theirs = trio.testing.lockstep_stream_pair()  # what one does not read, the other cannot send
    has_asked = trio.Event()

    async def want() -> None:
        for said in (QUESTION, say_in_pipe(Route(None, 0)), say_in_pipe(Want(0, 1))):
            await ours.send_all(said)
            await ours.receive_some()
        has_asked.set()

    nursery.start_soon(want)
    with trio.fail_after(2 * BLOCK_TIMEOUT):
        await BlockService(Conditions(NOBODY, RUN), finder(holding)).serve(MemoryStream(theirs, bytes(32), Faults()))
    assert has_asked.is_set()
