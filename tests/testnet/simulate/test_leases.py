"""Whole epochs of many nodes that come and go, in virtual time; only slices that trainers drew count."""

from __future__ import annotations

import random
from functools import partial

import pytest

from farandole.protocol.epochs.lease_claims import FASTEST_RATIO, MAX_SHARE
from farandole.protocol.run.slices import Sections, parts
from farandole.protocol.state.entries import Kind, Lease, LeasedSlices
from farandole.testnet.simulate.state import SimulatedNode, World

from .leasing import CORPUS, Epochs

MAX_MEAN = 1.1


def epochs_of(
    seed: int,
    num_nodes: int,
    seconds: float = 0.0,
    *,
    base_period: float = 2.0,
    loss: float = 0.03,
    num_slices: int | None = None,
    paces: tuple[float, float] = (0.5, 5.0),
) -> Epochs:
    """Return epochs with about ``seconds`` of work for these nodes, which all begin at once."""
    world = World(seed, num_nodes, loss=loss, base_period=base_period)
    world.settle()
    epochs = Epochs(world, num_slices or int(num_nodes * 2.75 * seconds), paces=paces)
    for node in list(world.nodes):
        epochs.begin(node)
    return epochs


def check(epochs: Epochs, most: float = MAX_MEAN) -> None:
    """All slices were trained on, each about once."""
    assert epochs.is_over
    for epoch in range(epochs.num_epochs):
        assert epochs.missed(epoch) == 0
        assert epochs.mean(epoch) <= most


def replace_a_third(epochs: Epochs, seconds: float) -> None:
    """Replace a third of the nodes, one after the other; two in three die, the third leaves."""
    number = len(epochs.world.nodes) // 3
    for index in range(number):
        at = seconds * (0.1 + 0.8 * index / number)
        epochs.world.simulation.call_at(at, partial(epochs.replace, leaves=index % 3 == 2))


@pytest.mark.parametrize("seed", range(8))
def test_a_third_of_the_nodes_is_replaced_in_an_epoch(seed: int) -> None:
    epochs = epochs_of(seed, 9, seconds=100.0)
    replace_a_third(epochs, 100.0)
    seconds = epochs.play(600.0)
    check(epochs)
    assert seconds <= 200.0


@pytest.mark.soak
@pytest.mark.parametrize(("num_nodes", "seconds", "num_seeds"), [(24, 200.0, 10), (100, 400.0, 2), (300, 300.0, 1)])
def test_a_third_of_many_nodes_is_replaced_in_an_epoch(num_nodes: int, seconds: float, num_seeds: int) -> None:
    """Prints its figures. The largest case takes ten minutes: every node hears of every lease, in one process."""
    for seed in range(num_seeds):
        epochs = epochs_of(seed, num_nodes, seconds, base_period=10.0)
        replace_a_third(epochs, seconds)
        took = epochs.play(6 * seconds)
        print(
            f"\n{num_nodes} nodes, {num_nodes // 3} replaced, {epochs.num_slices:,} slices, seed {seed}: over after "
            f"{took:.0f} s, {epochs.missed()} missed, each trained on {epochs.mean():.4f} times"
        )
        check(epochs)


def test_a_network_cut_in_two_does_no_more_twice_than_both_did_meanwhile() -> None:
    epochs = epochs_of(1, 8, seconds=120.0)
    simulation, network = epochs.world.simulation, epochs.world.network
    half = [node.author for node in epochs.world.nodes[:4]]
    simulation.call_at(40.0, lambda: network.partition([half]))
    simulation.call_at(60.0, network.heal)
    epochs.play(600.0)
    check(epochs, MAX_MEAN + 20.0 / 120.0)


def test_one_after_the_other_two_epochs_and_nobody_mixes_them_up() -> None:
    epochs = epochs_of(2, 6, seconds=60.0)
    for leasing in epochs.nodes:
        leasing.leases.num_epochs = epochs.num_epochs = 2
    epochs.counts.append(type(epochs.counts[0])())
    replace_a_third(epochs, 120.0)
    epochs.play(600.0)
    check(epochs)


def test_many_slices_of_which_one_node_never_does_its_own() -> None:
    """The nodes are fast; one leases, lives and never trains."""
    epochs = epochs_of(3, 4, loss=0.0, num_slices=300_000, paces=(1_200.0, 2_400.0))
    epochs.nodes[0].is_training = False
    ideal = epochs.num_slices / sum(leasing.pace for leasing in epochs.nodes[1:])
    seconds = epochs.play(600.0)
    check(epochs)
    assert seconds <= ideal + 3 * epochs.nodes[1].leases.patience


