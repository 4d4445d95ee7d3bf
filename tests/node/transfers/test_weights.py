"""Which weights a newcomer takes, and from whom."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.errors import JoinError, PeerUnreachableError
from farandole.node.base.streams import DIAL_TIMEOUT
from farandole.node.transfers import receiver as downloads
from farandole.node.transfers.block_file import partial_path
from farandole.node.transfers.weights import MAX_ASKED, ROOM_INTERVAL, SEED_AFTER, WEIGHTS_RETRY, WEIGHTS_TIMEOUT
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, sign_index
from farandole.protocol.state.entries import CheckpointNotice

from .donors import ANN, BOB, CYD, DAN, EVE, World
from .files import KEY


async def test_a_full_disk_is_one_warning_before_any_peer_is_asked(world: World, clock: MockClock) -> None:
    world.hold(29, ANN)
    free, asked_when_full, told = 3_000_000, list[object](), list[str]()

    def disk_usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free)

    async def make_room() -> None:
        nonlocal free
        await trio.sleep(20 * ROOM_INTERVAL)
        asked_when_full.extend(world.asked)
        told.append(world.journal.disk)
        free = 10**12

    world.patch("shutil.disk_usage", disk_usage)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_room)
        await world.weights.obtain()
    assert not asked_when_full
    assert told[0].startswith("the disk has no room for the run's weights; free 64.")
    assert told[0].endswith("MB are needed, and 3.0 MB are free")
    assert len([line for line in world.said if "no room" in line]) == 1
    assert (world.journal.disk, world.is_fetched(ANN, 1, 29)) == ("", True)


async def test_a_checkpoint_that_two_hold_comes_from_both_if_none_is_newer(world: World, clock: MockClock) -> None:
    world.members = {BOB: 0}
    world.hold(28, CYD)
    world.hold(27, ANN, BOB)
    await world.weights.obtain()
    assert world.is_fetched(ANN, 1, 27)
    assert set(world.fetched_from[-1]) == {ANN, BOB}
    assert "weights of stage 1, of round 27 from" in "\n".join(world.said)
    world.settings.fetched(1).unlink()
    for peer, round_index in ((CYD, 33), (DAN, 34), (EVE, 33)):
        world.hold(round_index, peer)
    world.members = {CYD: 1, DAN: 1, EVE: 1, ANN: 1, BOB: 0}
    await world.begin().obtain()
    assert world.is_fetched(CYD, 1, 33)


async def test_a_download_that_was_begun_goes_before_newer_checkpoints(world: World, clock: MockClock) -> None:
    world.hold(29, ANN, BOB)
    world.hold(25, CYD)
    begun = sign_index(KEY, world.index(CYD, 1)).id
    partial_path(world.settings.fetched(1), begun).touch()
    await world.weights.obtain()
    assert world.is_fetched(CYD, 1, 25)


async def test_where_no_member_gives_weights_a_copy_does(world: World, clock: MockClock) -> None:
    world.members = {ANN: 1, BOB: 0, CYD: 2}
    world.by_peer = {(BOB, 1): (DAN, 20), (CYD, 1): (DAN, 25)}
    await world.weights.obtain()
    assert world.asked == [(ANN, 1), (CYD, 1)]
    assert world.is_fetched(DAN, 1, 25)


async def test_a_stage_that_nobody_has_begins_from_the_seed_with_a_loud_warning(world: World, clock: MockClock) -> None:
    world.members = {BOB: 0}
    began_at = trio.current_time()
    await world.weights.obtain()
    assert SEED_AFTER <= trio.current_time() - began_at <= SEED_AFTER + 5
    assert "NOBODY HAS THE WEIGHTS OF STAGE 1" in world.journal.warnings[-1]
    assert await world.weights.fetch_ahead(1)
    world.members = {ANN: 1}
    assert not await world.weights.fetch_ahead(1), "a member is ahead, and has announced nothing yet"


async def test_many_silent_members_do_not_keep_a_newcomer_for_hours_and_are_waited_for(
    world: World, clock: MockClock
) -> None:
    async def no_answer(*args: object) -> tuple[SignedIndex, Index]:
        await trio.sleep(DIAL_TIMEOUT)
        raise PeerUnreachableError("no answer")

    notice = CheckpointNotice(0, 1, bytes(32), 1, 1, 1)
    world.patch(downloads, "ask_for_index", no_answer)
    world.patch(world, "notices", lambda stage: {ANN: [notice]})  # so that it does not begin from the seed
    world.members = {bytes([1, number]) * 16: 1 for number in range(200)}
    began_at = trio.current_time()
    with pytest.raises(JoinError, match="step 4"):
        await world.weights.obtain()
    assert trio.current_time() - began_at <= WEIGHTS_TIMEOUT + MAX_ASKED * DIAL_TIMEOUT + WEIGHTS_RETRY
    world.members = {}
    assert not await world.weights.fetch_ahead(1), "somebody has announced weights"
