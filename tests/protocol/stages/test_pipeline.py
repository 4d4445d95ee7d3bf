"""Invariants of many pipelines together: every microbatch counts at all stages or at none, whatever is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from farandole.protocol.stages import activations as wire
from farandole.protocol.stages import pipeline_events as machine
from farandole.protocol.stages.microbatches import (
    FIRST_SECONDS,
    FORGIVEN_AFTER,
    MAX_OUTLIERS,
    NUM_REMEMBERED,
    Avoidance,
)
from farandole.protocol.stages.pipeline import Pipeline
from farandole.protocol.trainer.trainer_messages import Settle, Train, Validate, Work, Worked
from farandole.protocol.wire.timers import TimerFired

from ..pipeline_world import World, manifest_of


def settled_alike(world: World, num_stages: int) -> bool:
    """Return whether each microbatch that any live node has kept was kept by one node of every stage."""
    return set(world.kept().values()) <= {num_stages}


@pytest.mark.parametrize("stages", [[1, 1], [2, 2, 2, 2], [3, 3, 3], [1, 4], [4, 1, 2]])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_microbatch_counts_once_at_every_stage(stages: list[int], overlap: bool, seed: int) -> None:
    world = World(stages, seed=seed, overlap=overlap)
    world.run(4)
    world.end()

    kept = world.kept()
    assert len(kept) > 50
    assert set(kept.values()) == {len(stages)}
    assert [node.drained for node in world.nodes.values()] == [[0]] * sum(stages)
    drawn = sum(node.pipeline.counts.begun for node in world.of_stage(0))
    assert drawn - len(kept) <= 2 * world.in_flight  # at most the last ones of the round


@pytest.mark.parametrize("what", ["activations", "gradients"])
@pytest.mark.parametrize("stage", range(3))
def test_a_node_that_falsifies_is_off_the_routes_and_the_others_go_on(stage: int, what: str) -> None:
    """The node falsifies from some time on, at any stage; its neighbours' trainers notice."""
    world = World([2, 2, 2], seed=stage)
    world.run(1)
    hostile = world.of_stage(stage)[0]
    hostile.falsifies = what
    begun = hostile.pipeline.counts.begun
    world.run(3)
    kept = len(world.kept())
    world.run(2)

    assert hostile.pipeline.counts.begun - begun < 50
    honest = [node for node in world.nodes.values() if node is not hostile]
    assert {peer for node in honest for peer in node.avoided} == {hostile.author}
    assert len(world.kept()) - kept > 20


def test_an_inner_step_has_the_quota() -> None:
    world = World([1, 1, 1], quota=5)
    world.run(5)
    for node in world.nodes.values():
        assert len(node.steps) > 3
        assert set(node.steps) == {5}
    world = World([1, 2, 1], quota=6, in_flight=12, latency=0.05, overlap=True)
    world.run(10)
    for node in world.nodes.values():
        assert len(node.steps) > 3
        assert set(node.steps) == {3 if node.stage == 1 else 6}


def test_a_slow_node_is_given_less() -> None:
    world = World([2, 0, 2], in_flight=8, quota=16)
    world.add(1, 0.01)
    slow = world.add(1, 0.08)
    world.num_stages = 3
    world.announce()
    for node in world.of_stage(1):
        node.handle(Train(0, 0))
    world.run(15)
    fast = world.of_stage(1)[0]
    assert fast is not slow
    assert len(fast.kept) > 2 * len(slow.kept) > 0


def busy(world: World, seconds: float) -> list[float]:
    """Return, for each stage, the share of this time in which its nodes compute."""
    before = {node: node.busy_seconds for node in world.nodes.values()}
    world.run(seconds)
    shares: list[list[float]] = [[] for _ in range(world.num_stages)]
    for node in world.nodes.values():
        shares[node.stage].append((node.busy_seconds - before[node]) / seconds)
    return [sum(stage) / len(stage) for stage in shares]