class Liar:
    """Publishes anything harmful, every few seconds, and trains on nothing."""

    def __init__(self, epochs: Epochs, node: SimulatedNode) -> None:
        self._sections = Sections(epochs.num_slices)
        self._node = node
        self._rng = random.Random(f"liar {node.number}")
        epochs.world.simulation.call_every(3.0, self._lie)

    def _lie(self) -> bool:
        for index, lease in enumerate((self._leases(), *self._bits())):
            if self._node.writer.delay(Kind.LEASE, index, self._node.clock.unix()) <= 0:
                self._node.publish(Kind.LEASE, index, lease)
        return True

    def _leases(self) -> Lease:
        num_slices, largest = self._sections.num_slices, self._sections.num_slices // MAX_SHARE
        firsts = [self._rng.randrange(num_slices - largest) for _ in range(2)]
        lies = (
            Lease(0, CORPUS, (LeasedSlices(0, num_slices, 0), LeasedSlices(0, num_slices, num_slices))),  # all slices
            Lease(0, CORPUS, tuple(LeasedSlices(first, largest, 0) for first in firsts)),  # also others' slices
            Lease(2**31 - 1, CORPUS),
            Lease(1, CORPUS),
        )
        return self._rng.choice(lies)

    def _bits(self) -> list[Lease]:
        return [Lease(0, CORPUS, (), raw) for raw in parts(self._sections.all)]


@pytest.mark.parametrize("seed", range(2))
def test_two_liars_among_eight_cost_the_others_little(seed: int) -> None:
    epochs = epochs_of(seed, 8, seconds=60.0)
    for _ in range(2):
        node = epochs.world.add_node()
        node.start(epochs.world.contacts())
        Liar(epochs, node)
    seconds = epochs.play(600.0)
    check(epochs)
    assert seconds <= 60.0 + 3 * epochs.nodes[0].leases.patience


class EndsEpochs(Liar):
    """Claims that leases which it never held are done, that all slices are done, and that the epochs are over."""

    def _leases(self) -> Lease:
        largest = self._sections.num_slices // MAX_SHARE
        firsts = [self._rng.randrange(MAX_SHARE) * largest for _ in range(8)]
        whole = tuple(LeasedSlices(first, largest, largest) for first in firsts)
        return self._rng.choice((Lease(0, CORPUS, whole), Lease(0, CORPUS, whole), Lease(1, CORPUS)))


def end_epochs(epochs: Epochs, num_liars: int, *, are_met: bool = False) -> None:
    """Let liars join; ``are_met``: they have exchanged with all nodes, and sign the greatest possible speed."""
    for _ in range(num_liars):
        node = epochs.world.add_node()
        node.start(epochs.world.contacts())
        EndsEpochs(epochs, node)
        if are_met:
            epochs.proven.add(node.author)
            epochs.speeds[node.author] = 1e9


@pytest.mark.parametrize(("num_honest", "num_liars", "seconds"), [(4, 1, 60.0), (4, 9, 60.0), (31, 2, 20.0)])
def test_who_was_never_met_ends_no_epoch(num_honest: int, num_liars: int, seconds: float) -> None:
    """One liar among four, if every author was believed, ended an epoch of any length within 22 seconds."""
    epochs = epochs_of(1, num_honest, seconds)
    end_epochs(epochs, num_liars)
    took = epochs.play(1_200.0)
    print(
        f"\n{num_honest} honest, {num_liars} liars: over after {took:.0f} s, {epochs.missed()} missed, "
        f"each trained on {epochs.mean():.4f} times"
    )
    check(epochs)


@pytest.mark.parametrize("seed", range(4))
def test_two_nodes_that_end_a_short_epoch_at_once_share_what_is_left(seed: int) -> None:
    """All is doubted, so both search for the last slices together; they once found the same ones, a sixth of all."""
    epochs = epochs_of(seed, 2, num_slices=167, paces=(2.0, 2.5))
    end_epochs(epochs, 1)
    epochs.play(600.0)
    check(epochs, 1.02)


def test_who_was_met_and_lies_claims_no_more_than_the_fastest_node_could_have_done() -> None:
    epochs = epochs_of(1, 4, 60.0, num_slices=100_000)
    end_epochs(epochs, 1, are_met=True)
    epochs.play(30.0)
    fastest = FASTEST_RATIO * max(leasing.pace for leasing in epochs.nodes)
    for leasing in epochs.nodes:
        assert not leasing.leases.epoch
        assert leasing.leases.done.count <= fastest * 30.0 + epochs.counts[0].total()


def test_a_node_a_hundred_times_as_fast_is_not_held_up_and_its_work_is_not_done_again() -> None:
    world = World(5, 5, base_period=2.0)
    world.settle()
    epochs = Epochs(world, 30_000)
    for node in world.nodes[1:]:
        epochs.begin(node, 4.0)
    epochs.begin(world.nodes[0], 400.0)
    took = epochs.play(600.0)
    print(f"\nover after {took:.0f} s, each trained on {epochs.mean():.4f} times")
    check(epochs)
    assert took <= 2 * 30_000 / 416, "109 s where all are believed at once, and the slow ones train their samples last"
