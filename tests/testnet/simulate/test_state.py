"""A thousand nodes on a bad network, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

import pytest

from farandole.protocol.state.entries import Delta, Kind, Member, Proof, Signed
from farandole.testnet.simulate.simulation import UNIX_EPOCH
from farandole.testnet.simulate.state import SimulatedNode, World, delays_of


def settled(seed: int, num_nodes: int, **settings: object) -> World:
    world = World(seed, num_nodes, **settings)  # type: ignore[arg-type]
    world.settle()
    return world


def start(world: World, node: SimulatedNode) -> None:
    node.start(world.contacts())


def restart(world: World, node: SimulatedNode) -> None:
    node.restart(world.contacts())


@pytest.mark.parametrize(("num_nodes", "num_entries"), [(80, 80), pytest.param(1_000, 1_000, marks=pytest.mark.soak)])
def test_an_entry_reaches_all_living_nodes_within_twelve_seconds(num_nodes: int, num_entries: int) -> None:
    """The network loses 5 %, and a tenth of the nodes is replaced each minute."""
    world = settled(3, num_nodes, loss=0.05)
    stayed = set(world.nodes)
    world.replace(world.simulation.rng.sample(world.nodes, num_nodes // 20), seconds=30.0)
    written = world.publish_all(world.nodes[:num_entries], seconds=15.0)
    world.simulation.run_until(40.0)
    living = [node for node in world.living if node in stayed and node.incarnation == 1]
    delays = delays_of(written, living)
    assert delays[int(0.99 * len(delays))] <= 12.0
    traffic = [world.network.traffic[node.author] for node in living]
    assert sum(sent.messages for sent in traffic) / len(traffic) / 40.0 <= 20.0
    assert sum(sent.num_bytes for sent in traffic) / len(traffic) / 40.0 <= 20_000.0


def withhold(liar: SimulatedNode, victims: set[bytes]) -> None:
    """Let a node pass on everything except what the victims write."""
    honest = liar.gossip.push.queue

    def queue(items: Iterable[Signed | Proof], source: bytes | None) -> None:
        honest([item for item in items if not isinstance(item, Signed) or item.author not in victims], source)

    # A liar is an honest node with one method replaced.
    liar.gossip.push.queue = queue  # type: ignore[method-assign]


def test_neighbours_that_withhold_delay_nobodys_entries_for_long() -> None:
    world = settled(7, 80, loss=0.05)
    liars, victims = world.nodes[:16], world.nodes[16:24]
    for liar in liars:
        withhold(liar, {node.author for node in victims})
    world.publish_all(world.nodes[24:], seconds=15.0)
    written = world.publish_all(victims, seconds=15.0)
    world.simulation.run_until(40.0)
    delays = delays_of(written, world.nodes[16:])
    assert delays[int(0.99 * len(delays))] <= 12.0


@pytest.mark.parametrize("num_nodes", [80, pytest.param(1_000, marks=pytest.mark.soak)])
def test_half_die_at_once_and_the_rest_agree(num_nodes: int) -> None:
    """The network loses 20 %; entries that five peers held are never lost."""
    world = settled(5, num_nodes, loss=0.2)
    world.simulation.run_until(3.0)
    victims = random.Random(5).sample(world.nodes, num_nodes // 2)
    entries = [world.publish_progress(node) for node in victims[:20]]
    world.simulation.run_until(5.0)
    held_by_many = [
        entry for entry in entries if sum(entry.id in node.seen_at for node in world.nodes if node not in victims) >= 5
    ]
    assert held_by_many
    for victim in victims:
        victim.stop()
    assert world.simulation.run_until(35.0, done=world.are_equal, every=1.0)
    assert len(world.living) == num_nodes - len(victims)
    for node in world.living:
        assert all(node.state.get(entry.author, Kind.PROGRESS) is not None for entry in held_by_many)


def test_one_seed_makes_one_trace() -> None:
    def trace(seed: int) -> str:
        world = settled(seed, 20, loss=0.1)
        world.network.duplicates = 0.1
        world.publish_all(world.nodes, seconds=5.0)
        world.simulation.call_at(4.0, world.nodes[3].stop)
        world.simulation.call_at(9.0, lambda: world.nodes[3].restart(world.contacts()))
        world.simulation.run_until(20.0)
        return world.simulation.trace

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 200))])
def test_whatever_happens_the_living_agree_in_the_end(seed: int) -> None:
    """Loss, a partition, deaths, restarts and wrong clocks, all drawn from the seed; equal within 15 s of the last."""
    rng = random.Random(seed)
    clocks = {number: (rng.uniform(-5.0, 5.0), rng.uniform(-0.01, 0.01)) for number in range(1, 17, 3)}
    world = settled(seed, 16, loss=0.1, base_period=2.0, clocks=clocks)
    world.network.duplicates = 0.1
    names = [node.author for node in world.nodes]
    half = rng.sample(names, 8)
    world.simulation.call_at(4.0, lambda: world.network.partition([half]))
    for node in rng.sample(world.nodes, 5):
        died_at = rng.uniform(1.0, 12.0)
        world.simulation.call_at(died_at, node.stop)
        if rng.random() < 0.7:
            world.simulation.call_at(died_at + rng.uniform(1.0, 10.0), partial(restart, world, node))
    world.publish_all(world.nodes, seconds=20.0)
    world.simulation.call_at(25.0, world.network.heal)
    assert world.simulation.run_until(40.0, done=lambda: world.simulation.now > 26.0 and world.are_equal())
    living = {node.author for node in world.living}
    world.simulation.run_until(160.0)  # a last heartbeat may be passed around until it expires
    for node in world.living:
        seen = set(node.gossip.liveness.live(node.clock.monotonic()))
        assert seen == living - {node.author}, "the living are seen by all, and the dead by none"


def test_a_killed_node_leaves_the_live_set_within_ten_seconds() -> None:
    world = settled(1, 8, base_period=2.0)
    world.simulation.run_until(10.0)
    world.nodes[0].stop()
    world.simulation.run_until(20.0)
    for node in world.living:
        assert not node.gossip.liveness.is_live(world.nodes[0].author, node.clock.monotonic())
        assert len(node.gossip.liveness.live(node.clock.monotonic())) == 6


def test_quiet_nodes_exchange_little_more_than_their_roots() -> None:
    world = settled(1, 8, base_period=1_000.0)
    world.simulation.run_until(400.0)
    assert world.are_equal()
    num_sessions = 8 * 400.0 / 10.0
    assert world.network.traffic
    assert sum(sent.num_bytes for sent in world.network.traffic.values()) < 2.2 * num_sessions * 90


@pytest.mark.parametrize("offset", [3_600.0, -3_600.0, -30 * 86_400.0])
def test_a_very_wrong_clock_hurts_its_owner_alone(offset: float) -> None:
    """The other nodes defer entries from the far future, and those from the distant past have expired for them."""
    world = settled(2, 8, base_period=2.0)
    stray = world.add_node()
    stray.clock.offset = offset
    stray.start(world.contacts())
    world.publish_all(world.nodes[:8], seconds=5.0)
    world.simulation.run_until(30.0)
    honest = world.nodes[:8]
    assert len({node.state.root for node in honest}) == 1
    assert all(not node.state.is_member(stray.author) for node in honest)
    assert all(len(node.gossip.liveness.live(node.clock.monotonic())) == 7 for node in honest)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_nodes", [8, pytest.param(60, marks=pytest.mark.soak)])
def test_halves_find_together_and_stay_together(num_nodes: int, seed: int) -> None:
    """They are apart for a minute, and each half has long chosen its neighbours within itself."""
    world = settled(seed, num_nodes, base_period=2.0)
    half = [node.author for node in world.nodes[: num_nodes // 2]]
    world.simulation.call_at(20.0, lambda: world.network.partition([half]))
    world.simulation.call_at(80.0, world.network.heal)
    world.publish_all(world.nodes, seconds=70.0)
    assert world.simulation.run_until(95.0, done=lambda: world.simulation.now > 80.0 and world.are_equal())
    for second in range(96, 141, 3):
        world.simulation.run_until(float(second))
        for node in world.nodes:
            assert len(node.gossip.liveness.live(node.clock.monotonic())) == num_nodes - 1, f"{second - 80} s later"


@pytest.mark.parametrize("offset", [3_600.0, -3_600.0, -30 * 86_400.0, 30 * 86_400.0])
def test_a_clock_that_is_set_right_brings_its_owner_back(offset: float) -> None:
    world = settled(2, 8, base_period=2.0)
    stray = world.nodes[3]
    world.simulation.call_at(5.0, lambda: setattr(stray.clock, "offset", offset))
    world.simulation.call_at(45.0, lambda: setattr(stray.clock, "offset", 0.0))
    for at in (10.0, 30.0):
        world.simulation.call_at(at, lambda: world.publish_all(world.nodes, seconds=5.0))
    world.simulation.run_until(44.0)
    others = [node for node in world.nodes if node is not stray]
    assert len({node.state.root for node in others}) == 1
    assert all(len(node.gossip.liveness.live(node.clock.monotonic())) == 6 for node in others)
    assert world.simulation.run_until(60.0, done=lambda: world.simulation.now > 46.0 and world.are_equal())
    world.simulation.run_until(70.0)
    assert world.are_equal()
    assert all(len(node.gossip.liveness.live(node.clock.monotonic())) == 7 for node in world.nodes)


@pytest.mark.parametrize("num_nodes", [60, pytest.param(500, marks=pytest.mark.soak)])
def test_many_join_within_ten_seconds(num_nodes: int) -> None:
    world = settled(4, 5, loss=0.02)
    newcomers = [world.add_node() for _ in range(num_nodes)]
    for index, node in enumerate(newcomers):
        world.simulation.call_at(10.0 * index / num_nodes, partial(start, world, node))
    world.simulation.run_until(60.0)
    assert all(len(node.state.members()) == num_nodes + 5 for node in world.nodes)
    assert all(len(node.gossip.liveness.live(node.clock.monotonic())) == num_nodes + 4 for node in world.nodes)


def test_a_fork_is_known_to_all_and_bars_its_author() -> None:
    world = settled(6, 12)
    culprit, now = world.nodes[0], UNIX_EPOCH + world.simulation.now
    stories = []
    for device in ("one story", "another"):
        writer = type(culprit.writer)(culprit.key, culprit.state.run_id)
        writer.marked(((0, int(now) + 100),))
        stories.append(writer.write(Kind.MEMBER, 0, Member(device=device), now + 40))
    for node, story in zip(world.nodes[1:3], stories, strict=True):
        node.gossip.merge(Delta((story.signed,)), culprit.author, now, node.clock.monotonic())
    world.simulation.run_until(20.0)
    for node in world.nodes:
        assert node.state.proof_of(culprit.author) is not None
        assert not node.state.is_member(culprit.author)
