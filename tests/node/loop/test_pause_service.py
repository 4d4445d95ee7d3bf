"""The owner's pauses and quiet hours, by a test clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.loop import rest_service as keeper_module
from farandole.node.loop.rest_service import Rest, RestService
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal

MIDNIGHT = datetime(2026, 11, 23)


@asynccontextmanager
async def open_keeper(home: Path, *hours: str) -> AsyncIterator[tuple[RestService, Rest]]:
    """Open a keeper whose local time starts at Monday's midnight, and advances with trio's clock."""
    rest, began = Rest(), trio.current_time()
    async with open_store(home / "store.sqlite") as store:

        def local_time() -> datetime:
            return MIDNIGHT + timedelta(seconds=trio.current_time() - began)

        yield RestService(rest, store, hours, local_time, Journal(print)), rest


async def test_a_node_rests_in_its_quiet_hours(
    tmp_path: Path, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day with quiet hours, checked in the middle of each minute."""
    monkeypatch.setattr(keeper_module, "LOOK_INTERVAL", 20.0)
    changes: list[tuple[str, bool]] = []
    async with open_keeper(tmp_path, "09:00-12:30", "22:00-01:00") as (keeper, rest), trio.open_nursery() as nursery:
        await keeper.begin()
        assert rest.words == "quiet hours until Mon 01:00"
        nursery.start_soon(keeper.run)
        was_on = rest.is_on
        await trio.sleep(30)
        for minute in range(24 * 60):
            if rest.is_on != was_on:
                was_on = rest.is_on
                changes.append((f"{minute // 60:02}:{minute % 60:02}", was_on))
            await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert changes == [("01:00", False), ("09:00", True), ("12:30", False), ("22:00", True)]


async def test_the_owners_word_outlives_the_node(tmp_path: Path) -> None:
    async with open_keeper(tmp_path) as (keeper, rest):
        await keeper.begin()
        assert not rest.is_on
        await keeper.pause()
        assert "farandole resume" in rest.words
    async with open_keeper(tmp_path) as (keeper, rest):
        await keeper.begin()
        assert rest.is_on
        await keeper.resume()
        assert not rest.is_on
    async with open_keeper(tmp_path) as (keeper, rest):
        await keeper.begin()
        assert not rest.is_on