@pytest.mark.parametrize("is_followed", [False, True])
def test_overlapping_steps_leave_nobody_waiting_for_the_last_microbatches(is_followed: bool) -> None:
    """A microbatch is in flight for longer than a node computes for a step, as latency is high. All time is virtual."""

    def world_of(overlap: bool) -> World:
        stages = [2, 2, 2, 2]
        return World(
            stages, quota=16, in_flight=24, latency=0.1, seconds=0.05, overlap=overlap, is_followed=is_followed
        )

    waiting, overlapping = world_of(overlap=False), world_of(overlap=True)
    for world in (waiting, overlapping):
        world.run(6)
    assert busy(waiting, 8)[0] < 0.6
    assert busy(overlapping, 8)[0] > 0.95
    overlapping.end()
    assert settled_alike(overlapping, 4)


def test_what_is_under_way_goes_on_in_a_round_that_follows_at_once() -> None:
    world = World([2, 2, 2], latency=0.05, overlap=True, is_followed=True)
    num_across = 0
    for _ in range(4):
        world.run(2)
        for node in world.nodes.values():
            node.end_round()
            num_across += len(node.began)
        world.run(1)
    assert num_across > 0
    assert [node.drained for node in world.nodes.values()] == [[0, 1, 2, 3]] * 6
    world.end()
    assert settled_alike(world, 3)
    assert sum(node.pipeline.counts.dropped for node in world.nodes.values()) <= 2 * world.in_flight


@pytest.mark.parametrize("overlap", [False, True])
def test_a_round_may_end_by_its_steps_and_none_follows_its_last(overlap: bool) -> None:
    world = World([1, 1], overlap=overlap)
    world.run(0)
    node = world.of_stage(0)[0]
    node.handle(Train(0, 3))
    world.run(5)
    assert node.steps == [4, 4, 4]
    assert not node.began
    assert node.drained == [0]


SETTINGS: list[dict[str, bool]] = [{}, {"overlap": True}, {"overlap": True, "is_followed": True}]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_losses_of_nodes_lose_no_more_than_was_under_way(seed: int, setting: dict[str, bool]) -> None:
    world = World([2, 3, 3, 2], seed=seed, microbatch_seconds=3.0, **setting)
    rng = random.Random(seed)
    for _ in range(3):
        world.run(rng.uniform(0.5, 2))
        stage = rng.choice([stage for stage in range(1, 4) if len(world.of_stage(stage)) > 1])
        world.kill(rng.choice(world.of_stage(stage)))
        world.run(rng.uniform(0, 0.3))
        world.announce()
    before = len(world.kept())
    world.run(3)  # less than a microbatch's time
    assert len(world.kept()) > before + 10, "nobody waits for what the dead had"
    world.end()

    dead = [node for node in world.nodes.values() if not node.is_alive]
    for ticket, count in world.kept().items():
        # The sums of dead nodes are lost; all others have it.
        assert count + sum(ticket in node.kept or ticket in node.summed for node in dead) == 4


@pytest.mark.parametrize("seed", range(6))
def test_a_frozen_node_costs_what_it_has_and_no_more(seed: int) -> None:
    """Nodes behind it, which it keeps from the origin's word, ask the origin."""
    world = World([1, 2, 1], microbatch_seconds=2.0, seed=seed)
    world.run(2)
    frozen = world.of_stage(1)[0]
    frozen.is_frozen = True
    world.run(5)
    before = len(world.kept())
    world.run(5)
    assert len(world.kept()) > before + 30, "the other takes all"
    counts = world.of_stage(0)[0].pipeline.counts
    assert counts.dropped <= 2 * world.in_flight, counts
    world.end()
    for ticket, count in world.kept().items():
        assert count + (ticket in frozen.summed) == 3, "what it has of it waits for the origin's word"


