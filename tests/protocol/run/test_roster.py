"""Seats: who a node knew first keeps them, whatever comes later, in whatever order, also from members that lie."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import pytest

from farandole.protocol.run import roster as roster_module
from farandole.protocol.run.invitations import (
    MAX_SINGLE_BEARERS,
    MAX_WITNESS_BYTES,
    Admission,
    InvitationError,
    InviteSecret,
    RevokedError,
    SeatTakenError,
    UnwitnessedError,
    decode_witness,
    invite_members,
    sign_witness,
)
from farandole.protocol.run.roster import Place, Roster
from farandole.protocol.state.entries import AdmissionProof, Delta, Kind, Revocation, Signed, decode_delta
from farandole.protocol.state.state import Outcome, RunState
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.messagepack import encode
from farandole.testnet.simulate.state import SharedRoster

from ..authors import CREATOR, NOW, RUN_ID, author_of, key_of, member, signed, tick_at

CREATOR_NUMBER = 255
T0 = int(NOW)
DAY = 86_400
EXPIRY = T0 + 7 * DAY
ANNA, BEN, CLEO, DORA, MALLORY = range(1, 6)
VALID: set[Admission] = set()


@lru_cache(maxsize=64)
def invitation(first: int, num_seats: int = 1, quota: int = 0) -> InviteSecret:
    """Return the creator's invite to these seats."""
    seats = range(first, first + num_seats)
    return invite_members(key_of(CREATOR_NUMBER), RUN_ID, bytes((first + 1,)) * 32, seats, EXPIRY, quota=quota)


@lru_cache(maxsize=65_536)
def admitted(
    who: int, seat: int, by: int | None = None, since: int = T0, invited: InviteSecret | None = None
) -> Admission:
    """Return an admission to a seat of an invite for that one, or of ``invited``; ``by``: its witness."""
    admission = (invited or invitation(seat)).admit(RUN_ID, author_of(who), seat)
    if by is None:
        return admission
    return msgspec.structs.replace(admission, witness=sign_witness(key_of(by), RUN_ID, admission, since))


def settled(*known: Admission) -> Roster:
    """Return the roster of a node that has been in the run for a while."""
    members = SharedRoster(RUN_ID, CREATOR, VALID)
    for admission in known:
        members.admit(admission)
    members.settle()
    return members


def are_members(members: Roster, *who: int) -> list[bool]:
    return [members.is_member(author_of(number)) for number in who]


def test_a_newcomer_is_admitted_by_the_member_that_it_shows_its_admission_to_and_by_others_on_that_ones_word() -> None:
    at_anna, at_ben = settled(admitted(ANNA, 0), admitted(BEN, 1)), settled(admitted(ANNA, 0), admitted(BEN, 1))
    shown = admitted(CLEO, 2)
    with pytest.raises(UnwitnessedError):
        at_ben.admit(shown)
    at_anna.admit(shown, T0 + 5.0)
    witness = at_anna.witness(shown, key_of(ANNA), T0 + 5.0)
    assert witness is not None
    assert len(encode(witness)) <= MAX_WITNESS_BYTES
    at_ben.admit(msgspec.structs.replace(shown, witness=decode_witness(encode(witness))))
    assert are_members(at_ben, CLEO) == [True]
    with pytest.raises(InvitationError, match="expired"):
        at_anna.admit(admitted(DORA, 3), EXPIRY + 1.0)
    at_ben.admit(admitted(DORA, 3), EXPIRY)
    for damaged in (b"", encode(witness)[:-1], encode(witness) + bytes(MAX_WITNESS_BYTES)):
        with pytest.raises(RemoteProtocolError):
            decode_witness(damaged)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (admitted(MALLORY, 5), UnwitnessedError),
        (admitted(MALLORY, 5, by=DORA), UnwitnessedError),
        (admitted(MALLORY, 5, by=MALLORY), InvitationError),
        (admitted(MALLORY, 5, by=ANNA, since=EXPIRY + 1), UnwitnessedError),
        (msgspec.structs.replace(admitted(MALLORY, 5), witness=admitted(CLEO, 5, by=ANNA).witness), InvitationError),
        (msgspec.structs.replace(admitted(MALLORY, 5), witness=admitted(MALLORY, 6, by=ANNA).witness), InvitationError),
    ],
    ids=["none", "a stranger", "itself", "after the expiry", "of another member", "of another seat"],
)
def test_what_no_member_has_witnessed_in_time_admits_nobody(case: Admission, error: type[Exception]) -> None:
    members = settled(admitted(ANNA, 0))
    with pytest.raises(error):
        members.admit(case)
    assert are_members(members, ANNA, MALLORY) == [True, False]


