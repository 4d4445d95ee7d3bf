"""One node's leases, two nodes in conflict, and what a node believes of others' leases: what liars gain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.epochs.lease_claims import (
    BUCKET_SECONDS,
    FASTEST_RATIO,
    MAX_SHARE,
    SETTLE_SECONDS,
    SIGNED_SLACK,
    Claims,
    EpochVote,
    Standing,
    epoch_progress,
)
from farandole.protocol.epochs.leases import ASLEEP_SECONDS, Leases, Output
from farandole.protocol.run.slices import DoneSlices, Sections, parts, said_by
from farandole.protocol.state.entries import Delta, Kind, Lease, LeasedSlices
from farandole.protocol.state.state import RunState
from farandole.protocol.trainer.trainer_messages import DrawSlices, SlicesTrained

from ..authors import CREATOR, NOW, RUN_ID, author_of, signed, tick_at

ALICE, BOB = b"a" * 32, b"b" * 32
CORPUS, OTHER_TEXT = b"one text", b"another."
NUM_SLICES = 320
PERIOD = 2.0


class Node:
    """A machine with its results: its newest entries and assignment."""

    def __init__(self, author: bytes = ALICE, *, live: Iterable[bytes] = (), num_epochs: int = 2) -> None:
        self.author = author
        self.leases = Leases(author, CORPUS, NUM_SLICES, num_epochs)
        self.live = frozenset(live)
        self.proven = self.live
        self.speeds = dict.fromkeys(self.live, 5.0)
        self.speed: float | None = None
        self.now = 1_000.0
        self.entries: dict[int, Lease] = {}
        self.assigned: DrawSlices | None = None
        self.epochs: list[int] = []
        self.trained: set[tuple[int, int]] = set()

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, DrawSlices):
                self.assigned = output
            else:
                self.entries[output[0]] = output[1]

    def tick(self, seconds: float = 0.0) -> None:
        for second in range(int(seconds) + 1):
            self.now += bool(second)
            epoch = self.leases.epoch
            self.take(self.leases.tick(Standing(self.live, self.proven, self.speeds, PERIOD, self.speed), self.now))
            if self.leases.epoch != epoch:
                self.epochs.append(self.leases.epoch)

    def hear(self, author: bytes, *entries: tuple[int, Lease]) -> None:
        for index, lease in entries:
            self.leases.hear(author, index, lease)

    @property
    def slices(self) -> set[int]:
        """Return the assigned slices that it has not trained on yet."""
        if self.assigned is None:
            return set()
        epoch = self.assigned.epoch
        indices = {index for first, count in self.assigned.ranges for index in range(first, first + count)}
        return {index for index in indices if (epoch, index) not in self.trained}

    @property
    def leased(self) -> set[int]:
        return {
            index
            for lease in self.entries[0].leases
            for index in range(lease.first + lease.done, lease.first + lease.count)
        }

    def train(self, count: int = NUM_SLICES) -> set[int]:
        trained = sorted(self.slices)[:count]
        self.trained |= {(self.leases.epoch, index) for index in trained}
        self.leases.trained(SlicesTrained(self.leases.epoch, [(index, 1) for index in trained]))
        return set(trained)


def test_a_lease_is_worked_on_when_it_has_settled_and_who_leaves_gives_back_what_it_has_not_done() -> None:
    alice = Node()
    alice.tick()
    assert alice.leased
    assert not alice.slices
    alice.tick(SETTLE_SECONDS)
    assert alice.slices == alice.leased
    done = alice.train(4)
    alice.take(alice.leases.leave())
    assert alice.leased == set()
    said = {index for lease in alice.entries[0].leases for index in range(lease.first, lease.first + lease.done)}
    assert said == done
    assert alice.leases.num_leased == 0
    assert alice.leases.tick(Standing(), alice.now) == []


def test_alone_a_node_trains_on_every_slice_of_every_epoch_once() -> None:
    alice = Node()
    trained: list[set[int]] = []
    while not alice.leases.is_over:
        alice.tick(1)
        trained.append(alice.train(3))
        assert alice.now < 5_000
    everything = sorted(index for part in trained for index in part)
    assert everything == sorted(2 * list(range(NUM_SLICES)))
    assert alice.epochs == [1, 2]
    assert alice.entries[0] == Lease(2, CORPUS)


def test_two_who_lease_the_same_agree_who_gives_way() -> None:
    alice, bob = Node(ALICE, live=[BOB]), Node(BOB, live=[ALICE])
    contested = (0, Lease(0, CORPUS, (LeasedSlices(100, 20),)))
    for node in (alice, bob):
        node.hear(node.author, contested)
        node.tick()
    alice.hear(BOB, *bob.entries.items())
    bob.hear(ALICE, *alice.entries.items())
    alice.tick(SETTLE_SECONDS + 1)
    bob.tick(SETTLE_SECONDS + 1)
    both = set(range(100, 120))
    assert not alice.slices & bob.slices
    assert both <= alice.slices | bob.slices


def test_leases_of_the_live_are_kept_and_those_of_the_dead_taken_over_where_they_ended() -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(0, CORPUS, (LeasedSlices(0, 20, 5), LeasedSlices(20, 20)))))
    everything: set[int] = set()
    while len(everything) < NUM_SLICES - 40:
        alice.tick(1)
        everything |= alice.train(10)
    alice.tick(10)
    assert everything == set(range(40, NUM_SLICES))
    assert not alice.slices
    alice.live = frozenset()
    while not alice.epochs:
        alice.tick(1)
        everything |= alice.train(10)
    assert everything == set(range(5, NUM_SLICES))


def test_who_comes_back_goes_on_where_it_was_and_who_was_asleep_lets_go() -> None:
    alice = Node()
    alice.tick(SETTLE_SECONDS)
    leased, done = alice.leased, alice.train(4)
    again = Node()
    again.hear(ALICE, *alice.leases.saved())
    again.tick()
    assert again.slices == leased - done
    leased = alice.leased
    alice.now += ASLEEP_SECONDS + 1
    alice.tick()
    assert not alice.slices
    assert alice.leased != leased or alice.entries[0].leases


def test_who_has_another_text_shares_nothing_and_is_noticed() -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(1, OTHER_TEXT, (LeasedSlices(0, 20, 20),))))
    alice.tick()
    assert alice.leases.strangers == {BOB}
    assert alice.leases.epoch == 0
    assert alice.leases.done.count == 0


@pytest.mark.parametrize(
    "lease",
    [
        LeasedSlices(0, NUM_SLICES),  # everything
        LeasedSlices(0, NUM_SLICES // MAX_SHARE + 1),
        LeasedSlices(0, NUM_SLICES, NUM_SLICES),  # and all done
        LeasedSlices(NUM_SLICES - 1, 2, 2),
        LeasedSlices(2**31 - 1, 2**31 - 1, 2**31 - 1),
        LeasedSlices(0, 3, 4),
        LeasedSlices(0, 0),
    ],
)
def test_leases_that_cannot_be_honest_are_nobodys(lease: LeasedSlices) -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(0, CORPUS, (lease,) * 8)))
    alice.tick()
    assert alice.leases.done.count == 0
    assert not list(alice.leases._respected())


def test_a_peer_has_two_leases_at_a_time() -> None:
    alice = Node(live=[BOB])
    alice.hear(BOB, (0, Lease(0, CORPUS, tuple(LeasedSlices(20 * number, 20) for number in range(8)))))
    alice.tick()
    ((_, bob),) = alice.leases._respected()
    assert bob.mask.bit_count() == 40


def test_what_an_unmet_author_says_to_be_done_is_leased_last_and_trained_on() -> None:
    alice = Node(live=[BOB], num_epochs=1)
    alice.proven = frozenset()
    done = tuple(LeasedSlices(first, 20, 20) for first in range(0, 160, 20))
    alice.hear(BOB, (0, Lease(0, CORPUS, done)), *bits((1 << 160) - 1))
    trained: set[int] = set()
    while len(trained) < 150:
        alice.tick(1)
        trained |= alice.train(10)
    assert trained <= set(range(160, NUM_SLICES))
    assert alice.leases.num_doubted == 160
    while not alice.leases.is_over:
        alice.tick(1)
        trained |= alice.train(10)
    assert trained == set(range(NUM_SLICES))


def test_keys_that_were_ground_do_not_drive_a_node_from_place_to_place() -> None:
    """Bob's hash comes before all others, and he leases whatever Alice has leased."""

    class Trampled(Leases):
        def _rank(self, author: bytes, section: int) -> bytes:
            return b"" if author == BOB else super()._rank(author, section)

    alice = Node(live=[BOB], num_epochs=1)
    alice.proven = frozenset()
    alice.leases, alice.speed = Trampled(ALICE, CORPUS, NUM_SLICES, 1), 2.0
    num_trained = 0
    for _ in range(300):
        alice.tick(1)
        alice.hear(BOB, (0, Lease(0, CORPUS, alice.entries[0].leases[-2:])))
        num_trained += len(alice.train(2))
    assert num_trained == NUM_SLICES


GHOST, CAROL, DAVE, EVE = (bytes([number]) * 32 for number in (0, 2, 3, 4))
SECTIONS = Sections(100_000)
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
