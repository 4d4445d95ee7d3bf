"""The owner's pauses, quiet hours and limits of traffic, by a test clock and calendar."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaping
from farandole.node.loop import rest_service as keeper_module
from farandole.node.loop.rest_service import Rest, RestService
from farandole.node.loop.traffic_service import (
    HEAD_START,
    MAX_AHEAD_SHARE,
    RESUME_SECONDS,
    WIRE_SHARE,
    Budget,
    TrafficService,
    Used,
)
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal
from farandole.node.status.status import TrafficStatus

from ...patience import PATIENCE

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


GB = 10**9
LIMIT = 100 * GB


class Story:
    """A node that counts its traffic, in a home that its next process finds again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.now = datetime(2026, 11, 1)

    @asynccontextmanager
    async def life(self, limit: int = LIMIT) -> AsyncIterator[Story]:
        self.rest, self.shaping = Rest(), Shaping()
        async with open_store(self.home / "store.sqlite") as store:
            self.keeper = TrafficService(limit, self.rest, store, self.shaping, lambda: self.now, Journal(print))
            await self.keeper.begin()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.keeper.run)
                yield self
                nursery.cancel_scope.cancel()

    @property
    def status(self) -> TrafficStatus:
        status = self.keeper.status()
        assert status is not None
        return status


async def test_without_a_budget_anything_goes(tmp_path: Path) -> None:
    async with Story(tmp_path).life(limit=0) as story:
        story.shaping.up.charge(10**15)
        assert story.keeper.may_spend(10**15)
        assert story.keeper.status() is None
        assert not story.keeper.is_spent


async def test_what_moves_counts_both_ways_and_in_the_next_life(tmp_path: Path) -> None:
    story = Story(tmp_path)
    async with story.life():
        story.shaping.up.charge(2 * GB)
        story.shaping.down.reserve(3 * GB)
        assert abs(story.status.used - 5 * GB * WIRE_SHARE) <= 2
        exact = story.status.used
    async with story.life():
        assert story.status.used == exact  # it ended properly
        story.now = datetime(2026, 12, 2)
        assert story.status.used == 0


async def test_bulk_waits_for_its_share_of_the_month(tmp_path: Path) -> None:
    async with Story(tmp_path).life() as story:
        assert story.keeper.may_spend(round(0.9 * HEAD_START * LIMIT))
        story.shaping.up.charge(round(HEAD_START * LIMIT))
        assert not story.keeper.may_spend(0)
        await story.keeper.look()
        assert not story.rest.is_on  # it trains on, alone
        assert story.status.is_saved
        story.now = datetime.fromtimestamp(story.status.resumes_at)
        assert story.keeper.may_spend(0)


async def test_a_stage_rests_meanwhile_and_says_until_when(tmp_path: Path) -> None:
    async with Story(tmp_path).life() as story:
        story.keeper.needs_traffic = True
        story.shaping.up.charge(round(0.12 * LIMIT))
        await story.keeper.look()
        assert "saving this month's 100 GB of traffic until" in story.rest.words
        story.now = datetime.fromtimestamp(story.status.resumes_at) - timedelta(minutes=10)
        await story.keeper.look()
        assert story.rest.is_on  # though more traffic is allowed by now: it does not flap
        story.now += timedelta(minutes=11)
        await story.keeper.look()
        assert not story.rest.is_on


async def test_at_its_end_the_node_is_offline_until_the_month_is_over(tmp_path: Path) -> None:
    story = Story(tmp_path)
    async with story.life():
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(story.keeper.wait_spent)
                await trio.testing.wait_all_tasks_blocked()
                story.shaping.up.charge(LIMIT)
        assert story.keeper.is_spent
        assert "100 GB of traffic are used up until Tue 01 Dec" in story.rest.words
    async with story.life():
        assert story.keeper.is_spent  # before anything was sent
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(story.keeper.wait_spent, False)
                await trio.testing.wait_all_tasks_blocked()
                story.now = datetime(2026, 12, 1)
        assert not story.rest.is_on


async def test_a_kill_never_forgets_and_adds_little(tmp_path: Path) -> None:
    story = Story(tmp_path / "alive")
    story.home.mkdir()
    async with story.life():
        for _ in range(20):
            story.shaping.up.charge(5 * 10**6)
            await story.keeper.look()
        used = story.status.used
        shutil.copytree(story.home, tmp_path / "killed")  # what is on the disk if it is killed now
    story.home = tmp_path / "killed"
    async with story.life():
        assert used <= story.status.used <= used + MAX_AHEAD_SHARE * LIMIT


NOVEMBER = datetime(2026, 11, 1)
DECEMBER = datetime(2026, 12, 1)


def budget(limit: int = 100 * GB, used: int = 0) -> Budget:
    return Budget(limit, Used(2026, 11, used))


def test_a_new_month_begins_anew_and_an_earlier_one_does_not() -> None:
    one = budget(used=99 * GB)
    one.count(0, NOVEMBER - timedelta(days=40))  # the clock was set back
    assert one.used == Used(2026, 11, 99 * GB)
    one.count(1000, DECEMBER)
    assert one.used == Used(2026, 12, round(1000 * WIRE_SHARE))
    assert one.end == datetime(2027, 1, 1)


def test_who_rests_until_there_is_some_has_an_hours_worth_then() -> None:
    one = budget(used=70 * GB)
    at = one.resumes_at()
    assert not one.may_spend(0, at - timedelta(seconds=1.1 * RESUME_SECONDS))
    hour = (1 - HEAD_START) * 100 * GB * RESUME_SECONDS / (DECEMBER - NOVEMBER).total_seconds()
    assert one.may_spend(round(0.99 * hour / WIRE_SHARE), at)
    assert not one.may_spend(round(1.01 * hour / WIRE_SHARE), at)


@given(
    st.integers(GB, 1000 * GB),
    st.lists(st.tuples(st.floats(1, 86_400), st.integers(0, 10 * GB), st.integers(0, 1000)), max_size=200),
)
def test_whoever_asks_first_never_moves_more_than_the_budget(limit: int, steps: list[tuple[float, int, int]]) -> None:
    """Bulk asks as greedily as possible; control does not ask, and takes less than its share."""
    one, now = budget(limit), NOVEMBER
    for seconds, bulk, control in steps:
        now = min(now + timedelta(seconds=seconds), DECEMBER - timedelta(seconds=1))
        if one.may_spend(bulk, now):
            one.count(bulk, now)
            assert one.used.num_bytes <= one.come_in(now) + 1
        one.count(control, now)
    assert one.used.num_bytes <= limit + len(steps) * 1_100