def test_a_holder_keeps_its_seat_against_any_key_and_any_time_and_across_restarts() -> None:
    """The attack: whoever has seen an invite signs keys into its seats, with a witness that invents the time."""
    invited = invitation(0, 4)
    holders = [admitted(who, who - 1, by=CREATOR_NUMBER, since=T0 + 100, invited=invited) for who in (ANNA, BEN, CLEO)]
    members = settled(*holders)
    members.admit(admitted(MALLORY, 3, by=CREATOR_NUMBER, since=T0 + 200, invited=invited))
    for life in range(2):
        for key in range(6, 80):
            for seat in range(4):
                with pytest.raises(InvitationError):
                    members.admit(
                        admitted(key, seat, by=MALLORY, since=0, invited=invited), T0 + 300.0 if life else None
                    )
        assert are_members(members, ANNA, BEN, CLEO, MALLORY) == [True] * 4
        stored = [encode(each) for each in (*holders, admitted(MALLORY, 3, by=CREATOR_NUMBER, invited=invited))]
        members = SharedRoster(RUN_ID, CREATOR, VALID)
        members.load([*stored, b"damaged", encode(invitation(9).admit(b"x" * 32, author_of(DORA), 9))])
        assert members.is_settled
        assert are_members(members, ANNA, DORA) == [True, False]


def test_what_is_stored_is_what_is_held_and_what_is_not_stored_is_offered_again() -> None:
    members = Roster(RUN_ID, CREATOR)
    members.admit(admitted(ANNA, 0, by=CREATOR_NUMBER))
    assert members.take_unsaved() == {}, "a newcomer may still choose another holder"
    members.settle()
    changed = members.take_unsaved()
    assert changed == {(CREATOR, 0): encode(admitted(ANNA, 0, by=CREATOR_NUMBER))}
    assert members.take_unsaved() == {}
    members.unsaved.update(changed)
    assert members.take_unsaved() == changed


def test_a_newcomer_that_is_told_of_two_holders_believes_the_creator_and_then_the_earlier_witness() -> None:
    """A witness that lies about the time gains nothing before its own admission."""
    anna, mallory = (
        admitted(ANNA, 0, by=CREATOR_NUMBER, since=T0),
        admitted(MALLORY, 9, by=CREATOR_NUMBER, since=T0 + 50),
    )
    cases = [
        (admitted(BEN, 1, by=ANNA, since=T0 + 10), admitted(CLEO, 1, by=MALLORY, since=0), BEN),
        (admitted(BEN, 1, by=ANNA, since=T0 + 60), admitted(CLEO, 1, by=MALLORY, since=0), CLEO),  # documented
        (admitted(BEN, 1, by=CREATOR_NUMBER, since=T0 + 90), admitted(CLEO, 1, by=MALLORY, since=0), BEN),
        (admitted(BEN, 1, by=ANNA, since=T0 + 90), admitted(CLEO, 1), BEN),
        (admitted(BEN, 1, by=ANNA, since=T0 + 90), admitted(CLEO, 1, by=DORA, since=0), BEN),
    ]
    for honest, other, winner in cases:
        for order in ((honest, other), (other, honest)):
            members = SharedRoster(RUN_ID, CREATOR, VALID)
            for admission in (anna, mallory, *order):
                with contextlib.suppress(SeatTakenError):
                    members.admit(admission)
            members.settle()
            assert are_members(members, BEN, CLEO) == [winner == BEN, winner == CLEO]
            for admission in order:
                with contextlib.suppress(SeatTakenError):
                    members.admit(admission)
            assert are_members(members, BEN, CLEO) == [winner == BEN, winner == CLEO]


