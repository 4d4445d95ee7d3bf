"""Weights that a newcomer refuses: unfit, false, or unlike other members', whose sketches it asks for."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.errors import JoinError, PeerUnreachableError
from farandole.node.transfers import sketches as comparing
from farandole.node.transfers import sketches as sketching
from farandole.node.transfers.giver import Holding
from farandole.node.transfers.sketches import PEER_BURST, REST, SketchService, ask_for_sketch
from farandole.node.transfers.weights import CONTACT_INTERVAL, CONTACT_TIMEOUT, DISPUTED_AFTER
from farandole.protocol.checkpoints.sketches import SKETCH_PROTOCOL, SketchQuestion, encode_answer, values_of
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.safetensors import encode_header

from ...patience import PATIENCE
from ..hosts import hang, host_at_loopback
from .donors import ANN, BOB, CYD, DAN, ME, World, content_of
from .files import RUN, ToDonor, hold


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


WEIGHTS = np.random.default_rng(1).standard_normal(600_000, np.float32)
CONTENT = encode_header({}, [("slow/w", WEIGHTS.shape), ("momentum/w", WEIGHTS.shape)]) + 2 * WEIGHTS.tobytes()
SEED = b"s" * 32
QUESTION = SketchQuestion(RUN, 0, SEED)


def finding(holding: Holding) -> Callable[[int], Awaitable[Holding | None]]:
    """Return a member's lookup with one checkpoint, of stage 0."""

    async def find_own(stage: int) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return holding if stage == 0 else None

    return find_own


async def test_a_members_sketch_is_that_of_its_file(tmp_path: Path) -> None:
    holding = hold(tmp_path / "theirs", CONTENT)
    async with host_at_loopback() as newcomer, host_at_loopback() as member:
        SketchService(member, RUN, finding(holding))
        newcomer.dialler.add_addresses(member.author, member.addresses)
        with trio.fail_after(PATIENCE):
            sketch = await ask_for_sketch(newcomer, member.author, QUESTION)
            assert sketch == values_of(await sketching.sketch_file(holding, SEED))
            assert await ask_for_sketch(newcomer, member.author, SketchQuestion(RUN, 0, b"t" * 32)) != sketch
            assert await ask_for_sketch(newcomer, member.author, SketchQuestion(RUN, 1, SEED)) is None
            assert await ask_for_sketch(newcomer, member.author, SketchQuestion(b"x" * 32, 0, SEED)) is None


@pytest.mark.parametrize("lie", [b"", b"\xc1", encode_answer(b"short"), encode_answer(b"\xff" * 1_024), b"x" * 2_000])
async def test_what_is_no_sketch_is_the_members_fault(lie: bytes) -> None:
    async with host_at_loopback() as newcomer, host_at_loopback() as liar:

        async def answer(stream: Any) -> None:
            await stream.receive_some()
            await stream.send_all(frame(lie, 10_000))

        liar.set_handler(SKETCH_PROTOCOL, answer)
        newcomer.dialler.add_addresses(liar.author, liar.addresses)
        with trio.fail_after(PATIENCE), pytest.raises(PeerUnreachableError):
            await ask_for_sketch(newcomer, liar.author, QUESTION)


# Sketches that a member computes for others


class Donor:
    """A member whose sketches take ten seconds each."""

    def __init__(self, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, holding: Holding) -> None:
        self.made: list[tuple[bytes, float]] = []
        """Seed of each sketch, and the time when it began."""
        self.at_once = self.most_at_once = 0
        self.service = SketchService(ToDonor(nursery, self.serve), RUN, finding(holding))
        monkeypatch.setattr(sketching, "sketch_file", self.sketch)
        self._nursery = nursery

    async def serve(self, stream: Any) -> None:
        await self.service.serve(stream)

    async def sketch(self, file: object, seed: bytes) -> bytes:
        self.made.append((seed, trio.current_time()))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await trio.sleep(10.0)
        self.at_once -= 1
        return b"\0" * 1_024

    async def answers(self, peer: bytes, seed: bytes) -> bool:
        host: Any = ToDonor(self._nursery, self.serve)
        return await ask_for_sketch(host, peer, SketchQuestion(RUN, 0, seed)) is not None


@pytest.fixture
def donor(tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Donor:
    return Donor(nursery, monkeypatch, hold(tmp_path / "theirs", CONTENT))


async def test_one_is_made_at_a_time_with_a_rest_after_each(
    nursery: trio.Nursery, donor: Donor, clock: MockClock
) -> None:
    answered: list[bool] = []

    async def ask(number: int) -> None:
        answered.append(await donor.answers(bytes([number]) * 32, bytes([number]) * 32))

    async with trio.open_nursery() as newcomers:
        for number in range(100):
            newcomers.start_soon(ask, number)
    assert donor.most_at_once == 1
    began_at = [at for _, at in donor.made]
    assert [later - earlier for earlier, later in itertools.pairwise(began_at)] == [10 * (1 + REST)]
    assert answered.count(True) == len(donor.made) == 2
    nursery.cancel_scope.cancel()


async def test_one_peer_gets_so_many_and_others_get_theirs(
    nursery: trio.Nursery, donor: Donor, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketching, "REST", 0.0)
    num_answered = 0
    while await donor.answers(b"p" * 32, bytes([num_answered]) * 32):
        num_answered += 1
    assert PEER_BURST <= num_answered < 2 * PEER_BURST
    assert await donor.answers(b"q" * 32, SEED)
    nursery.cancel_scope.cancel()
