"""Admissions: only one signed by the creator or a sponsor admits a member."""

from __future__ import annotations

import random
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.invitations import (
    MAX_ADMISSION_BYTES,
    MAX_PASS_BYTES,
    Admission,
    InvitationError,
    InviteSecret,
    check_admission,
    decode_admission,
    decode_pass,
    decode_secret,
    invite_members,
    sign_pass,
)
from farandole.protocol.run.roster import MAX_VISITORS, Roster
from farandole.protocol.state.entries import AdmissionProof, Delta, Kind, Proof, Revocation, Signed, entry_id
from farandole.protocol.state.state import Outcome, RunState
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.messagepack import encode

from ..authors import CREATOR, NOW, RUN_ID, author_of, key_of, member, signed, tick_at

CREATOR_NUMBER = 255
LATER = int(NOW) + 86_400
ANNA, BEN, CLEO, DORA, MALLORY = range(1, 6)


def invitation(number: int = 0, seats: range = range(1), quota: int = 0, expires_at: int = LATER) -> InviteSecret:
    """Return an invitation of the creator."""
    secret = bytes((number + 1,)) * 32
    return invite_members(key_of(CREATOR_NUMBER), RUN_ID, secret, seats, expires_at, quota=quota)


def sponsored(sponsor: Admission, issuer: int, seats: range, number: int = 99, quota: int = 0) -> InviteSecret:
    secret = bytes((number,)) * 32
    return invite_members(key_of(issuer), RUN_ID, secret, seats, LATER, sponsor=sponsor, quota=quota)


def admit(invited: InviteSecret, who: int, seat: int = 0) -> Admission:
    return invited.admit(RUN_ID, author_of(who), seat)


def roster() -> Roster:
    return Roster(RUN_ID, CREATOR)


def test_an_invited_member_is_admitted_and_the_invite_survives_the_way() -> None:
    invited = decode_secret(encode(invitation(seats=range(3))))
    admission = decode_admission(encode(admit(invited, ANNA, 2)))
    members = roster()
    members.admit(admission)
    assert members.is_member(author_of(ANNA))
    assert members.is_member(CREATOR)
    assert not members.is_member(author_of(BEN))
    assert members.sponsor_of(author_of(ANNA)) == CREATOR


def test_a_sponsor_invites_as_many_as_its_quota() -> None:
    of_anna = admit(invitation(quota=2), ANNA)
    members = roster()
    members.admit(admit(sponsored(of_anna, ANNA, range(2)), BEN, 1))
    assert members.sponsor_of(author_of(BEN)) == author_of(ANNA)
    with pytest.raises(InvitationError, match="may give 2 seats"):
        members.admit(admit(sponsored(of_anna, ANNA, range(3)), CLEO, 1))
    with pytest.raises(InvitationError, match="cannot invite others"):
        members.admit(admit(sponsored(of_anna, ANNA, range(2), quota=1), CLEO))
    of_ben = admit(sponsored(of_anna, ANNA, range(2)), BEN, 1)
    with pytest.raises(InvitationError, match="cannot invite others"):
        members.admit(admit(sponsored(of_ben, BEN, range(1)), CLEO))


def test_the_longest_admission_fits() -> None:
    top = range(2**31 - 1_024, 2**31)
    of_anna = admit(invitation(seats=top, quota=1_024, expires_at=2**40), ANNA, 2**31 - 1)
    longest = admit(sponsored(of_anna, ANNA, range(1_000, 1_024)), BEN, 1_023)
    check_admission(longest, RUN_ID, CREATOR)
    assert len(encode(longest)) <= MAX_ADMISSION_BYTES
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode_admission(bytes(MAX_ADMISSION_BYTES + 1))


def forgeries() -> dict[str, Admission]:
    good = admit(invitation(seats=range(2)), ANNA)
    of_mallory = invite_members(key_of(MALLORY), RUN_ID, b"m" * 32, range(9), LATER)
    replaced = msgspec.structs.replace
    return {
        "another member's": replaced(good, member=author_of(MALLORY)),
        "another seat": replaced(good, seat=1),
        "a seat beyond": admit(invitation(seats=range(2)), ANNA, 2),
        "more seats": replaced(good, invitation=replaced(good.invitation, num_seats=5)),
        "a later expiry": replaced(good, invitation=replaced(good.invitation, expires_at=LATER + 1)),
        "a quota": replaced(good, invitation=replaced(good.invitation, quota=7)),
        "another bearer": replaced(good, invitation=replaced(good.invitation, bearer=author_of(MALLORY))),
        "of nobody's issue": of_mallory.admit(RUN_ID, author_of(MALLORY), 0),
        "of another run": invitation().admit(b"x" * 32, author_of(ANNA), 0),
        "a sponsor that is none": replaced(
            of_mallory.admit(RUN_ID, author_of(BEN), 0), sponsor=admit(of_mallory, MALLORY)
        ),
        "a sponsor who did not issue it": replaced(good, sponsor=admit(invitation(7, quota=5), BEN)),
        "without signatures": replaced(good, signature=bytes(64)),
    }