def test_a_witness_of_two_holders_of_a_seat_is_not_believed_again_and_its_earlier_members_stay() -> None:
    members = settled(admitted(ANNA, 0), admitted(MALLORY, 1))
    members.admit(admitted(BEN, 2, by=MALLORY))
    with pytest.raises(SeatTakenError):
        members.admit(admitted(CLEO, 2, by=MALLORY, since=T0 - 5))
    assert members.false_witnesses == {author_of(MALLORY)}
    with pytest.raises(UnwitnessedError):
        members.admit(admitted(DORA, 3, by=MALLORY))
    assert are_members(members, ANNA, MALLORY, BEN, CLEO, DORA) == [True, True, True, False, False]
    framed = settled(admitted(ANNA, 0))
    framed.admit(admitted(BEN, 2, by=ANNA))
    with pytest.raises(InvitationError, match="not signed by its witness"):
        framed.admit(msgspec.structs.replace(admitted(CLEO, 2), witness=admitted(BEN, 2, by=ANNA).witness))
    assert not framed.false_witnesses, "nobody can sign for another"


def test_a_member_of_a_revoked_witness_stays_where_it_is_known_and_gets_another_witness() -> None:
    cleo = admitted(CLEO, 2, by=MALLORY)
    members = settled(admitted(ANNA, 0), admitted(MALLORY, 1, by=CREATOR_NUMBER), cleo)
    elsewhere = settled(admitted(ANNA, 0), admitted(MALLORY, 1))
    for each in (members, elsewhere):
        each.hear_creator(0, 1, frozenset({author_of(MALLORY)}))
    assert are_members(members, CLEO, MALLORY) == [True, False]
    assert members.needs_witness(author_of(CLEO))
    with pytest.raises(UnwitnessedError):
        elsewhere.admit(cleo)
    again = members.witness(cleo, key_of(ANNA), T0 + 30 * DAY)
    assert again is not None
    assert again.since == T0, "the first witness's word is passed on"
    elsewhere.admit(msgspec.structs.replace(cleo, witness=again))
    assert are_members(elsewhere, CLEO) == [True]
    assert not members.needs_witness(author_of(CLEO))


def test_what_a_newcomer_was_told_by_the_holder_of_an_expired_invite_gets_no_witness_of_it() -> None:
    """The attack: keys in free seats of an expired invite pass for members with one that joins, and show themselves."""
    invited = invitation(0, 8)
    alone, stranger, late = (admitted(10 + seat, seat, by=by, invited=invited) for seat, by in enumerate((None, 99, 1)))
    late = msgspec.structs.replace(late, witness=sign_witness(key_of(1), RUN_ID, late, EXPIRY + 1))
    one, other = (admitted(20 + way, 3 + way, by=21 - way, invited=invited) for way in (0, 1))
    honest, later = admitted(BEN, 5, by=CREATOR_NUMBER, invited=invited), admitted(CLEO, 6, by=BEN, invited=invited)
    members = settled(admitted(ANNA, 9, by=CREATOR_NUMBER), alone, stranger, late, one, other, honest, later)
    members.admit(own := admitted(DORA, 7, invited=invited), T0)
    assert members.witness(own, key_of(30), T0) is not None
    for admission, is_signed in (
        *((each, False) for each in (alone, stranger, late, one, other)),
        *((each, True) for each in (honest, later, own)),
    ):
        assert (members.witness(admission, key_of(30), EXPIRY + DAY) is not None) is is_signed
        assert members.witness(admission, key_of(30), EXPIRY) is not None, "as long as the invite is valid"


