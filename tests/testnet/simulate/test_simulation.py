"""The simulator keeps a network's promises, and only those."""

from __future__ import annotations

from farandole.testnet.simulate.simulation import Network, Simulation

ALICE, BOB, CAROL = b"alice", b"bob", b"carol"


def test_calls_happen_in_order_of_time_then_of_asking() -> None:
    simulation = Simulation(0)
    seen: list[str] = []
    simulation.call_at(2.0, lambda: seen.append("second"))
    simulation.call_at(1.0, lambda: seen.append("first"))
    simulation.call_at(2.0, lambda: seen.append("third"))
    simulation.call_at(2.0, lambda: seen.append("never")).cancel()
    simulation.run_until(1.5)
    assert (seen, simulation.now) == (["first"], 1.5)
    assert simulation.run_until(9.0, done=lambda: len(seen) == 2)
    assert (seen, simulation.now) == (["first", "second"], 2.0)
    simulation.run_until(9.0)
    assert (seen, simulation.now) == (["first", "second", "third"], 9.0)


def test_ordered_links_keep_their_order_and_others_do_not() -> None:
    def arrivals(ordered: bool) -> list[bytes]:
        simulation = Simulation(3)
        network = Network(simulation, latency=(0.0, 1.0), ordered=ordered)
        seen: list[bytes] = []
        network.attach(ALICE, lambda sender, payload: None)
        network.attach(BOB, lambda sender, payload: seen.append(payload))
        for index in range(32):
            network.send(ALICE, BOB, bytes((index,)))
        simulation.run_until(2.0)
        return seen

    in_order = [bytes((index,)) for index in range(32)]
    assert arrivals(ordered=True) == in_order
    assert arrivals(ordered=False) != in_order
    assert sorted(arrivals(ordered=False)) == in_order


def test_the_dead_and_the_other_side_hear_nothing() -> None:
    simulation = Simulation(0)
    network = Network(simulation)
    heard: list[bytes] = []
    for name in (ALICE, BOB, CAROL):
        network.attach(name, lambda sender, payload: heard.append(payload))
    network.partition([[ALICE], [BOB, CAROL]])
    network.send(ALICE, BOB, b"across")
    network.send(CAROL, BOB, b"inside")
    simulation.run_until(1.0)
    network.heal()
    network.send(ALICE, BOB, b"healed")
    simulation.run_until(2.0)
    network.send(ALICE, BOB, b"to a past life")
    network.kill(BOB)
    network.attach(BOB, lambda sender, payload: heard.append(payload))
    network.kill(CAROL)
    network.send(ALICE, CAROL, b"to the dead")
    simulation.run_until(3.0)
    assert heard == [b"inside", b"healed"]


def test_loss_takes_its_share() -> None:
    simulation = Simulation(0)
    network = Network(simulation, loss=0.25)
    heard: list[bytes] = []
    network.attach(ALICE, lambda sender, payload: None)
    network.attach(BOB, lambda sender, payload: heard.append(payload))
    for _ in range(4_000):
        network.send(ALICE, BOB, b"?")
    simulation.run_until(1.0)
    assert 2_900 < len(heard) < 3_100


def test_streams_turn_loss_into_delay() -> None:
    simulation = Simulation(0)
    network = Network(simulation, latency=(0.1, 0.1), loss=0.25)
    heard: list[float] = []
    network.attach(ALICE, lambda sender, payload: None)
    network.attach(BOB, lambda sender, payload: heard.append(simulation.now))
    for _ in range(1_000):
        network.send(ALICE, BOB, b"?", is_stream=True)
    simulation.run_until(20.0)
    assert len(heard) >= 998
    assert {round(at, 1) for at in heard} >= {0.1, 0.4, 1.0}
