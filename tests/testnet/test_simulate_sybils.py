"""Four invented authors to each honest one: tables that hold fewer than all of them, and runs of invited members."""

from __future__ import annotations

import hashlib
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.entries import AdmissionProof, Delta, Kind, Member
from farandole.protocol.identity import public_bytes
from farandole.protocol.invitations import Admission, invite_members
from farandole.protocol.state import MAX_AUTHORS
from farandole.protocol.wire import encode
from farandole.protocol.writer import Writer
from farandole.testnet.simulate_state import RUN_ID, SimulatedNode, World, key_of
from farandole.testnet.simulation import UNIX_EPOCH

NUM_LIARS = 4
SYBILS_PER_HONEST = 4
AUTHORS_PER_HONEST = MAX_AUTHORS / 1_000


def network_of(peer: bytes) -> str:
    """A network of its own for each peer, as far as a liar can wish for."""
    return hashlib.sha256(peer).hexdigest()


def sybil_entries(number: int, now: float) -> Delta:
    """What so many invented authors say of themselves."""
    entries = []
    for index in range(number):
        writer = Writer(key_of(1_000_000 + index), RUN_ID)
        writer.marked(((0, int(now) + 100),))
        entries.append(writer.write(Kind.MEMBER, 0, Member(device="invented"), now).signed)
    return Delta(tuple(entries))


def let_lie(world: World, liar: SimulatedNode, sybils: Delta) -> None:
    """A member that knows every invented author, tells its neighbours again and again, and whoever syncs with it."""
    liar.state.places.capacity = 1_000_000
    liar.start(world.contacts())

    def tell() -> bool:
        now, unix = world.simulation.now, liar.clock.unix()
        liar.gossip.merge(sybils, liar.author, unix, now, forward=False, is_asked=True)
        liar.gossip.push.queue(sybils.entries, (), None)
        return True

    world.simulation.call_every(10.0, tell)


@pytest.mark.parametrize("num_honest", [50, pytest.param(120, marks=pytest.mark.soak)])
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
    assert any(node.state.is_full for node in everybody), "there are enough to crowd others out"
    for node in everybody:
        assert len(node.state.places) <= capacity
        assert all(other.author in node.state for other in honest)
    written = {world.publish_progress(node).id for node in honest}
    world.simulation.run_until(75.0)
    assert all(written <= node.seen_at.keys() for node in everybody)

    def are_newcomers_known() -> bool:
        return all(other.author in node.state for node in everybody for other in newcomers)

    assert world.simulation.run_until(900.0, done=world.simulation.at_most_every(10.0, are_newcomers_known))
    print(f"newcomers are known to all {world.simulation.now - 40.0:.0f} s after they came")
    assert all(other.author in node.state for node in everybody for other in honest)
    assert all(len(invented & set(node.state.authors)) < len(invented) for node in everybody)


QUOTA = 8
FOR_EVER = int(UNIX_EPOCH) + 10**9


def sybil_admissions(sybils: list[int], sponsor: Admission, sponsor_key: Ed25519PrivateKey, now: float) -> Delta:
    """What the invented authors say of themselves, each with an admission to one of their sponsor's seats."""
    invite = invite_members(sponsor_key, RUN_ID, bytes(32), range(QUOTA), FOR_EVER, sponsor=sponsor)
    entries = []
    for index, number in enumerate(sybils):
        writer = Writer(key_of(number), RUN_ID)
        writer.marked(((0, int(now) + 100),))
        admission = encode(invite.admit(RUN_ID, writer.author, index % QUOTA))
        entries.append(writer.write(Kind.ADMISSION, 0, AdmissionProof(admission), now).signed)
        entries.append(writer.write(Kind.MEMBER, 0, Member(device="invented"), now).signed)
    return Delta(tuple(entries))


@pytest.mark.parametrize("are_invited", [False, True])
@pytest.mark.parametrize("num_honest", [40, pytest.param(120, marks=pytest.mark.soak)])
def test_invented_authors_get_nothing_without_an_invite_and_with_one_its_inviters_quota(
    num_honest: int, are_invited: bool
) -> None:
    creator = key_of(999_999)
    invite = invite_members(creator, RUN_ID, b"honest".ljust(32), range(num_honest + 1), FOR_EVER)
    sponsors = invite_members(
        creator, RUN_ID, b"sponsor".ljust(32), range(num_honest + 1, num_honest + 2), FOR_EVER, quota=QUOTA
    )
    liar_key = key_of(num_honest + 1)
    seats = {public_bytes(key_of(number)): number for number in range(1, num_honest + 1)}
    admissions = {author: invite.admit(RUN_ID, author, seat) for author, seat in seats.items()}
    sponsor = admissions[public_bytes(liar_key)] = sponsors.admit(RUN_ID, public_bytes(liar_key), num_honest + 1)
    world = World(
        7,
        num_honest,
        loss=0.02,
        network_of=network_of,
        creator=public_bytes(creator),
        admission_of=lambda author: encode(admissions[author]),
    )
    world.settle()
    honest = list(world.nodes)
    numbers = list(range(1_000_000, 1_000_000 + num_honest * SYBILS_PER_HONEST))
    invented = {public_bytes(key_of(number)) for number in numbers}
    now = UNIX_EPOCH + 1.0
    sybils = sybil_admissions(numbers, sponsor, liar_key, now) if are_invited else sybil_entries(len(numbers), now)
    liar = world.add_node()
    world.simulation.call_at(1.0, partial(let_lie, world, liar, sybils))
    world.simulation.run_until(60.0)
    written = {world.publish_progress(node).id for node in honest}
    world.simulation.run_until(75.0)
    for node in honest:
        assert all(other.author in node.state for other in honest)
        assert written <= node.seen_at.keys()
        known = {author for author in invented if author in node.state}
        assert len(known) == (QUOTA if are_invited else 0)
        assert known == {author for author in invented if author in honest[0].state}, "all keep the same ones"