def test_nobody_signs_for_a_seat_that_it_does_not_know_for_sure() -> None:
    joining = Roster(RUN_ID, CREATOR)
    joining.admit(admitted(BEN, 1))
    assert joining.witness(admitted(BEN, 1), key_of(ANNA), T0) is None
    joining.settle()
    assert joining.witness(admitted(BEN, 1), key_of(ANNA), T0) is not None
    assert joining.witness(admitted(CLEO, 1), key_of(ANNA), T0) is None
    joining.hear_creator(0, 1, frozenset({author_of(BEN)}))
    assert joining.witness(admitted(BEN, 1), key_of(ANNA), T0) is None


def test_the_creators_word_outranks_seats_and_the_newest_counts() -> None:
    members = settled(admitted(ANNA, 0), admitted(BEN, 1))
    with pytest.raises(SeatTakenError):
        members.admit(admitted(CLEO, 1, by=ANNA))
    members.hear_creator(0, 5, frozenset({author_of(BEN)}), frozenset({author_of(CLEO)}))
    assert are_members(members, BEN, CLEO) == [False, True]
    members.hear_creator(0, 4, frozenset())
    assert are_members(members, BEN, CLEO) == [False, True], "an old word changes nothing"
    members.hear_creator(1, 1, frozenset({invitation(0).bearers[0]}))
    assert are_members(members, ANNA, BEN) == [False, False], "each index counts"
    members.hear_creator(2, 1, frozenset(), frozenset({author_of(ANNA)}))
    assert are_members(members, ANNA) == [True], "who is readmitted stays though its invite was revoked"
    members.hear_creator(0, 6, frozenset())
    assert are_members(members, BEN, CLEO) == [True, False]


def test_an_invite_for_a_few_has_a_bearer_for_each_and_one_for_many_has_one() -> None:
    few, many = invitation(20, MAX_SINGLE_BEARERS), invitation(40, MAX_SINGLE_BEARERS + 1)
    assert (len(set(few.bearers)), len(many.bearers)) == (MAX_SINGLE_BEARERS, 1)
    members = settled(*(admitted(who, 19 + who, invited=few) for who in (ANNA, BEN)))
    members.hear_creator(0, 1, frozenset({few.bearers[0]}))
    assert are_members(members, ANNA, BEN) == [False, True]
    with pytest.raises(RevokedError):
        members.admit(admitted(CLEO, 20, invited=few), T0)
    shared = few.admit(RUN_ID, author_of(CLEO), 40)
    with pytest.raises(InvitationError):
        members.admit(shared, T0)


def test_who_came_by_an_invite_is_known_with_those_that_they_invited() -> None:
    invite = invitation(20, MAX_SINGLE_BEARERS + 1, quota=2)
    anna, ben = (admitted(who, seat, invited=invite) for seat, who in ((20, ANNA), (21, BEN)))
    of_ben = invite_members(key_of(BEN), RUN_ID, b"b" * 32, range(2), EXPIRY, sponsor=ben)
    members = settled(anna, ben, admitted(CLEO, 0, by=BEN, invited=of_ben), admitted(DORA, 0))
    bearer = invite.invitation.bearer
    assert members.invited_by(bearer, {author_of(ANNA)}) == {author_of(BEN), author_of(CLEO)}
    assert members.invited_by(bearer, {author_of(BEN)}) == {author_of(ANNA)}


