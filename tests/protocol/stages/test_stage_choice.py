"""Choice of stages: nodes that know the same decide the same, and soon well; single decisions and whole small runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.stages.stage_choice import (
    EMPTY_SECONDS,
    GIVE_BACK,
    LEASE_SECONDS,
    STAY,
    StageChoice,
    View,
    candidates,
    even_stages,
    first_stage,
    is_worth_moving,
    rank,
    throughputs,
)
from farandole.protocol.state.entries import Member, StageLease
from farandole.testnet.simulate.simulation import Simulation

PATIENCE = 12.0
# In `Run`, seconds until all nodes have heard of a death; other news spreads sooner.
MAX_DEATH_NEWS = 8.0


def author(number: int) -> bytes:
    return number.to_bytes(32, "big")


def providers(*stages: tuple[int, float]) -> dict[bytes, Member]:
    """Return providers by (stage, speed), with authors 0, 1, ..."""
    return {author(number): Member(stage, speed=int(speed)) for number, (stage, speed) in enumerate(stages)}


def test_a_newcomer_takes_the_stage_with_the_least_throughput_or_the_fewest_providers() -> None:
    assert first_stage(View(providers((0, 5.0), (1, 2.0), (1, 2.0)), 2), author(9)) == 1
    assert first_stage(View(providers((0, 5.0), (1, 9.0)), 3), author(9)) == 2
    assert first_stage(View(providers((0, 0.0), (0, 0.0), (1, 0.0)), 2), author(9)) == 1
    assert throughputs(View(providers((0, 4.0), (1, 0.0), (1, 2.0)), 2)) == [4.0, 5.0]  # one counts as 3, the median
    view = View(providers((0, 1.0), (0, 1.0), (1, 1.0)), 3, {author(1): StageLease(0, 2, True)})
    assert throughputs(view) == [1.0, 1.0, 1.0]


def test_the_best_to_go_leaves_the_weaker_of_both_the_strongest() -> None:
    view = View(providers((0, 4.0), (0, 3.0), (0, 1.0), (1, 2.0)), 2)
    assert candidates(view, 1)[0] == author(1)  # leaves 5 and 5


def test_the_last_of_a_stage_and_who_is_bound_are_no_candidates() -> None:
    view = View(providers((0, 9.0), (1, 1.0), (1, 1.0)), 3)
    assert set(candidates(view, 2)) == {author(1), author(2)}
    assert not is_worth_moving(view, author(0), 2)
    members = providers((0, 4.0), (0, 4.0), (0, 1.0), (1, 1.0))
    best = candidates(View(members, 2), 1)[0]
    bound = members | {best: Member(0, speed=members[best].speed, is_bound=True)}
    assert set(candidates(View(bound, 2), 1)) == set(candidates(View(members, 2), 1)) - {best}


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_a_correction_leaves_the_bound_where_they_are_and_moves_no_more_than_it_must(
    nodes: list[tuple[int, bool]],
) -> None:
    members = {author(number): Member(stage, is_bound=bound) for number, (stage, bound) in enumerate(nodes)}
    moves = even_stages(View(members, 4, newcomers=frozenset(members)))
    assert not any(members[name].is_bound or members[name].stage == target for name, target in moves.items())
    after = Counter(moves.get(name, member.stage) for name, member in members.items())
    bound = Counter(member.stage for member in members.values() if member.is_bound)
    for stage in range(4):  # no node that is free would be better off elsewhere
        assert after[stage] - min(after[other] for other in range(4)) <= 1 or after[stage] == bound[stage]
    before = Counter(member.stage for member in members.values())
    assert len(moves) == sum((after - before).values())


def test_a_move_must_be_worth_its_download() -> None:
    members = providers((0, 4.0), (0, 4.0), (1, 1.0), (1, 1.0))
    assert is_worth_moving(View(members, 2), author(0), 1)
    assert not is_worth_moving(View(members, 2, download_seconds=3_000), author(0), 1)
    assert not is_worth_moving(View(members, 2), author(2), 0)


def test_what_is_gained_by_a_move_is_not_gained_by_the_way_back() -> None:
    rng = random.Random(3)
    for _ in range(300):
        members = providers(*((rng.randrange(3), rng.choice((1.0, 2.0, 4.0))) for _ in range(7)))
        for name, provider in members.items():
            for target in range(3):
                if is_worth_moving(View(members, 3), name, target):
                    moved = members | {name: Member(target, speed=provider.speed)}
                    assert not is_worth_moving(View(moved, 3), name, provider.stage)


def test_of_two_who_claim_at_once_one_gives_way() -> None:
    members = providers((0, 1.0), (0, 1.0), (0, 1.0), (2, 1.0))
    first, second = sorted((author(0), author(1)), key=lambda name: rank(name, 1))
    choices = {name: StageChoice(name, PATIENCE) for name in (first, second)}
    now = 0.0
    decisions = {name: choice.decide(View(members, 3), now) for name, choice in choices.items()}
    assert set(decisions.values()) == {STAY}
    claimed: dict[bytes, StageLease] = {}
    while len(claimed) < 2:  # neither has heard of the other yet
        now += 1.0
        for name, choice in choices.items():
            if name not in claimed and choice.decide(View(members, 3), now) == ("claim", 1):
                claimed[name] = StageLease(0, 1)
    view = View(members, 3, claimed)
    assert choices[second].decide(view, now) == GIVE_BACK
    assert choices[first].decide(view, now) == STAY
    assert choices[first].decide(view, now + LEASE_SECONDS) == ("move", 1)


def test_two_do_not_leave_a_stage_at_once_to_make_others_stronger() -> None:
    members = providers(*[(0, 4.0)] * 4, (1, 1.0), (2, 1.0))
    mover = min(range(4), key=lambda number: rank(author(number), 1))
    choice = StageChoice(author(mover), PATIENCE)
    other = next(author(number) for number in range(4) if number != mover)
    view = View(members, 3, {other: StageLease(0, 2, True)})
    assert {choice.decide(view, float(now)) for now in range(100)} == {STAY}


def test_who_is_on_the_way_is_not_overtaken_and_a_lease_of_an_earlier_life_is_given_back() -> None:
    members = providers((0, 1.0), (0, 1.0), (0, 1.0))
    first, second = sorted((author(0), author(1)), key=lambda name: rank(name, 1))
    choice = StageChoice(first, PATIENCE)
    view = View(members, 2)
    claim = next(decision for now in range(60) if (decision := choice.decide(view, float(now))) != STAY)
    assert claim == ("claim", 1)
    late = View(members, 2, {first: StageLease(0, 1), second: StageLease(0, 1, True)})
    assert choice.decide(late, 61.0) == GIVE_BACK
    members = providers((0, 1.0), (0, 1.0))
    view = View(members, 2, {author(0): StageLease(1, 0)})
    assert StageChoice(author(0), PATIENCE).decide(view, 0.0) == GIVE_BACK


@dataclass
class Node:
    """A node of `Run`, with its view of the run."""

    name: bytes
    stage: int
    speed: float
    choice: StageChoice
    is_frozen: bool = False
    is_bound: bool = False
    is_alive: bool = True
    known: dict[bytes, Member] = field(default_factory=dict)
    leases: dict[bytes, StageLease] = field(default_factory=dict)
    heard: dict[bytes, float] = field(default_factory=dict)
    """Author -> time at which the newest known news of it was sent."""
    arrives_at: float | None = None
    source: int | None = None
    """The stage that it left last."""
    killed_at: float = 0.0

    @property
    def provider(self) -> Member:
        return Member(self.stage, speed=int(self.speed), is_bound=self.is_bound)


class Run(Simulation):
    """Nodes that hear of each other late, each after its own delay; this object sees the true state."""

    def __init__(self, num_stages: int, *, download: float = 8.0, seed: int = 1) -> None:
        super().__init__(seed)
        self.num_stages = num_stages
        self.download = download
        self.newcomers: set[bytes] = set()
        self.nodes: list[Node] = []
        self.num_moves = 0
        self.emptied_at: dict[int, float] = {}
        self.longest_empty = 0.0

    def join(
        self, stage: int | None = None, speed: float = 1.0, *, is_frozen: bool = False, is_bound: bool = False
    ) -> Node:
        """Add a node that knows all news of now; without a stage given it chooses one."""
        name = author(len(self.nodes) + 1)
        known = {node.name: node.provider for node in self.nodes if node.is_alive}
        if stage is None:
            stage = first_stage(View(known, self.num_stages), name)
        node = Node(name, stage, speed, StageChoice(name, PATIENCE), is_frozen, is_bound, known=known)
        self.nodes.append(node)
        self.tell(node)
        return node

    def kill(self, *nodes: Node) -> None:
        for node in nodes:
            node.is_alive = False
            node.killed_at = self.now
            self._spread(node.name, None, None, 1.0, MAX_DEATH_NEWS)

    def tell(self, node: Node, lease: StageLease | None = None) -> None:
        self._spread(node.name, node.provider, lease, 0.2, 3.0)

    def _spread(self, name: bytes, told: Member | None, lease: StageLease | None, least: float, most: float) -> None:
        for peer in self.nodes:
            delay = 0.0 if peer.name == name else self.rng.uniform(least, most)
            self.call_after(delay, partial(self._deliver, self.now, peer, name, told, lease))

    def counts(self) -> list[int]:
        """Return the number of live nodes of each stage."""
        return [sum(node.is_alive and node.stage == stage for node in self.nodes) for stage in range(self.num_stages)]

    def play(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.run_until(self.now + 0.5)
            for node in self.nodes:
                if node.is_alive and not (node.is_frozen or node.is_bound):
                    self._act(node)
            self._check()

    def _deliver(self, told_at: float, peer: Node, name: bytes, told: Member | None, lease: StageLease | None) -> None:
        if told_at >= peer.heard.get(name, 0.0):
            peer.heard[name] = told_at
            peer.known.pop(name, None) if told is None else peer.known.update({name: told})
            peer.leases.pop(name, None) if lease is None else peer.leases.update({name: lease})

    def _act(self, node: Node) -> None:
        if node.arrives_at is not None:
            if self.now >= node.arrives_at:
                node.arrives_at = None
                self.tell(node)
            return
        download = 0.0 if node.name in self.newcomers else self.download
        view = View(
            dict(node.known),
            self.num_stages,
            dict(node.leases),
            newcomers=frozenset(self.newcomers),
            download_seconds=download,
        )
        match node.choice.decide(view, self.now):
            case ("claim", target):
                self.tell(node, StageLease(node.stage, target))
            case ("give back", _):
                self.tell(node)
            case ("move", target):
                self.num_moves += 1
                self._check_leaving(node, target)
                lease = StageLease(node.stage, target, True) if download else None
                node.stage = target
                node.arrives_at = self.now + download
                self.tell(node, lease)

    def _check_leaving(self, node: Node, target: int) -> None:
        """Check that a node remains, as far as known, and that two leave at once only if one fills an empty stage."""
        others = [other for other in self.nodes if other.stage == node.stage and other is not node]
        assert any(other.is_alive or self.now - other.killed_at < MAX_DEATH_NEWS + LEASE_SECONDS for other in others)
        also = [
            other
            for other in self.nodes
            if other.is_alive and other.arrives_at is not None and other.source == node.stage
        ]
        assert node.name in self.newcomers or not also or target in self.emptied_at, (
            "two at a time from one stage, without need"
        )
        node.source = node.stage

    def _check(self) -> None:
        """Check what must hold at every moment."""
        moving = [node for node in self.nodes if node.is_alive and node.arrives_at is not None]
        targets = [node.stage for node in moving if node.name not in self.newcomers]
        assert len(targets) == len(set(targets)), "two at a time to one stage"
        for stage, count in enumerate(self.counts()):
            if count:
                self.emptied_at.pop(stage, None)
            else:
                since = self.emptied_at.setdefault(stage, self.now)
                self.longest_empty = max(self.longest_empty, self.now - since)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("trained", [(), (0, 1, 2, 1)])
def test_nodes_that_start_at_once_settle_evenly(trained: tuple[int, ...], seed: int) -> None:
    run = Run(3, seed=seed)
    for stage in trained:
        run.join(stage)
    before = View({node.name: node.provider for node in run.nodes}, 3)
    for number in range(len(trained), 6):  # each sees those that train, and not the others
        run.newcomers.add(run.join(first_stage(before, author(seed * 100 + number))).name)
    run.play(25)
    assert run.counts() == [2, 2, 2]
    moves = run.num_moves
    run.play(100)
    assert run.num_moves == moves <= len(run.newcomers)


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_stage_is_filled_again_within_half_a_minute(seed: int) -> None:
    run = Run(4, seed=seed)
    nodes = [run.join(number % 4) for number in range(8)]
    run.play(10)
    run.kill(nodes[2], nodes[6])
    run.play(60)
    assert sorted(run.counts()) == [1, 1, 2, 2]
    assert run.counts()[2] == 1
    assert run.longest_empty < 8.0 + 22.0  # the news takes 8 s at most
    assert run.num_moves == 1
    run.play(150)
    assert run.num_moves == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stages", [(0, 0, 0, 3), (0, 0, 3, 3), (0, 0, 0, 0, 3, 3)])
def test_two_stages_that_are_emptied_at_once_are_filled_at_once(stages: tuple[int, ...], seed: int) -> None:
    run = Run(4, download=60.0, seed=seed)
    for stage in stages:
        run.join(stage)
    lost = [run.join(stage) for stage in (1, 1, 2, 2)]
    run.play(10)
    run.kill(*lost)
    run.play(150)
    assert min(run.counts()) >= 1
    assert run.longest_empty < 60.0  # the second does not wait for the first one's download


@settings(max_examples=40)
@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from((1.0, 4.0)), st.booleans()), min_size=3, max_size=12),
    st.integers(0, 1_000),
)
def test_whoever_is_killed_what_is_left_fills_all_stages(
    num_stages: int, nodes: list[tuple[int, float, bool]], seed: int
) -> None:
    run = Run(num_stages, seed=seed)
    joined = [run.join(stage % num_stages, speed) for stage, speed, _ in nodes]
    run.play(10)
    run.kill(*(node for node, (_, _, is_killed) in zip(joined, nodes, strict=True) if is_killed))
    run.play(250)
    num_live = sum(run.counts())
    assert sum(count > 0 for count in run.counts()) == min(num_live, num_stages)


def test_a_volunteer_that_does_nothing_is_passed_over() -> None:
    run = Run(2)
    nodes = [run.join(0, is_frozen=number < 3) for number in range(4)]
    nodes.append(run.join(1))
    run.play(5)
    run.kill(nodes[4])
    run.play(40)
    assert run.counts() == [3, 1]


@pytest.mark.parametrize("seed", range(10))
def test_volunteers_who_are_bound_are_not_waited_for(seed: int) -> None:
    run = Run(2, seed=seed)
    nodes = [run.join(0, is_bound=number != 7) for number in range(12)]
    nodes.append(run.join(1))
    run.play(5)
    run.kill(nodes[12])
    run.play(40)
    assert run.counts() == [11, 1]
    assert run.longest_empty <= 8.0 + EMPTY_SECONDS + LEASE_SECONDS + 2.0  # news, and decisions at intervals


@pytest.mark.parametrize("seed", range(10))
def test_unequal_speeds_are_balanced_and_then_there_is_rest(seed: int) -> None:
    run = Run(2, seed=seed)
    for stage, speed in ((0, 4.0), (0, 4.0), (0, 1.0), (1, 1.0), (1, 1.0), (1, 1.0)):
        run.join(stage, speed)
    run.play(200)
    strengths = [sum(node.speed for node in run.nodes if node.stage == stage) for stage in range(2)]
    assert min(strengths) >= 5.0  # from 3, of 12
    moves = run.num_moves
    run.play(300)
    assert run.num_moves == moves <= 2


@pytest.mark.parametrize("seed", range(10))
def test_churn_leaves_no_stage_empty_for_long(seed: int) -> None:
    run, rng = Run(3, seed=seed), random.Random(seed)
    for number in range(9):
        run.join(number % 3, rng.choice((1.0, 4.0)))
    for _ in range(25):
        run.play(30)
        if rng.random() < 0.5 and sum(run.counts()) > 6:
            run.kill(rng.choice([node for node in run.nodes if node.is_alive]))
        else:
            run.join(speed=rng.choice((1.0, 4.0)))
    run.play(60)
    assert min(run.counts()) >= 1
    assert run.longest_empty < 60.0
