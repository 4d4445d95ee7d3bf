"""The laws of the run state, for any entries in any order."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.protocol.state import state as state_module
from farandole.protocol.state.author_places import Introducer
from farandole.protocol.state.entries import (
    MAX_SLOTS,
    PROOF_TTL,
    RULES,
    Delta,
    Kind,
    Lease,
    Proof,
    Signed,
    decode_delta,
    entry_id,
)
from farandole.protocol.state.state import AUTHOR_BURST, AUTHOR_RATE, NEWCOMER_BURST, NUM_BUCKETS, Outcome, RunState

from ..authors import (
    CREATOR,
    NOW,
    RUN_ID,
    author_of,
    beat,
    contents,
    everything,
    flipped,
    member,
    notice,
    progress,
    signed,
    state_of,
    tick_at,
)

MEMBER_TICK, NOTICE_TICK = tick_at(Kind.MEMBER), tick_at(Kind.CHECKPOINT)


def examples(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


# Honest authors: one payload for each tick and slot, as a `Writer` makes them.
authors, ago = st.integers(1, 4), st.integers(0, 4)
honest = st.one_of(
    st.builds(lambda n, ago: member(n, MEMBER_TICK - ago, f"at {ago}"), authors, ago),
    st.builds(lambda n, index, ago: notice(n, index, NOTICE_TICK - ago), authors, st.integers(0, 2), ago),
    st.builds(lambda n: beat(n), authors),
)
# Authors 5 and 6 fork now and then.
forking = st.builds(
    lambda n, ago, story: member(n, MEMBER_TICK - ago, story),
    st.integers(5, 6),
    st.integers(0, 2),
    st.sampled_from("ab"),
)
any_entry = st.one_of(honest, forking)


def join(*states: RunState) -> RunState:
    joined = RunState(RUN_ID, CREATOR)
    for state in states:
        joined.merge(everything(state), NOW)
    return joined


def check_laws(one: list[Signed], two: list[Signed], three: list[Signed]) -> None:
    a, b, c = state_of(*one), state_of(*two), state_of(*three)
    assert contents(join(a, b)) == contents(join(b, a))
    assert join(a, b).root == join(b, a).root
    assert contents(join(join(a, b), c)) == contents(join(a, join(b, c)))
    assert contents(join(a, a)) == contents(a)
    assert join(a, b, a, b).root == join(a, b).root


@given(*[st.lists(honest, max_size=8)] * 3)
@examples(60)
def test_merging_is_a_join(one: list[Signed], two: list[Signed], three: list[Signed]) -> None:
    check_laws(one, two, three)


@pytest.mark.soak
@given(*[st.lists(honest, max_size=12)] * 3)
@examples(10_000)
def test_merging_is_a_join_at_length(one: list[Signed], two: list[Signed], three: list[Signed]) -> None:
    check_laws(one, two, three)


@given(st.lists(any_entry, max_size=14), st.randoms(use_true_random=False), st.integers(2, 4))
@examples(80)
def test_any_replicas_are_equal_once_all_have_met(items: list[Signed], rng: random.Random, num_replicas: int) -> None:
    """Drops, duplicates, reordering and forks: each replica receives its part, then they exchange everything."""
    replicas = [RunState(RUN_ID, CREATOR) for _ in range(num_replicas)]
    for replica in replicas:
        heard = [item for item in items for _ in range(rng.randint(0, 2))]
        rng.shuffle(heard)
        for item in heard:
            replica.merge(Delta((item,)), NOW)
    for _ in range(2):
        for replica in replicas:
            for other in replicas:
                replica.merge(everything(other), NOW)
    assert len({replica.root for replica in replicas}) == 1
    assert all(contents(replica) == contents(replicas[0]) for replica in replicas)


@given(
    st.lists(honest, min_size=1, max_size=8), st.lists(forking, max_size=6), st.lists(st.integers(0, 10**5), max_size=6)
)
@examples(60)
def test_nobody_alters_an_honest_slot(items: list[Signed], others: list[Signed], bits: list[int]) -> None:
    state = state_of(*items)
    honest_before = {row for row in contents(state) if row[0] not in {author_of(5), author_of(6)}}
    attack = [flipped(item, bit) for item in items for bit in bits] + others
    attack += [Signed(item.author, other.body, other.signature) for item in items for other in others]
    state.merge(Delta(tuple(attack)), NOW)
    assert honest_before == {row for row in contents(state) if row[0] not in {author_of(5), author_of(6)}}


def test_outcomes_say_what_became_of_each_item() -> None:
    state = state_of(member(1))
    items = (
        member(1),
        member(1, MEMBER_TICK - 1),
        member(2),
        member(3, MEMBER_TICK - 720),
        member(4, MEMBER_TICK + 13),
        Signed(author_of(5), member(1).body, member(1).signature),
    )
    report = state.merge(Delta(items), NOW)
    assert report.outcomes == [
        Outcome.KNOWN,
        Outcome.OLD,
        Outcome.NEW,
        Outcome.EXPIRED,
        Outcome.DEFERRED,
        Outcome.INVALID,
    ]
    assert [entry.author for entry in report.new] == [author_of(2)]


def test_a_fork_masks_its_author_everywhere() -> None:
    a, b = member(1, device="a"), member(1, device="b")
    state = state_of(a, notice(1), member(2))
    report = state.merge(Delta((b,)), NOW)
    assert report.outcomes == [Outcome.MASKED]
    [proof] = report.proofs
    assert {proof.a, proof.b} == {a, b}
    assert state.entries_of(author_of(1)) == []
    assert state.merge(Delta((notice(1, 1),)), NOW).outcomes == [Outcome.MASKED]

    elsewhere = state_of(notice(1, 3), member(2))
    assert elsewhere.merge(Delta((), (proof,)), NOW).outcomes == [Outcome.NEW]
    assert elsewhere.merge(Delta((), (proof,)), NOW).outcomes == [Outcome.KNOWN]
    assert elsewhere.root == state.root
    assert elsewhere.is_member(author_of(2))


def test_a_proof_outlives_every_entry_and_forged_ones_mask_nobody() -> None:
    state = state_of(member(1, device="a"), member(1, device="b"))
    week = max(rule.ttl for kind, rule in RULES.items() if kind is not Kind.REVOCATION)
    state.expire(NOW + week + 61)
    assert state.proof_of(author_of(1)) is not None
    state.expire(NOW + PROOF_TTL + 1)
    assert state.authors == []
    state = state_of(member(1))
    a, b = member(1, device="a"), member(2, device="b")
    forged = Signed(a.author, b.body, b.signature)
    report = state.merge(Delta((), (Proof(a, forged), Proof(forged, a), Proof(a, a))), NOW)
    assert report.outcomes == [Outcome.INVALID] * 3
    assert len(report.faults) == 3
    assert state.is_member(author_of(1))


@given(st.lists(any_entry, max_size=20), st.lists(st.integers(0, 8_000), max_size=4))
@examples(40)
def test_expiry_leaves_what_would_be_accepted_now(items: list[Signed], steps: list[int]) -> None:
    state, now = state_of(*items), NOW
    for step in steps:
        now += step
        state.expire(now)
        assert all(entry.expires_at > now for entry in state)
    for item in items:
        state.merge(Delta((item,)), now)
        assert all(entry.expires_at > now for entry in state), "what has expired does not come back"
    fresh = RunState(RUN_ID, CREATOR)
    fresh.merge(everything(state), now)
    assert fresh.root == state.root
    # the caches are right: an equal state that was never expired has the same digests
    assert fresh.bucket_digests == state.bucket_digests


def test_heartbeats_are_no_part_of_the_root_and_last_longer_in_large_runs() -> None:
    state = state_of(member(1))
    root = state.root
    state.merge(Delta((beat(1), beat(2))), NOW)
    assert (state.root, len(state)) == (root, 3)
    assert state.refs(range(NUM_BUCKETS))[0].by_slot().keys() == {Kind.MEMBER << 8}
    assert {entry.author for entry in state.expire(NOW + 121)} == {author_of(1), author_of(2)}
    assert state.root == root
    state = state_of(beat(1))
    state.fit_beat_ttl(silence=240.0)
    assert state.expire(NOW + 260) == []
    assert len(state.expire(NOW + 271)) == 1


def test_roots_tell_states_apart() -> None:
    roots = {
        state_of(*items).root
        for items in (
            [],
            [member(1)],
            [member(2)],
            [member(1), member(2)],
            [member(1, device="other")],
            [member(1, MEMBER_TICK - 1)],
            [notice(1, 0)],
            [notice(1, 1)],
            [member(1, device="a"), member(1, device="b")],
        )
    }
    assert len(roots) == 9
    assert state_of(member(1)).refs(range(NUM_BUCKETS))[0].author == author_of(1)


def test_nobody_brings_many_authors_or_proofs_unasked() -> None:
    state, peer = RunState(RUN_ID, CREATOR), Introducer(author_of(200))
    many = Delta(tuple(member(number) for number in range(1, 200)))
    outcomes = state.merge(many, NOW, peer, is_asked=False).outcomes
    assert (outcomes.count(Outcome.NEW), outcomes.count(Outcome.DEFERRED)) == (NEWCOMER_BURST, 199 - NEWCOMER_BURST)
    update = member(1, MEMBER_TICK + 1), notice(2)
    assert state.merge(Delta(update), NOW, peer, is_asked=False).outcomes == [Outcome.NEW] * 2, "who is known is heard"
    assert state.merge(many, NOW, peer).outcomes.count(Outcome.NEW) == 199 - NEWCOMER_BURST, "asked for"
    state, peer = RunState(RUN_ID, CREATOR), Introducer(author_of(200))
    flood = Delta((), tuple(fork_of(number) for number in range(1, NEWCOMER_BURST + 10)))
    assert state.merge(flood, NOW, peer, is_asked=False).outcomes.count(Outcome.DEFERRED) == 9


def fork_of(number: int) -> Proof:
    a, b = sorted((member(number, device="a"), member(number, device="b")), key=lambda it: entry_id(it.author, it.body))
    return Proof(a, b)


def test_proofs_cost_no_author_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MAX_PROOFS", 4)
    state = RunState(RUN_ID, CREATOR, max_authors=5)
    state.merge(Delta(tuple(member(number, device="a") for number in range(1, 6))), NOW)
    flood = Delta((), tuple(fork_of(number) for number in range(10, 30)))
    outcomes = state.merge(flood, NOW, Introducer(author_of(99))).outcomes
    assert (outcomes.count(Outcome.NEW), outcomes.count(Outcome.CROWDED)) == (4, 16)
    assert all(state.is_member(author_of(number)) for number in range(1, 6))
    assert state.merge(Delta((), (fork_of(1),)), NOW).outcomes == [Outcome.NEW], "of an author that has a place"
    assert [state.proof_of(author_of(number)) is not None for number in (1, 10, 11)] == [True, False, True]
    assert state.merge(Delta((member(6),)), NOW).outcomes == [Outcome.NEW], "it has freed its place"
    for number in (2, 3, 4, 5):
        state.merge(Delta((member(number, device="b"),)), NOW)
    assert {number for number in range(30) if state.proof_of(author_of(number)) is not None} == {2, 3, 4, 5}
    state.expire(NOW + PROOF_TTL + 1)
    assert state.authors == []
    assert state.num_free


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(50, 55), st.booleans()), max_size=120))
@examples(60)
def test_a_full_table_keeps_its_bound_and_its_digests(heard: list[tuple[int, int, bool]]) -> None:
    """Authors, some with forks, from six peers."""
    state = RunState(RUN_ID, author_of(1), max_authors=10)
    for author, peer, is_fork in heard:
        item = fork_of(author) if is_fork else member(author, device="a")
        delta = Delta((), (item,)) if isinstance(item, Proof) else Delta((item,))
        state.merge(delta, NOW, Introducer(author_of(peer), str(peer // 2)))
        placed = [author for author in state.authors if state.proof_of(author) is None]
        assert len(placed) == len(state.places) <= 10
    fresh = RunState(RUN_ID, author_of(1))
    fresh.merge(everything(state), NOW)
    assert fresh.root == state.root


def test_a_full_table_shares_its_later_places_among_those_who_brought_the_authors() -> None:
    state = RunState(RUN_ID, author_of(27), max_authors=12)
    honest, liar = Introducer(author_of(40), "10.0.0.0/24"), Introducer(author_of(41), "10.0.1.0/24")
    state.merge(Delta(tuple(member(number) for number in range(100, 106))), NOW, liar)

    def push(introducer: Introducer, *numbers: int) -> list[Outcome]:
        return state.merge(Delta(tuple(map(member, numbers))), NOW, introducer, is_asked=False).outcomes

    push(honest, 1, 2)
    outcomes = push(liar, *range(4, 20))
    assert (outcomes.count(Outcome.NEW), outcomes.count(Outcome.CROWDED)) == (4, 12)
    assert push(honest, 21, 22) == [Outcome.NEW, Outcome.CROWDED], "it would have more than the liar"
    assert push(honest, 27) == [Outcome.NEW], "the creator"
    assert len(state.authors) == 12
    assert {author_of(number) for number in (1, 2, 27, *range(100, 106))} <= set(state.authors)
    other = Introducer(author_of(42), "10.0.2.0/24")
    assert state.merge(Delta((member(23),)), NOW, other).outcomes == [Outcome.CROWDED], "no news, by anti-entropy"
    assert push(other, 23) == [Outcome.NEW]
    assert state.merge(Delta((member(24),)), NOW).outcomes == [Outcome.NEW], "this node's own words"


def test_an_authors_entries_are_metered() -> None:
    state = RunState(RUN_ID, CREATOR)
    flood = tuple(notice(1, 0, NOTICE_TICK - 200 + step) for step in range(150))
    outcomes = state.merge(Delta(flood), NOW).outcomes
    assert outcomes.count(Outcome.NEW) == AUTHOR_BURST
    assert outcomes.count(Outcome.DEFERRED) == 150 - AUTHOR_BURST
    assert state.merge(Delta((notice(2),)), NOW).outcomes == [Outcome.NEW]
    assert state.merge(Delta((notice(1),)), NOW + 2).outcomes == [Outcome.NEW]


def lease(number: int, index: int, tick: int) -> Signed:
    return signed(number, Kind.LEASE, index, tick, Lease(0, bytes(8)))


def test_an_author_is_heard_as_ever_once_a_clock_that_was_fast_is_right_again() -> None:
    """An hour's entries at the allowed rate: if a node refused them, it would have no news of that author."""
    state = RunState(RUN_ID, CREATOR)
    first = tick_at(Kind.PROGRESS) - 2 * AUTHOR_BURST
    state.merge(Delta((progress(1, 0, first - 1),)), NOW + 3_600)
    step = math.ceil(1 / AUTHOR_RATE)
    outcomes = [
        state.merge(Delta((progress(1, 0, first + number),)), NOW + number * step).outcomes
        for number in range(2 * AUTHOR_BURST)
    ]
    assert outcomes == [[Outcome.NEW]] * len(outcomes)