def test_seats_that_were_flooded_expel_nobody_and_are_free_again_when_their_sponsor_is_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster_module, "MAX_HELD", 10)
    sponsor = admitted(MALLORY, 1, by=CREATOR_NUMBER, invited=invitation(1, quota=100))
    of_mallory = invite_members(key_of(MALLORY), RUN_ID, b"m" * 32, range(100), EXPIRY, sponsor=sponsor)
    members = settled(admitted(ANNA, 0), sponsor)
    for seat in range(30):
        with contextlib.suppress(InvitationError):
            members.admit(admitted(100 + seat, seat, by=MALLORY, invited=of_mallory))
    assert sum(members.is_member(author_of(100 + seat)) for seat in range(30)) == 8
    assert are_members(members, ANNA, MALLORY) == [True, True]
    with pytest.raises(InvitationError, match="as many as its nodes remember"):
        members.admit(admitted(BEN, 2), T0)
    members.hear_creator(0, 1, frozenset({author_of(MALLORY)}))
    members.admit(admitted(BEN, 2), T0)
    assert are_members(members, ANNA, BEN) == [True, True]
    assert sum(row is None for row in members.take_unsaved().values()) == 8


# Orders and partitions


@dataclass
class Node:
    """A member and its roster, on its side of a divided run."""

    who: int
    side: int
    members: Roster
    disk: dict[Place, bytes | None] = field(default_factory=dict)

    def restart(self) -> None:
        self.disk.update(self.members.take_unsaved())
        self.members = SharedRoster(RUN_ID, CREATOR, VALID)
        self.members.load([row for row in self.disk.values() if row is not None])


FOUNDERS = range(200, 205)
SEATS = invitation(0, 4)
KEYS = range(1, 9)
"""Keys for the four seats: more than there are."""


def world(num_sides: int, rng: random.Random) -> list[Node]:
    founders = [admitted(who, 100 + index, by=CREATOR_NUMBER) for index, who in enumerate(FOUNDERS)]
    return [Node(who, rng.randrange(num_sides), settled(*founders)) for who in FOUNDERS]


def show(node: Node, who: int, now: int) -> Admission | None:
    """Let a key take the first seat that a node gives it; return what the node has witnessed."""
    for number in range(4):
        shown = admitted(who, (who + number) % 4, invited=SEATS)
        with contextlib.suppress(SeatTakenError):
            node.members.admit(shown, now)
            witness = node.members.witness(shown, key_of(node.who), now)
            return msgspec.structs.replace(shown, witness=witness)
    return None


def holders(nodes: list[Node]) -> dict[int, set[bytes]]:
    """Return the members that hold each seat at some node."""
    found: dict[int, set[bytes]] = {seat: set() for seat in range(4)}
    for node in nodes:
        for who in range(1, 60):
            admission = node.members.admission_of(author_of(who))
            if admission is not None:
                found[admission.seat].add(admission.member)
    return found


@pytest.mark.parametrize("num_seeds", [200, pytest.param(1_000, marks=pytest.mark.soak)])
def test_in_no_order_of_arrival_is_a_member_expelled_by_members_that_lie(num_seeds: int) -> None:
    """A liar with the invite's text and a seat signs keys into all seats, with any time, and sends each to anybody."""
    for seed in range(num_seeds):
        rng = random.Random(seed)
        nodes, sent, seen = world(2, rng), list[Admission](), dict[int, set[int]]()
        liar = show(nodes[0], 50, T0)
        assert liar is not None
        sent.append(liar)
        for step in range(60):
            node, now = rng.choice(nodes), T0 + step
            if rng.random() < 0.15 and (taken := show(node, rng.choice(KEYS), now)) is not None:
                sent.append(taken)
            if rng.random() < 0.3:
                since = rng.choice((0, T0, now))
                sent.append(admitted(rng.randrange(51, 60), rng.randrange(4), by=50, since=since, invited=SEATS))
            if rng.random() < 0.05:
                node.restart()
            with contextlib.suppress(SeatTakenError, UnwitnessedError):
                node.members.admit(rng.choice(sent))
            known = {who for who in range(1, 60) if node.members.is_member(author_of(who))}
            assert known >= seen.get(node.who, set()), seed
            seen[node.who] = known
            assert len(known) <= 4, "a node never has more members than seats"


