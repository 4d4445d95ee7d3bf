"""What a node believes of others' leases, and what liars gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.epochs.lease_claims import (
    BUCKET_SECONDS,
    FASTEST_RATIO,
    SIGNED_SLACK,
    Claims,
    EpochVote,
    Standing,
    epoch_progress,
)
from farandole.protocol.run.slices import DoneSlices, Sections, parts, said_by
from farandole.protocol.state.entries import Delta, Kind, Lease, LeasedSlices
from farandole.protocol.state.state import RunState

from ..authors import CREATOR, NOW, RUN_ID, author_of, signed, tick_at

GHOST, BOB, CAROL, DAVE, EVE = (bytes([number]) * 32 for number in range(5))
CORPUS, OTHER_TEXT = b"one text", b"another."
NUM_SLICES = 100_000
SECTIONS = Sections(NUM_SLICES)
STANDING = Standing(
    frozenset({GHOST, BOB, CAROL, DAVE}),
    frozenset({BOB, CAROL, DAVE, EVE}),
    {GHOST: 1e9, BOB: 5.0, CAROL: 5.0, DAVE: 5.0},
    own_speed=5.0,
)


def claims_of(*leases: LeasedSlices, standing: Standing = STANDING) -> tuple[Claims, DoneSlices]:
    """Return the claims after Bob has said that he leases these."""
    claims = Claims(SECTIONS)
    if leases:
        claims.hear(BOB, 0, Lease(0, CORPUS, leases), standing)
    return claims, claims.done


def finished(number: int, count: int = 6_000) -> tuple[LeasedSlices, ...]:
    return tuple(LeasedSlices(index * count, count, count) for index in range(number))


def bits(mask: int) -> list[tuple[int, Lease]]:
    return [(part + 1, Lease(0, CORPUS, (), raw)) for part, raw in enumerate(parts(mask))]


def pass_time(claims: Claims, seconds: int, standing: Standing = STANDING) -> None:
    for _ in range(seconds):
        claims.believe(standing, 1.0)


def test_who_has_not_been_met_is_not_believed_however_long_it_waits() -> None:
    claims, done = claims_of()
    claims.hear(GHOST, 0, Lease(0, CORPUS, (LeasedSlices(90_000, 10), *finished(7))), STANDING)
    for index, lease in bits(SECTIONS.all):
        claims.hear(GHOST, index, lease, STANDING)
    pass_time(claims, 10_000)
    assert done.count == 0
    assert claims.doubted == SECTIONS.all


def test_a_met_member_is_believed_as_fast_as_it_signs_and_no_faster() -> None:
    claims, done = claims_of(*finished(7), LeasedSlices(90_000, 10))
    assert done.count == 0, "not at once"
    pass_time(claims, 100)
    assert done.count == 100 * 5 * SIGNED_SLACK
    pass_time(claims, 10_000)
    assert done.count == 42_000, "all that it says, and nothing else"


def test_no_signature_makes_a_member_faster_than_any_node_can_be() -> None:
    liar = replace(STANDING, signed_speeds={**STANDING.signed_speeds, BOB: 1e9})
    claims, done = claims_of(*finished(8), standing=liar)
    pass_time(claims, 10, liar)
    assert done.count == 10 * 5 * FASTEST_RATIO


def test_a_met_liar_does_not_set_the_measure_for_itself() -> None:
    alone = Standing(frozenset({BOB}), frozenset({BOB}), {BOB: 1e9}, own_speed=5.0)
    assert alone.fastest == 5.0 * FASTEST_RATIO
    crowd = Standing(frozenset({BOB, CAROL}), frozenset({BOB, CAROL}), {BOB: 1e9, CAROL: 5.0}, own_speed=5.0)
    assert crowd.fastest == 5.0 * FASTEST_RATIO
    assert Standing(frozenset({BOB}), frozenset({BOB}), {BOB: 0.0}).fastest == 0.0


def test_credit_is_not_saved_up_for_a_great_lie() -> None:
    claims, done = claims_of(LeasedSlices(0, 10))
    pass_time(claims, 100_000)
    claims.hear(BOB, 0, Lease(0, CORPUS, finished(8)), STANDING)
    claims.believe(STANDING, 0.0)
    assert done.count == 5 * SIGNED_SLACK * BUCKET_SECONDS


def test_what_a_late_slice_of_a_section_implies_is_paid_as_well() -> None:
    claims, done = claims_of(*(LeasedSlices(SECTIONS.end(section) - 1, 1, 1) for section in range(0, 800, 100)))
    pass_time(claims, 1)
    assert done.count <= 5 * SIGNED_SLACK


def test_who_is_met_late_is_believed_in_a_few_minutes() -> None:
    stranger = replace(STANDING, proven=STANDING.proven - {BOB})
    claims, done = claims_of(LeasedSlices(0, 3_000, 3_000), LeasedSlices(3_000, 3_000), standing=stranger)
    pass_time(claims, 600, stranger)
    assert done.count == 0
    pass_time(claims, 150)
    assert done.count == 3_000


def test_who_has_left_is_believed_what_it_was_good_for() -> None:
    claims, done = claims_of(LeasedSlices(0, 100, 20))
    pass_time(claims, 60)
    claims.hear(BOB, 0, Lease(0, CORPUS, (LeasedSlices(0, 60, 60),)), STANDING)
    pass_time(claims, 1, replace(STANDING, live=STANDING.live - {BOB}))
    assert done.count == 60


def test_bits_count_when_most_of_those_who_were_met_say_them() -> None:
    claims, done = claims_of()
    for author in (GHOST, BOB, BOB):  # saying it twice does not count twice
        for index, lease in bits(SECTIONS.all):
            claims.hear(author, index, lease, STANDING)
    pass_time(claims, 10)
    assert done.count == 0, "one of three"
    for index, lease in bits(SECTIONS.all >> 5):
        claims.hear(CAROL, index, lease, STANDING)
    pass_time(claims, 1)
    assert done.whole == SECTIONS.all >> 5


@pytest.mark.parametrize(
    ("num_live", "num_proven", "expected"), [(1, 1, True), (2, 1, False), (9, 2, False), (9, 3, True)]
)
def test_a_majority_needs_three_or_all_there_are(num_live: int, num_proven: int, expected: bool) -> None:
    authors = [bytes([number]) * 32 for number in range(num_live)]
    assert Standing(frozenset(authors), frozenset(authors[:num_proven])).has_quorum is expected
    assert not Standing(proven=frozenset(authors)).has_quorum


def test_ghosts_hold_less_than_half_of_an_epoch_together() -> None:
    ghosts = [bytes([number, 9]) * 16 for number in range(60)]
    standing = replace(STANDING, live=frozenset(ghosts))
    claims, _ = claims_of()
    for ghost in ghosts:
        claims.hear(ghost, 0, Lease(0, CORPUS, (LeasedSlices(0, 6_000), LeasedSlices(50_000, 6_000))), standing)
    held = [claimant.mask.bit_count() for _, claimant in claims.held(standing.live, frozenset())]
    assert len(held) == 60
    assert sum(held) <= SECTIONS.count * 0.51


def test_a_gpu_holds_what_it_trains_on_in_time() -> None:
    standing = replace(STANDING, signed_speeds={**STANDING.signed_speeds, BOB: 50.0}, period=10.0)
    claims, _ = claims_of(LeasedSlices(0, 6_000), LeasedSlices(6_000, 6_000), standing=standing)
    [(_, claimant)] = claims.held(standing.live, frozenset())
    assert claimant.mask == SECTIONS.mask(0, 12_000)


@given(st.lists(st.integers(0, 255), max_size=9), st.integers(1, 10))
def test_sections_are_counted(masks: list[int], needed: int) -> None:
    expected = sum(1 << bit for bit in range(8) if sum(mask >> bit & 1 for mask in masks) >= needed)
    assert said_by(masks, needed) == expected


def test_a_visitor_learns_how_far_the_epochs_are() -> None:
    state, done, live = RunState(RUN_ID, CREATOR), (1 << 3_000) - 1, [author_of(number) for number in range(1, 6)]
    assert epoch_progress(state, live) is None
    for number in range(1, 6):
        corpus, epoch = (OTHER_TEXT, 0) if number == 5 else (CORPUS, 1)
        said = done if number < 4 else (1 << 5_000) - 1
        leases = [
            (0, Lease(epoch, corpus)),
            *((part + 1, Lease(epoch, corpus, (), raw)) for part, raw in enumerate(parts(said))),
        ]
        entries = [signed(number, Kind.LEASE, index, tick_at(Kind.LEASE), lease) for index, lease in leases]
        state.merge(Delta(tuple(entries)), NOW)
    assert epoch_progress(state, live) == (CORPUS, 1, done)
    assert epoch_progress(state, live[4:]) == (OTHER_TEXT, 0, (1 << 5_000) - 1)


# The vote on the epoch

HONEST = [bytes([number]) * 32 for number in range(1, 5)]
GHOSTS = [bytes([number]) * 32 for number in range(100, 160)]
NUM_EPOCHS = 9


def decide(vote: EpochVote, own: int, said: dict[bytes, int], proven: list[bytes]) -> int:
    return vote.decide(own, said, Standing(frozenset(said), frozenset(proven)), NUM_EPOCHS)


def at(epoch: int, authors: list[bytes]) -> dict[bytes, int]:
    return dict.fromkeys(authors, epoch)


@pytest.mark.parametrize("lie", [5, NUM_EPOCHS, 2**31 - 1])
def test_ghosts_move_nobody_that_has_trained(lie: int) -> None:
    vote = EpochVote()
    vote.is_new = False
    said = at(1, HONEST) | at(lie, GHOSTS)
    assert decide(vote, 1, said, []) == 1
    assert decide(vote, 1, said, HONEST) == 1


def test_most_of_those_who_were_met_are_followed_and_never_back() -> None:
    vote = EpochVote()
    vote.is_new = False
    said = at(3, HONEST[:3]) | at(2**31 - 1, HONEST[3:])
    assert decide(vote, 1, said, HONEST) == 3
    assert decide(vote, 5, said, HONEST) == 5


def test_a_newcomer_begins_where_the_run_seems_to_be_and_is_corrected() -> None:
    vote = EpochVote()
    said = at(2, HONEST) | at(7, GHOSTS)
    assert decide(vote, 0, said, []) == 7
    vote.is_new = False  # it has begun to train in that epoch
    assert decide(vote, 7, said, HONEST[:2]) == 7
    assert decide(vote, 7, said, HONEST) == 2
    assert decide(vote, 3, said, HONEST) == 3


def test_one_honest_member_keeps_ghosts_from_ending_a_newcomers_run_and_alone_a_node_stays_where_it_is() -> None:
    said = at(2, HONEST[:1]) | at(NUM_EPOCHS, GHOSTS)
    assert decide(EpochVote(), 0, said, []) == NUM_EPOCHS - 1
    assert decide(EpochVote(), 0, at(NUM_EPOCHS, HONEST), []) == NUM_EPOCHS, "the run is over"
    assert decide(EpochVote(), 4, {}, HONEST) == 4