@pytest.mark.parametrize("name", forgeries())
def test_what_nobody_entitled_has_signed_admits_nobody(name: str) -> None:
    forged, members = forgeries()[name], roster()
    with pytest.raises(InvitationError):
        members.admit(forged)
    assert not members.is_member(forged.member)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_changed_byte_admits(place: int, flip: int) -> None:
    raw = bytearray(encode(admit(sponsored(admit(invitation(quota=3), ANNA), ANNA, range(3)), BEN, 2)))
    raw[place % len(raw)] ^= flip
    members = roster()
    with pytest.raises(RemoteProtocolError):
        members.admit(decode_admission(bytes(raw)))


def test_revoking_a_sponsor_or_an_invite_ends_all_that_follows_from_it() -> None:
    of_anna = admit(invitation(quota=2), ANNA)
    members, by_anna = roster(), sponsored(of_anna, ANNA, range(2))
    for admission in (of_anna, admit(by_anna, BEN, 1), admit(invitation(7, range(5, 6)), CLEO, 5)):
        members.admit(admission)
    members.hear_creator(0, 1, frozenset((author_of(ANNA),)))
    assert [members.is_member(author_of(who)) for who in (ANNA, BEN, CLEO)] == [False, False, True]
    with pytest.raises(InvitationError, match="revoked"):
        members.admit(admit(by_anna, DORA, 0))
    members.hear_creator(0, 2, frozenset(by_anna.bearers))
    assert [members.is_member(author_of(who)) for who in (ANNA, BEN, CLEO)] == [True, False, True]
    members.hear_creator(0, 3, frozenset((CREATOR,)))
    assert members.is_member(CREATOR)


def test_a_run_may_list_its_members() -> None:
    members = Roster(RUN_ID, CREATOR, frozenset((author_of(ANNA),)))
    assert [members.is_member(author_of(who)) for who in (ANNA, BEN, CREATOR_NUMBER)] == [True, False, True]
    with pytest.raises(InvitationError, match="listed"):
        members.admit(admit(invitation(), BEN))
    members.hear_creator(0, 1, frozenset((author_of(ANNA),)))
    assert not members.is_member(author_of(ANNA))


# In the run state


def admission_of(who: int, admission: Admission) -> Signed:
    return signed(who, Kind.ADMISSION, 0, tick_at(Kind.ADMISSION), AdmissionProof(encode(admission)))


def invited_run() -> RunState:
    return RunState(RUN_ID, CREATOR, roster=roster())


def test_strangers_entries_are_not_taken_and_cost_nothing() -> None:
    state = invited_run()
    report = state.merge(Delta(tuple(member(number) for number in range(10, 200))), NOW)
    assert set(report.outcomes) == {Outcome.UNINVITED}
    assert (state.authors, report.new, report.faults) == ([], [], [])
    a, b = sorted(
        (member(MALLORY, device="a"), member(MALLORY, device="b")), key=lambda item: entry_id(item.author, item.body)
    )
    assert state.merge(Delta((), (Proof(a, b),)), NOW).outcomes == [Outcome.UNINVITED]


def test_an_admission_opens_the_state_in_whatever_order_it_comes() -> None:
    items = (member(ANNA), admission_of(ANNA, admit(invitation(), ANNA)))
    roots = set()
    for order in permutations(items):
        state = invited_run()
        report = state.merge(Delta(order), NOW)
        assert report.outcomes == [Outcome.NEW] * 2
        roots.add(state.root)
    assert len(roots) == 1


def test_a_forged_admission_is_its_senders_fault_and_a_taken_seat_is_not() -> None:
    state = invited_run()
    forged = forgeries()["another member's"]
    assert state.merge(Delta((admission_of(MALLORY, forged),)), NOW).outcomes == [Outcome.INVALID]
    stolen = admission_of(MALLORY, admit(invitation(), ANNA))
    assert state.merge(Delta((stolen,)), NOW).outcomes == [Outcome.INVALID], "it is another member's"
    invited = invitation()
    outcomes = [state.merge(Delta((admission_of(who, admit(invited, who)),)), NOW).outcomes[0] for who in (1, 2, 3, 4)]
    assert set(outcomes) <= {Outcome.NEW, Outcome.UNINVITED}
    assert len(state.authors) == 1