@pytest.mark.parametrize("num_seeds", [200, pytest.param(1_000, marks=pytest.mark.soak)])
def test_a_divided_run_has_at_most_one_holder_of_a_seat_in_each_part_and_keeps_them(num_seeds: int) -> None:
    num_doubled = 0
    for seed in range(num_seeds):
        rng = random.Random(seed)
        num_sides = rng.choice((1, 2, 3))
        nodes, sent = world(num_sides, rng), list[Admission]()
        for step, who in enumerate(rng.sample(KEYS, 6)):
            door = rng.choice(nodes)
            if (taken := show(door, who, T0 + step)) is not None:
                sent.append(taken)
                for node in nodes:
                    if node.side == door.side and node is not door:
                        node.members.admit(taken)
        divided = holders(nodes)
        assert all(len(found) <= num_sides for found in divided.values()), seed
        for _ in range(3):  # the parts meet again, and some nodes restart
            for node in nodes:
                if rng.random() < 0.3:
                    node.restart()
                for admission in rng.sample(sent, len(sent)):
                    with contextlib.suppress(SeatTakenError, UnwitnessedError):
                        node.members.admit(admission)
        healed = holders(nodes)
        assert healed == divided, seed
        for node in nodes:
            assert sum(node.members.is_member(author_of(who)) for who in KEYS) <= 4
            assert not node.members.false_witnesses
        num_doubled += any(len(found) > 1 for found in healed.values())
    assert num_doubled, "the parts did disagree"


# In the run state


def in_state(number: int, kind: Kind, payload: AdmissionProof | Revocation, at: float = NOW) -> Signed:
    return signed(number, kind, 0, tick_at(kind, at), payload)


def test_a_revoked_member_is_out_for_the_runs_life_while_the_creators_node_is_off() -> None:
    """Another member keeps the revocation, also over a restart, and gives it to those that come later."""
    anna, ben = admitted(ANNA, 0, by=CREATOR_NUMBER), admitted(BEN, 1, by=CREATOR_NUMBER)
    state = RunState(RUN_ID, CREATOR, roster=settled(anna, ben))
    revoked = in_state(CREATOR_NUMBER, Kind.REVOCATION, Revocation((author_of(BEN),)))
    state.merge(Delta((revoked, in_state(ANNA, Kind.ADMISSION, AdmissionProof(encode(anna))))), NOW)
    for days in (22, 400):
        later = NOW + days * DAY
        state.expire(later)
        back = in_state(BEN, Kind.ADMISSION, AdmissionProof(encode(ben)), later)
        assert (
            state.merge(Delta((back, member(BEN, tick_at(Kind.MEMBER, later)))), later).outcomes
            == [Outcome.UNINVITED] * 2
        )
        stored = state.export(CREATOR)
        assert stored is not None
        for restarted in (settled(anna, ben), Roster(RUN_ID, CREATOR)):
            other = RunState(RUN_ID, CREATOR, roster=restarted)
            other.merge(decode_delta(stored), later)
            other.merge(Delta((back,)), later)
            assert not restarted.is_member(author_of(BEN))


def test_replayed_entries_of_a_member_that_moved_to_another_seat_change_nothing() -> None:
    old, new = admitted(ANNA, 0, by=CREATOR_NUMBER), admitted(ANNA, 1, by=CREATOR_NUMBER, since=T0 + 50)
    roster = settled(old)
    state = RunState(RUN_ID, CREATOR, roster=roster)
    entries = [
        in_state(ANNA, Kind.ADMISSION, AdmissionProof(encode(each)), NOW + at) for each, at in ((old, 0), (new, 50))
    ]
    for entry, outcome in ((entries[0], Outcome.NEW), (entries[1], Outcome.NEW), (entries[0], Outcome.OLD)):
        assert state.merge(Delta((entry,)), NOW + 60).outcomes == [outcome]
        roster.hear_creator(0, 1, frozenset({invitation(0).bearers[0]} if outcome is Outcome.OLD else ()))
    assert are_members(roster, ANNA) == [True], "its first invite was revoked, and it has another"
    with pytest.raises(InvitationError):
        roster.admit(admitted(BEN, 0, by=MALLORY))