def test_an_origin_that_is_asked_drops_what_cannot_come_back() -> None:
    """The node that asks has lost the hop before it, so a gradient sent by another route would not help it."""
    pipeline = open_pipeline(0)
    pipeline.handle(machine.LinkOpened(2, b"next", is_upstream=True), 0.0)
    pipeline.handle(machine.LinkOpened(3, b"last", is_upstream=False, is_return=True), 0.0)
    pipeline.handle(machine.Received(2, wire.Credits(1)), 0.0)
    (sent,) = [o.message for o in pipeline.handle(Worked(), 0.0) if isinstance(o, machine.Send) and o.slot is not None]
    assert isinstance(sent, wire.Forward)
    pipeline.handle(machine.Received(3, wire.Forward(sent.ticket, b"me" * 16, 20, 5.0)), 0.1)
    asked = machine.Tell(b"last", wire.Question(sent.ticket))
    assert machine.Tell(b"last", wire.Answer(sent.ticket, None)) in pipeline.handle(asked, 0.1)
    pipeline.handle(machine.Received(3, wire.DataReceived(0)), 0.1)
    pipeline.handle(Worked(), 0.1)
    assert machine.Tell(b"last", wire.Answer(sent.ticket, False)) in pipeline.handle(asked, 0.2)


def test_a_node_that_dies_while_it_sends_back_leaves_no_half() -> None:
    """The case that needs the origin's answer: later stages have the gradient, earlier ones have lost the way back."""
    asked = 0
    for seed in range(20):
        world = World([1, 1, 1], seed=seed, microbatch_seconds=2.0, latency=0.05)
        world.run(1.0 + seed * 0.05)
        victim = world.of_stage(1)[0]
        world.kill(victim)
        world.announce()
        world.end()
        last = world.of_stage(2)[0]
        origin = world.of_stage(0)[0]
        assert set(last.kept) == set(origin.kept)
        asked += last.pipeline.counts.taken_out
    assert asked > 0, "it happened"


def measure(world: World, num_batches: int) -> None:
    """Measure the loss of so many batches, of four microbatches each."""
    for origin in world.of_stage(0):
        origin.handle(Validate(num_batches))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stages", [[1, 1], [2, 3, 2]])
def test_held_out_text_goes_forward_alone_and_is_learned_by_nobody(stages: list[int], overlap: bool) -> None:
    world = World(stages, overlap=overlap)
    measure(world, 3)
    world.run(5)
    for origin in world.of_stage(0):
        assert sorted(origin.measured) == list(range(12))
        assert origin.num_measured == 1
    world.run(5)
    assert not any(node.held_out for node in world.nodes.values())
    world.end()
    kept = world.kept()
    assert len(kept) > 50
    assert set(kept.values()) == {len(stages)}


def test_what_is_measured_comes_before_what_is_learned_and_where_nothing_is_held_out_training_goes_on() -> None:
    world = World([1, 1])
    origin, other = world.nodes.values()
    measure(world, 5)
    while not origin.num_measured:
        assert not other.steps
        world.run(0.01)
    world.run(5)
    assert other.steps
    world = World([1, 1])
    (origin,) = world.of_stage(0)
    origin.has_held_out = False
    measure(world, 2)
    world.run(5)
    assert origin.num_measured == 1
    assert origin.steps


def test_held_out_text_that_was_lost_with_a_node_is_measured_all_the_same() -> None:
    world = World([2, 3, 2], latency=0.05)
    measure(world, 8)
    world.run(0.6)
    world.kill(world.of_stage(1)[0])
    world.run(2.0)
    world.announce()
    world.run(20)
    for origin in world.of_stage(0):
        assert sorted(set(origin.measured)) == list(range(32))
        assert origin.num_measured == 1
    world.end()
    assert settled_alike(world, 3)


def open_pipeline(stage: int, in_flight: int = 2) -> Pipeline:
    pipeline = Pipeline(manifest_of(3, 4, in_flight, 10.0), b"me" * 16, stage, random.Random(0))
    pipeline.handle(machine.NodesChanged(frozenset({b"next"}), 1, 1, 1), 0.0)
    pipeline.handle(Train(20, 0), 0.0)
    pipeline.handle(machine.LinkOpened(1, b"previous", is_upstream=False), 0.0)
    return pipeline


