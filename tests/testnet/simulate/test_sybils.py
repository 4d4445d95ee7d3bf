"""Four invented authors for each honest one: tables too small for all of them, and runs of invited members."""

from __future__ import annotations

from functools import partial

import pytest

from farandole.protocol.state.state import MAX_AUTHORS
from farandole.testnet.simulate.simulation import UNIX_EPOCH
from farandole.testnet.simulate.state import World
from farandole.testnet.simulate.sybils import (
    NUM_LIARS,
    QUOTA,
    Admissions,
    SybilScenario,
    let_lie,
    network_of,
    play,
    sybil_entries,
)

SYBILS_PER_HONEST = 4
AUTHORS_PER_HONEST = MAX_AUTHORS / 1_000


@pytest.mark.parametrize("num_honest", [30, pytest.param(120, marks=pytest.mark.soak)])
def test_honest_authors_stay_and_reach_all_beside_four_times_as_many_invented_ones(num_honest: int) -> None:
    capacity = int(num_honest * AUTHORS_PER_HONEST)
    world = World(7, num_honest, loss=0.02, max_authors=capacity, network_of=network_of)
    world.settle()
    honest = list(world.nodes)
    sybils = sybil_entries(num_honest * SYBILS_PER_HONEST, UNIX_EPOCH + 1.0)
    invented = {signed.author for signed in sybils.entries}
    liars = [world.add_node() for _ in range(NUM_LIARS)]
    for liar in liars:
        world.simulation.call_at(1.0, partial(let_lie, world, liar, sybils))
    newcomers = [world.add_node() for _ in range(max(3, num_honest // 50))]
    contacts = [node.author for node in honest]
    for node in newcomers:
        world.simulation.call_at(40.0, partial(node.start, world.simulation.rng.sample(contacts, 3)))
    world.simulation.run_until(60.0)
    everybody = [*honest, *newcomers]
    assert any(not node.state.num_free for node in everybody), "there are enough to crowd others out"
    for node in everybody:
        assert len(node.state.places) <= capacity
        assert all(other.author in node.state for other in honest)
    written = {world.publish_progress(node).id for node in honest}
    world.simulation.run_until(75.0)
    num_seen = sum(len(written & node.seen_at.keys()) for node in everybody)
    assert num_seen >= 0.99 * len(written) * len(everybody)
    # Anti-entropy brings what pushes have lost; full tables compare a thirty-second of themselves at a time.
    assert world.simulation.run_until(
        240.0, done=lambda: all(written <= node.seen_at.keys() for node in everybody), every=5.0
    )

    def are_newcomers_known() -> bool:
        return all(other.author in node.state for node in everybody for other in newcomers)

    assert world.simulation.run_until(900.0, done=are_newcomers_known, every=10.0)
    print(f"newcomers are known to all {world.simulation.now - 40.0:.0f} s after they came")
    assert all(other.author in node.state for node in everybody for other in honest)
    assert all(len(invented & set(node.state.authors)) < len(invented) for node in everybody)


# Row 34 of the reliability goals: 5 % loss, and a tenth of the members replaced each minute.
MOST_SECONDS = 12.0
MOST_MESSAGES, MOST_BYTES = 20.0, 20_000.0


@pytest.mark.parametrize(("admission", "most_invented"), [("uninvited", 0), ("invited", QUOTA)])
def test_invented_authors_get_nothing_without_an_invite_and_with_one_its_inviters_quota(
    admission: Admissions, most_invented: int
) -> None:
    outcome = play(SybilScenario(40, 40 * SYBILS_PER_HONEST, admission), seed=7)
    assert outcome.kept == 1.0
    assert outcome.most_invented == most_invented
    assert outcome.are_equal, "all keep the same ones"
    assert outcome.delay(0.99) <= MOST_SECONDS


def test_entries_reach_all_honest_nodes_of_an_open_run_while_invented_authors_fill_it() -> None:
    outcome = play(SybilScenario(40, 40 * SYBILS_PER_HONEST, max_authors=int(40 * AUTHORS_PER_HONEST)), seed=7)
    assert outcome.kept == 1.0
    assert 0 < outcome.most_invented < 40 * SYBILS_PER_HONEST
    assert outcome.delay(0.99) <= MOST_SECONDS
    assert outcome.messages <= MOST_MESSAGES
    assert outcome.num_bytes <= MOST_BYTES


def test_members_of_several_invites_of_the_creator_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats are the creator's, not an invite's: two invites to the same seats would let members displace each other."""
    monkeypatch.setattr("farandole.testnet.simulate.sybils._SEATS", 8)
    outcome = play(SybilScenario(20, 0, "uninvited", replaced_a_minute=0.3), seed=1)
    assert (outcome.kept, outcome.are_equal) == (1.0, True)