def test_what_is_exported_makes_the_state_again() -> None:
    state = state_of(member(1), beat(1), progress(2, 5), member(3, device="a"), member(3, device="b"), beat(4))
    rows = state.take_dirty()
    assert state.take_dirty() == {}
    restored = RunState(RUN_ID, CREATOR)
    for row in rows.values():
        if row is not None:
            restored.merge(decode_delta(row), NOW)
    assert restored.root == state.root
    state.merge(Delta((beat(2),)), NOW)
    assert state.take_dirty() == {}
    state.expire(NOW + 3_700)
    assert state.take_dirty()[author_of(1)] is None


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_forged_and_replayed_entries_leave_no_trace(count: int) -> None:
    state, rng = state_of(member(1), notice(1), member(2)), random.Random(0)
    before = contents(state)
    pool = [member(1), notice(1), member(2), member(3, MEMBER_TICK - 900), beat(1, tick_at(Kind.BEAT) - 500)]
    for _ in range(count):
        item = rng.choice(pool)
        forged = rng.choice(
            (item, flipped(item, rng.randrange(10**5)), Signed(rng.choice(pool).author, item.body, item.signature))
        )
        report = state.merge(Delta((forged,)), NOW)
        assert report.new == []
        assert report.proofs == []
    assert contents(state) == before


def test_an_honest_author_is_never_put_off() -> None:
    """A newcomer gets all its slots at once; then come a heartbeat a second, and a lease and membership every five."""
    state = RunState(RUN_ID, CREATOR)
    assert MAX_SLOTS == 54
    assert MAX_SLOTS < AUTHOR_BURST
    for second in range(600):
        now = NOW + second
        said = [beat(1, tick_at(Kind.BEAT, now))]
        if second % 5 == 0:
            said += [member(1, tick_at(Kind.MEMBER, now)), lease(1, 0, tick_at(Kind.LEASE, now))]
        assert set(state.merge(Delta(tuple(said)), now).outcomes) == {Outcome.NEW}