def test_a_revoked_member_is_dropped_with_its_guests_and_stays_out() -> None:
    of_anna = admit(invitation(quota=1), ANNA)
    of_ben = admit(sponsored(of_anna, ANNA, range(1)), BEN)
    items = (admission_of(ANNA, of_anna), admission_of(BEN, of_ben), member(ANNA), member(BEN))
    roots, of_annas = set(), Revocation((author_of(ANNA),))
    revoked = signed(CREATOR_NUMBER, Kind.REVOCATION, 0, tick_at(Kind.REVOCATION), of_annas)
    for seed in range(20):
        shuffled = [*items, revoked, admission_of(CLEO, admit(invitation(7, range(3, 4)), CLEO, 3))]
        random.Random(seed).shuffle(shuffled)
        state = invited_run()
        for item in shuffled:
            state.merge(Delta((item,)), NOW)
        assert set(state.authors) == {CREATOR, author_of(CLEO)}
        roots.add(state.root)
    assert len(roots) == 1
    assert state.merge(Delta((member(ANNA),)), NOW).outcomes == [Outcome.UNINVITED]


# Visitors


def run_of(*members: int) -> Roster:
    """Return the creator's roster, with these members."""
    roster = Roster(RUN_ID, CREATOR)
    for seat, who in enumerate(members):
        roster.admit(admit(invitation(seats=range(len(members))), who, seat))
    return roster


def test_a_members_key_lets_a_visitor_in_and_a_strangers_or_a_visitors_does_not() -> None:
    visitor = author_of(DORA)
    listed = Roster(RUN_ID, CREATOR, frozenset({author_of(ANNA)}))
    for roster in (run_of(ANNA), listed):
        for who in (ANNA, CREATOR_NUMBER):
            roster.admit_visitor(sign_pass(key_of(who), RUN_ID, visitor, LATER), visitor, NOW)
            assert roster.admits(visitor)
            assert not roster.is_member(visitor), "its entries are not stored"
        with pytest.raises(InvitationError, match="the key of this data directory is no member's"):
            roster.admit_visitor(sign_pass(key_of(MALLORY), RUN_ID, author_of(BEN), LATER), author_of(BEN), NOW)
        assert not roster.admits(author_of(BEN))
        assert not roster.admits(author_of(MALLORY))
    roster, visitor, other = run_of(ANNA), author_of(DORA), author_of(CLEO)
    roster.admit_visitor(sign_pass(key_of(ANNA), RUN_ID, visitor, LATER), visitor, NOW)
    with pytest.raises(InvitationError):
        roster.admit_visitor(sign_pass(key_of(DORA), RUN_ID, other, LATER), other, NOW)


def test_a_pass_is_for_one_key_one_run_and_one_day() -> None:
    roster, visitor = run_of(ANNA, BEN), author_of(DORA)
    good = sign_pass(key_of(ANNA), RUN_ID, visitor, LATER)
    lies = [
        (good, author_of(MALLORY), NOW),
        (good, visitor, LATER + 1.0),
        (sign_pass(key_of(ANNA), bytes(32), visitor, LATER), visitor, NOW),
        (msgspec.structs.replace(good, expires_at=LATER + 1), visitor, NOW),
        (msgspec.structs.replace(good, member=author_of(BEN)), visitor, NOW),
        (msgspec.structs.replace(good, signature=bytes(64)), visitor, NOW),
    ]
    for shown, who, now in lies:
        with pytest.raises(InvitationError):
            roster.admit_visitor(shown, who, now)
        assert not roster.admits(who)
    raw = encode(good)
    assert len(raw) <= MAX_PASS_BYTES
    assert decode_pass(raw) == good
    for damaged in (b"", raw[:-1], raw + bytes(MAX_PASS_BYTES)):
        with pytest.raises(RemoteProtocolError):
            decode_pass(damaged)


def test_visitors_go_with_their_member_and_are_few() -> None:
    roster = run_of(ANNA, BEN)
    visitors = [author_of(100 + number) for number in range(MAX_VISITORS + 2)]
    for visitor in (*visitors, visitors[-1]):
        roster.admit_visitor(sign_pass(key_of(ANNA), RUN_ID, visitor, LATER), visitor, NOW)
    of_ben = author_of(99)
    roster.admit_visitor(sign_pass(key_of(BEN), RUN_ID, of_ben, LATER), of_ben, NOW)
    assert [roster.admits(visitor) for visitor in visitors] == [False] * 2 + [True] * MAX_VISITORS
    roster.hear_creator(0, 1, frozenset({author_of(ANNA)}))
    assert not any(map(roster.admits, visitors))
    assert roster.admits(of_ben)
    with pytest.raises(InvitationError):
        roster.admit_visitor(sign_pass(key_of(ANNA), RUN_ID, visitors[0], LATER), visitors[0], NOW)
