"""A node takes a stage and moves to another; the choice itself is tested in
tests/protocol/stages/test_stage_choice.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.errors import JoinError
from farandole.node.loop.stage_service import StageService, wait_quiet
from farandole.node.status.journal import Journal
from farandole.protocol.rounds.training_events import Signal
from farandole.protocol.stages.stage_choice import View, even_stages
from farandole.protocol.state.entries import Kind, Member, Payload, StageLease

from ..state.test_membership import ANN, BOB, CYD, ME, Staged


class World(Staged):
    """A node that records, in order, what it publishes, fetches, stores and signals."""

    def __init__(self, others: dict[bytes, int], *, round_index: int = 9, has_weights: bool = True) -> None:
        super().__init__()
        self.gossip.publish = self.publish  # type: ignore[method-assign]  # to record it with the rest
        self.gossip.liveness.base_period = 3_600.0  # no heartbeat is missed
        self.has_weights = has_weights
        self.done: list[object] = []
        self.trainer_stage: int | None = None
        self.provider = self
        self.stored: bytes | None = None
        self.journal.update(round=round_index)
        for peer, stage in others.items():
            self.hear(peer, stage, round_index)

    def keeper(self, wanted: int | None = None) -> StageService:
        me: Any = self
        settings: Any = SimpleNamespace(stage=wanted, heartbeat_seconds=2.0)
        return StageService(self.membership, me, ME, me, self.journal, settings, me)

    async def run(self, seconds: float, wanted: int | None = None) -> None:
        with trio.move_on_after(seconds):
            await self.keeper(wanted).run()

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        self.state.tell(ME, payload)
        if isinstance(payload, Member):
            self.done.append(f"hold {payload.stage}")
        elif isinstance(payload, StageLease):
            self.done.append("give back" if payload.target == payload.source else payload)

    # weights

    def download_seconds(self, stage: int) -> float:
        return 1.0

    async def fetch_ahead(self, stage: int) -> bool:
        self.done.append(f"fetch {stage}")
        await trio.sleep(1.0)
        return self.has_weights

    def forget_own(self) -> None:
        pass

    # rounds

    def handle(self, event: Signal) -> None:
        self.done.append(event.value)
        self.trainer_stage = self.membership.stage

    # the store

    async def get_fact(self, name: str) -> bytes | None:
        return self.stored

    async def remember(self, name: str, value: bytes, journal: Journal, loss: str) -> None:
        self.done.append(f"moved to {int(value)}")


async def test_the_first_stage_is_the_volunteers_or_that_of_before_or_the_one_in_need() -> None:
    for wanted, before, stage in ((2, 0, 2), (None, 0, 0), (None, None, 1), (None, 7, 1)):
        world = World({ANN: 0, BOB: 2})
        world.stored = None if before is None else b"%d" % before
        await world.keeper(wanted).begin()
        assert world.membership.stage == stage
        assert world.done == [f"hold {stage}", f"moved to {stage}"]


def test_a_stage_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(JoinError, match="--stage 3: the run's model has 0 to 2"):
        World({}).keeper(3)


async def test_a_move_is_asked_for_and_its_weights_are_here_before_it(clock: MockClock) -> None:
    world = World({ANN: 0, BOB: 2})
    await world.run(60)
    assert world.done[0] == StageLease(0, 1)
    assert {StageLease(0, 1, True), "fetch 1"} == set(world.done[1:3])
    assert world.done[3:] == ["hold 1", "moved to 1", "restart", "give back"]


async def test_who_gets_no_weights_stays(clock: MockClock) -> None:
    world = World({ANN: 0, BOB: 2}, has_weights=False)
    await world.run(30)
    assert world.membership.stage == 0
    assert "restart" not in world.done
    assert "give back" in world.done


async def test_who_has_chosen_his_stage_stays(clock: MockClock) -> None:
    world = World({ANN: 0, BOB: 2})
    await world.run(600, wanted=0)
    assert world.done == []


@pytest.mark.parametrize("trained", [set(), {CYD}], ids=["a run that begins", "a run that trains"])
async def test_before_a_node_has_trained_its_move_needs_no_lease(clock: MockClock, trained: set[bytes]) -> None:
    world = World({ANN: 1, BOB: 1}, round_index=0)
    for peer in trained:
        world.hear(peer, 1, round_index=9)
    world.journal.update(stage=1)
    newcomers = frozenset((ME, ANN, BOB))
    goes_to = even_stages(View(dict.fromkeys(newcomers | trained, Member(1)), 3, newcomers=newcomers)).get(ME)
    assert goes_to is not None
    await world.run(10)
    assert world.done == [f"hold {goes_to}", f"moved to {goes_to}", "restart"]


async def test_a_trainer_of_another_stage_is_started_anew(clock: MockClock) -> None:
    world = World({ANN: 1, BOB: 2})
    world.trainer_stage = 1
    await world.run(5)
    assert world.done == ["restart"]


async def test_the_trainer_waits_until_the_stages_are_dealt_out(clock: MockClock) -> None:
    world = World({}, round_index=0)
    began_at = trio.current_time()

    async def come() -> None:
        await trio.sleep(2)
        world.hear(ANN, 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come)
        await wait_quiet(world.membership, world.journal)
    assert 5 <= trio.current_time() - began_at <= 6
    world.journal.update(round=9)
    await wait_quiet(world.membership, world.journal)
    assert trio.current_time() - began_at <= 6
