"""Which weights a newcomer takes, and from whom; and what a node gives: saves, and its copy of another stage's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.errors import JoinError, PeerUnreachableError
from farandole.node.base.streams import DIAL_TIMEOUT
from farandole.node.store import disk_space
from farandole.node.transfers import receiver as downloads
from farandole.node.transfers.block_file import partial_path
from farandole.node.transfers.giver import FRESH_SAVE_TIMEOUT, PASS_OVER_SECONDS
from farandole.node.transfers.receiver import ANSWER_TIMEOUT, MAX_FRESH_SAVE, Fetched, fresh_save_timeout
from farandole.node.transfers.weights import MAX_ASKED, ROOM_INTERVAL, SEED_AFTER, WEIGHTS_RETRY, WEIGHTS_TIMEOUT
from farandole.protocol.checkpoints.block_transfer import BlockQuestion
from farandole.protocol.checkpoints.blocks import Index, SignedIndex, sign_index
from farandole.protocol.state.entries import RULES, CheckpointNotice, Kind
from farandole.protocol.trainer import trainer_messages as messages

from .donors import ANN, BOB, CYD, DAN, EVE, ME, World, content_of
from .files import KEY, RUN, hold, index_of


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


async def test_the_next_stages_newest_weights_are_kept_told_and_given(serving: World, clock: MockClock) -> None:
    serving.members = {BOB: 0}
    serving.hold(29, ANN, stage=2)
    await trio.sleep(30)
    assert serving.asked == [(ANN, 2)]
    assert serving.told == [(2, 29, True)]
    assert await serving.read(serving.weights, 2) == content_of(ANN, 2, 29)
    assert await serving.given(serving.weights, 0) is None
    serving.stage = 2  # it moves: its own copy is what it needs
    serving.members = {BOB: 0}
    await serving.weights.obtain()
    assert serving.is_fetched(ANN, 2, 29)
    serving.by_peer = {(BOB, 0): (BOB, 31)}
    await trio.sleep(30)
    assert {path.name[:6] for path in serving.settings.checkpoints.iterdir()} == {"copy-0"}


async def test_where_the_one_to_be_copied_does_not_answer_another_is_copied(serving: World, clock: MockClock) -> None:
    first, second = serving.two_to_copy()
    serving.silent = {first}
    await trio.sleep(60)
    assert serving.asked == [(first, 2), (second, 2)]
    assert serving.fetched_from == [(second,)]
    serving.silent = set()
    await trio.sleep(PASS_OVER_SECONDS)
    assert serving.fetched_from == [(second,), (first,)]


async def test_a_copy_outlives_its_node(nursery: trio.Nursery, world: World, clock: MockClock) -> None:
    world.hold(29, ANN, stage=2)
    nursery.start_soon(world.weights.provider.run)
    await trio.sleep(15)
    world.members = {}
    world.told.clear()
    again = world.begin()
    nursery.start_soon(again.provider.run)
    await trio.sleep(1)
    assert world.told == [(2, 29, True)]
    assert await world.read(again, 2) == content_of(ANN, 2, 29)
    nursery.cancel_scope.cancel()


async def test_a_copy_makes_room_for_text_that_was_tokenised_meanwhile(
    nursery: trio.Nursery, world: World, clock: MockClock
) -> None:
    world.settings = replace(world.settings, disk=100.0)
    world.hold(29, ANN, stage=2)
    weights = world.begin()
    nursery.start_soon(weights.provider.run)
    await trio.sleep(15)
    assert await world.given(weights, 2) is not None
    world.patch(disk_space, "used_bytes", lambda folder: 100 * 10**9)
    await trio.sleep(15)
    assert await world.given(weights, 2) is None
    assert list(world.settings.checkpoints.iterdir()) == []
    nursery.cancel_scope.cancel()


async def test_what_is_held_is_told_again_before_the_run_forgets_it(serving: World, clock: MockClock) -> None:
    serving.hold(29, ANN, stage=2)
    await trio.sleep(30)
    serving.members = {}  # the stage's only copy is this node's
    await trio.sleep(RULES[Kind.CHECKPOINT].ttl / 2)
    assert len(serving.told) >= 2
    assert set(serving.told) == {(2, 29, True)}


async def test_one_that_is_busy_is_copied_as_soon_as_it_is_not(serving: World, clock: MockClock) -> None:
    first, _ = serving.two_to_copy()
    serving.busy = {first}
    await trio.sleep(30)
    assert set(serving.asked) == {(first, 2)}
    serving.busy = set()
    await trio.sleep(30)
    assert serving.fetched_from == [(first,)]


async def test_copies_take_a_tenth_of_the_time_at_most(serving: World, clock: MockClock) -> None:
    serving.members = {ANN: 2}
    serving.seconds = 100.0
    for round_index in range(160):  # a newer one each time
        serving.by_peer = {(ANN, 2): (ANN, round_index)}
        await trio.sleep(50)
    assert 5 <= len(serving.fetched_from) <= 12


async def test_what_a_trainer_of_the_stage_before_saves_is_not_given(serving: World, clock: MockClock) -> None:
    content = content_of(ME, 1, 30)
    path, provider = serving.settings.checkpoints / "stage-1-round-30.safetensors", serving.weights.provider
    saved = messages.Saved(30, 1, 1, str(path), len(content), index_of(content).hashes)
    for stage, there, told in (
        (0, content, []),
        (1, content_of(ME, 1, 31), []),  # saved again in the same round
        (1, content, [(1, 30, False)]),
    ):
        path.write_bytes(there)
        provider.trainer_stage = stage
        provider.note_saved(saved)
        await trio.sleep(1)
        assert serving.told == told
    path.unlink()  # the trainer keeps two
    given = await serving.given(serving.weights, 1)
    assert given is not None
    assert given.read(0) == content
    assert await provider.find(BlockQuestion(RUN, 1, given.id)) is given
    assert await provider.find(BlockQuestion(RUN, 1, bytes(32))) is None


async def test_copies_that_break_off_leave_one_beginning(serving: World, clock: MockClock) -> None:
    begun: list[Path] = []

    async def break_off(*args: Any, **named: object) -> Fetched:
        _, signed, *_, path, _, _ = args
        await trio.lowlevel.checkpoint()
        begun.append(partial_path(path, signed.id))
        begun[-1].touch()
        raise PeerUnreachableError("the line is too slow")

    serving.patch(downloads, "fetch_checkpoint", break_off)
    serving.members = {ANN: 2}
    for round_index in range(5):
        serving.by_peer = {(ANN, 2): (ANN, round_index)}
        await trio.sleep(30)
    assert len(set(begun)) == 5
    assert list(serving.settings.checkpoints.iterdir()) == [begun[-1]]


async def test_within_a_limit_of_the_disk_there_is_no_room_for_stages_left_before(
    world: World, clock: MockClock
) -> None:
    world.round = 7
    world.settings = replace(world.settings, disk=1.0)
    for name in ("stage-0-round-7", "stage-1-round-7", "stage-2-round-7"):
        (world.settings.checkpoints / f"{name}.safetensors").write_bytes(content_of(ME, 1, 7))
    await world.begin().obtain()
    assert [path.stem for path in world.settings.checkpoints.iterdir()] == ["stage-1-round-7"]


@pytest.mark.parametrize(
    ("max_bytes", "rate", "seconds"),
    [
        (1_000, None, FRESH_SAVE_TIMEOUT),
        (2_000_000_000, None, FRESH_SAVE_TIMEOUT + 20),
        (2_000_000_000, 50e6, 0),  # a save takes 40 s: the newcomer gets the existing one
        (10**12, None, FRESH_SAVE_TIMEOUT + MAX_FRESH_SAVE),
    ],
)
async def test_a_save_for_a_newcomer_has_the_time_that_its_size_takes(
    max_bytes: int, rate: float | None, seconds: float, world: World, clock: MockClock
) -> None:
    """This node holds an old checkpoint, and its trainer does not save in time."""
    world.stage, provider = 0, world.weights.provider
    world.patch(disk_space.WeightFiles, "max_bytes", lambda files, stage: max_bytes)
    world.journal.update(round=1_000)
    provider._own.append(hold(world.settings.checkpoints / "old", content_of(ME, 0, 7)))
    provider.save_rate, began_at = rate, trio.current_time()
    assert await provider.find(BlockQuestion(RUN, 0)) is provider.newest
    with trio.fail_after(1):
        await provider.save_wanted()
    assert trio.current_time() - began_at == pytest.approx(seconds, abs=0.01)
    assert seconds < ANSWER_TIMEOUT + fresh_save_timeout(max_bytes), "a newcomer waits for longer"


async def test_the_rate_of_saves_is_measured(world: World) -> None:
    provider = world.weights.provider
    provider.note_saved(messages.Saved(7, 70, 700, "path", size=4_000))
    assert provider.save_rate is None
    provider.note_saved(messages.Saved(8, 80, 800, "path", size=4_000, seconds=2.0))
    assert provider.save_rate == 2_000
