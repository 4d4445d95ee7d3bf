"""Weights that a newcomer does not take: unfit, false, or unlike other members'."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.errors import JoinError
from farandole.node.transfers import sketches as comparing
from farandole.node.transfers.weights import CONTACT_INTERVAL, CONTACT_TIMEOUT, DISPUTED_AFTER
from farandole.protocol.wire.safetensors import encode_header

from ..hosts import hang
from .donors import ANN, BOB, CYD, DAN, ME, World, content_of


def refuse(world: World) -> None:
    """Do what the trainer does with a file that it judges unfit."""
    world.settings.fetched(1).unlink()


async def test_the_author_of_unfit_weights_is_not_believed_and_another_is_asked(world: World, clock: MockClock) -> None:
    world.hold(29, ANN)
    world.hold(28, BOB)
    await world.weights.obtain()
    assert world.is_fetched(ANN, 1, 29)
    refuse(world)
    await world.weights.obtain()
    assert "the weights of round 29 are unfit" in "\n".join(world.said)
    assert not world.is_believed(world.index(ANN, 1).author)
    assert world.is_fetched(BOB, 1, 28)


async def test_weights_that_were_taken_up_cost_nobody_its_credit(world: World, clock: MockClock) -> None:
    world.hold(29, ANN)
    await world.weights.obtain()
    world.settings.fetched(1).replace(world.settings.checkpoints / "stage-1-round-29.safetensors")
    await world.weights.obtain()
    assert world.is_believed(world.index(ANN, 1).author)


@pytest.mark.parametrize("come_back", [True, False])
async def test_a_newcomer_whose_members_fall_silent_waits_for_them(
    world: World, clock: MockClock, come_back: bool
) -> None:
    world.hold(29, ANN)
    world.hold(28, BOB)
    await world.weights.obtain()
    refuse(world)
    members, world.members, world.round = world.members, {}, 0
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.weights.obtain)
        await trio.sleep(5.0)
        if come_back:
            world.members, world.round = members, 30
    assert world.is_fetched(BOB, 1, 28) == world.settings.fetched(1).exists() == come_back
    assert trio.current_time() - began_at <= CONTACT_TIMEOUT + CONTACT_INTERVAL


async def test_who_claims_to_be_ahead_and_gives_nothing_is_not_believed_again(world: World, clock: MockClock) -> None:
    own = world.settings.checkpoints / "stage-1-round-5.safetensors"
    own.write_bytes(content_of(ME, 1, 5))
    world.members = {ANN: 1, BOB: 1}
    world.silent = {ANN, BOB}
    await world.weights.obtain()
    assert "going on with this node's own of round 5" in world.journal.warnings[-1]
    assert not world.is_believed(ANN)
    assert world.donors(0, 1) == []


async def test_a_file_of_another_round_than_its_index_is_not_taken(world: World, clock: MockClock) -> None:
    world.hold(29, ANN)
    index = world.index
    world.patch(world, "index", lambda peer, stage: msgspec.structs.replace(index(peer, stage), round=28))
    world.patch("farandole.node.transfers.weights.WEIGHTS_TIMEOUT", 10.0)
    with pytest.raises(JoinError, match="step 4"):
        await world.weights.obtain()
    assert "lied about the round" in "\n".join(world.said)
    assert not world.settings.fetched(1).exists()


# Compared with other members' weights


RNG = np.random.default_rng(1)
LEARNT = RNG.standard_normal(1_000, np.float32)


def honest() -> np.ndarray:
    """Return an honest replica's weights, some percent away from the others'."""
    return LEARNT + np.float32(0.05) * noise()


def noise() -> np.ndarray:
    return RNG.standard_normal(1_000, np.float32)


def file_of(weights: np.ndarray, round_index: int = 29) -> bytes:
    header = encode_header({"round": str(round_index)}, [("slow/w", (1_000,)), ("momentum/w", (1_000,))])
    return header + 2 * weights.astype("<f4").tobytes()


def hold_alike(world: World, poisoned: Collection[bytes], honest_ones: Collection[bytes]) -> None:
    """Add members of stage 1 with weights: the poisoned all have the same noise, and are one round ahead."""
    poison = file_of(noise(), 30)
    world.hold(30, *poisoned)
    world.weights_of |= dict.fromkeys(poisoned, poison)
    for peer in honest_ones:
        world.hold(29, peer)
        world.weights_of[peer] = file_of(honest())


async def test_a_stages_poison_that_two_hold_is_refused_and_its_author_doubted(world: World, clock: MockClock) -> None:
    hold_alike(world, [ANN, BOB], [CYD, DAN])
    await world.weights.obtain()
    assert "from most others' weights" in world.journal.warnings[0]
    assert world.fetched_from[0] == (ANN, BOB), "what two hold comes first"
    assert any(world.is_fetched(peer, 1, 29) for peer in (CYD, DAN))
    assert not world.is_believed(ANN)
    assert world.is_believed(CYD)
    assert ANN not in world.compared_with[:2], "who holds a checkpoint does not judge it"


async def test_where_two_disagree_one_is_taken_unless_others_come(
    world: World, clock: MockClock, nursery: trio.Nursery
) -> None:
    """A liar can neither discredit an honest member nor keep newcomers out of a run of two."""
    hold_alike(world, [ANN], [BOB])
    began_at = trio.current_time()
    await world.weights.obtain()
    assert trio.current_time() - began_at > DISPUTED_AFTER
    assert len(world.fetched_from) == 3, "each once before that, and one again"
    assert all("the one member that answered" in line for line in world.journal.warnings)
    assert all(world.is_believed(peer) for peer in (ANN, BOB))
    assert sum((world.is_fetched(ANN, 1, 30), world.is_fetched(BOB, 1, 29))) == 1
    world.settings.fetched(1).unlink()

    async def come() -> None:
        await trio.sleep(DISPUTED_AFTER / 2)
        hold_alike(world, [], [CYD, DAN])

    nursery.start_soon(come)
    await world.begin().obtain()
    assert any(world.is_fetched(peer, 1, 29) for peer in (BOB, CYD, DAN))


async def test_where_no_member_answers_weights_are_taken_with_a_warning(world: World, clock: MockClock) -> None:
    hold_alike(world, [ANN], [])
    await world.weights.obtain()
    assert world.is_fetched(ANN, 1, 30)
    (said,) = [line for line in world.said if "not compared with another member's: there is none" in line]
    assert not said.startswith("warning")
    world.settings.fetched(1).unlink()
    world.hold(20, BOB)
    await world.begin().obtain()
    assert any("none of 1 members answered" in line for line in world.said)


async def test_what_was_not_compared_is_not_used_in_the_next_life(world: World, clock: MockClock) -> None:
    hold_alike(world, [ANN], [BOB, CYD])
    world.patch(comparing, "ask_for_sketch", hang)
    with trio.move_on_after(5.0):
        await world.weights.obtain()
    assert len(world.fetched_from) == 1
    assert not world.settings.fetched(1).exists()


async def test_a_newcomer_does_not_wait_long_for_members_that_say_nothing(world: World, clock: MockClock) -> None:
    hold_alike(world, [], [ANN, BOB])
    world.patch(comparing, "ask_for_sketch", hang)
    began_at = trio.current_time()
    await world.weights.obtain()
    assert trio.current_time() - began_at < comparing.COMPARISON_TIMEOUT + 2
    assert comparing.COMPARISON_TIMEOUT <= 60