def arriving(ticket: bytes, link: int = 1, round_index: int = 20) -> machine.Received:
    return machine.Received(link, wire.Forward(ticket, b"origin", round_index, 5.0))


def is_dropped(output: machine.Output) -> bool:
    return isinstance(output, machine.Send) and isinstance(output.message, wire.Dropped)


@pytest.mark.parametrize("round_index", [0, 9, 31])
def test_activations_of_another_time_are_refused(round_index: int) -> None:
    outputs = open_pipeline(1).handle(arriving(b"a", round_index=round_index), 0.0)
    sent = [output.message for output in outputs if isinstance(output, machine.Send)]
    refusals = [message for message in sent if isinstance(message, wire.Dropped)]
    assert [(refusal.index, refusal.is_untouched) for refusal in refusals] == [(0, True)]


def test_what_is_here_already_is_refused_and_what_nobody_drew_does_not_come_home() -> None:
    pipeline = open_pipeline(1)
    assert not any(map(is_dropped, pipeline.handle(arriving(b"a"), 0.0)))
    outputs = pipeline.handle(arriving(b"a"), 0.0)
    assert machine.Send(1, wire.Dropped(1, "it is here already", is_untouched=True)) in outputs
    pipeline = open_pipeline(0)
    pipeline.handle(machine.LinkOpened(2, b"last", is_upstream=False, is_return=True), 0.0)
    outputs = pipeline.handle(arriving(b"forged", link=2), 0.0)
    assert machine.Send(2, wire.Dropped(0, "it is not mine", is_untouched=True)) in outputs


def test_no_more_is_promised_than_there_are_slots() -> None:
    pipeline = open_pipeline(1, in_flight=5)
    promised: Counter[int] = Counter()
    for number in range(2, 9):
        for output in pipeline.handle(machine.LinkOpened(number, bytes([number]), is_upstream=False), 0.0):
            if isinstance(output, machine.Send) and isinstance(output.message, wire.Credits):
                promised[output.link] = output.message.total
    assert sum(promised.values()) <= 5


def test_unfit_activations_are_dropped_and_the_next_are_taken() -> None:
    pipeline = open_pipeline(1)
    pipeline.handle(arriving(b"a"), 0.0)
    outputs = pipeline.handle(machine.Received(1, wire.DataReceived(0)), 0.0)
    assert Work("forward", 0, sender=b"previous") in outputs
    outputs = pipeline.handle(Worked("not finite"), 0.1)
    assert machine.Send(1, wire.Dropped(0, "not finite", is_untouched=True)) in outputs
    pipeline.handle(arriving(b"b"), 0.2)
    assert machine.ReceiveInto(1, 0) in pipeline.handle(machine.Received(1, wire.DataReceived(1)), 0.2)


def test_who_sends_the_gradient_of_held_out_text_is_hung_up_on() -> None:
    """There is none: a trainer would add it to another microbatch's inner step, or end."""
    pipeline = open_pipeline(1)
    pipeline.handle(machine.LinkOpened(2, b"next", is_upstream=True), 0.0)
    pipeline.handle(machine.Received(2, wire.Credits(8)), 0.0)
    pipeline.handle(machine.Received(1, wire.Forward(b"a", b"origin", 20, 5.0, is_held_out=True)), 0.0)
    pipeline.handle(machine.Received(1, wire.DataReceived(0)), 0.0)
    pipeline.handle(Worked(), 0.1)
    assert machine.LinkClosed(2) in pipeline.handle(machine.Received(2, wire.Gradient(0)), 0.2)


def test_only_the_origin_is_believed_about_how_a_microbatch_ended() -> None:
    pipeline = open_pipeline(2)  # the last stage: the next hop is the origin
    pipeline.handle(arriving(b"a"), 0.0)
    pipeline.handle(machine.Received(1, wire.DataReceived(0)), 0.0)
    assert machine.OpenLink(b"origin", is_return=True) in pipeline.handle(Worked(), 0.0)
    pipeline.handle(machine.LinkOpened(2, b"origin", is_upstream=True, is_return=True), 0.0)
    pipeline.handle(machine.Received(2, wire.Credits(4)), 0.0)
    pipeline.handle(machine.Received(2, wire.Gradient(0)), 0.0)
    assert Work("backward", 0, sender=b"origin") in pipeline.handle(machine.Received(2, wire.DataReceived(0)), 0.0)
    assert machine.Send(1, wire.Gradient(0), 0) in pipeline.handle(Worked(), 0.0)
    assert machine.Tell(b"origin", wire.Question(b"a")) in pipeline.handle(machine.LinkClosed(1), 0.0)

    assert not [o for o in pipeline.handle(machine.Tell(b"liar", wire.Answer(b"a", True)), 0.1) if isinstance(o, Work)]
    pipeline.handle(machine.Tell(b"origin", wire.Answer(b"a", None)), 0.1)
    assert machine.Tell(b"origin", wire.Question(b"a")) in pipeline.handle(TimerFired(), 2.0)
    assert Settle(0, is_kept=True) in pipeline.handle(machine.Tell(b"origin", wire.Answer(b"a", True)), 2.1)


# Which neighbours are avoided, and for how long; what liars can achieve

ANN, BOB, EVE = b"ann", b"bob", b"eve"


def send_outliers(avoidance: Avoidance, now: float) -> float | None:
    """Report enough outliers of Eve; return the seconds for which she is avoided."""
    seconds = [avoidance.note_judged(EVE, True, now) for _ in range(MAX_OUTLIERS)]
    assert seconds[:-1] == [None] * (MAX_OUTLIERS - 1)
    return seconds[-1]


def test_a_peer_that_sends_outliers_is_avoided_for_longer_each_time_and_forgiven_what_was_long_ago() -> None:
    avoidance = Avoidance()
    assert send_outliers(avoidance, 0.0) == FIRST_SECONDS
    assert avoidance.is_avoided(EVE, FIRST_SECONDS - 1)
    assert avoidance.until(1.0) == [FIRST_SECONDS]
    assert not avoidance.is_avoided(EVE, FIRST_SECONDS)
    assert send_outliers(avoidance, FIRST_SECONDS) == 2 * FIRST_SECONDS
    assert not avoidance.is_avoided(BOB, FIRST_SECONDS)
    avoidance = Avoidance()
    send_outliers(avoidance, 0.0)
    later = FIRST_SECONDS * (2 + 2 * FORGIVEN_AFTER)
    assert send_outliers(avoidance, later) == FIRST_SECONDS


def test_outliers_that_are_rare_count_for_nothing() -> None:
    avoidance = Avoidance()
    for number in range(1_000):
        assert avoidance.note_judged(BOB, number % NUM_REMEMBERED == 0, float(number)) is None


def test_a_peer_that_loses_what_others_do_not_is_avoided_and_none_for_losses_that_hit_all_alike() -> None:
    avoidance = Avoidance()
    ends = [avoidance.note_end(peer, peer != EVE, 0.0) for _ in range(NUM_REMEMBERED + 1) for peer in (ANN, BOB, EVE)]
    assert any(ends)
    assert [peer for peer in (ANN, BOB, EVE) if avoidance.is_avoided(peer, 1.0)] == [EVE]
    avoidance = Avoidance()
    assert not any(avoidance.note_end(peer, False, 0.0) for _ in range(100) for peer in (ANN, BOB, EVE))


def test_a_minority_that_drops_what_goes_over_a_peer_does_not_have_it_avoided() -> None:
    """A third of the origins drop all microbatches that go over Bob, and keep all others."""
    avoidance, rng = Avoidance(), random.Random(1)
    for _ in range(10_000):
        peer = rng.choice((ANN, BOB))
        is_kept = peer != BOB or rng.random() > 1 / 3
        assert avoidance.note_end(peer, is_kept, 0.0) is None
