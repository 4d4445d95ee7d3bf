"""What a node writes of itself into the run state."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.state.entries import PARTNER_BYTES, RULES, Beat, Delta, Entry, Kind, Member, Progress
from farandole.protocol.state.node_state import NodeState, TrainingState, beat_of, progress_of, training_of
from farandole.protocol.state.state import Outcome, RunState
from farandole.protocol.state.writer import MAX_LEAD, MAX_SPANS, Mark, Writer
from farandole.protocol.wire.errors import LocalProtocolError
from farandole.protocol.wire.identity import peer_id_of

from ..authors import CREATOR, NOW, RUN_ID, key_of

PAYLOADS = {Kind.MEMBER: Member(), Kind.BEAT: Beat(0, 0, None, 0), Kind.PROGRESS: Progress(0, 0, 0, 0, 0)}


class Author:
    """A writer whose disk outlives it."""

    def __init__(self) -> None:
        self.mark: Mark = ()
        self.written: list[tuple[int, int]] = []
        self.entries: list[Entry] = []
        self.restart()

    def restart(self) -> None:
        self.writer = Writer(key_of(1), RUN_ID)
        self.writer.resume(self.mark)

    def write(self, kind: Kind, now: float) -> bool:
        if self.writer.delay(kind, 0, now) > 0:
            return False
        mark = self.writer.mark_needed(kind, 0, now)
        if mark is not None:
            self.mark = mark
            self.writer.marked(mark)
        entry = self.writer.write(kind, 0, PAYLOADS[kind], now)
        self.entries.append(entry)
        self.written.append((entry.slot, entry.tick))
        assert entry.written_at <= now + 60, "others would defer it"
        return True


def entry_of_past_life(now: float) -> Entry:
    author = Author()
    author.write(Kind.BEAT, now)
    return author.entries[-1]


@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "restart"]), st.sampled_from([Kind.MEMBER, Kind.BEAT, Kind.PROGRESS]),
                  st.floats(-30, 90) | st.sampled_from([-3600.0, -600.0, -120.0, -75.0, 120.0, 600.0, 3600.0])),
        max_size=40,
    )
)  # fmt: skip
@settings(max_examples=150)
def test_no_slot_and_tick_is_ever_signed_twice(steps: list[tuple[str, Kind, float]]) -> None:
    """Whatever the clock does, and however often the node dies."""
    author, now = Author(), NOW
    for step, kind, passed in steps:
        now += passed
        if step == "restart":
            author.restart()
        else:
            author.write(kind, now)
    assert len(set(author.written)) == len(author.written)


def test_entries_are_valid_and_each_newer_than_the_last() -> None:
    author, state = Author(), RunState(RUN_ID, CREATOR)
    for now in (NOW, NOW + 0.1, NOW - 4.0, NOW + 9.0):
        assert author.write(Kind.MEMBER, now)
        assert state.merge(Delta((author.entries[-1].signed,)), NOW).outcomes == [Outcome.NEW]
    mark = author.writer.mark_needed(Kind.PROGRESS, 0, NOW)
    assert mark is None or mark[-1][1] <= NOW + RULES[Kind.PROGRESS].quantum


def test_nothing_is_signed_beyond_the_stored_mark() -> None:
    writer = Writer(key_of(1), RUN_ID)
    with pytest.raises(LocalProtocolError, match="mark"):
        writer.write(Kind.MEMBER, 0, Member(), NOW)
    mark = writer.mark_needed(Kind.MEMBER, 0, NOW)
    assert mark is not None
    writer.marked(mark)
    writer.write(Kind.MEMBER, 0, Member(), NOW)


def test_a_slot_written_too_fast_has_to_wait() -> None:
    author = Author()
    assert [author.write(Kind.PROGRESS, NOW) for _ in range(3)][-1] is False
    assert author.writer.delay(Kind.PROGRESS, 0, NOW) > 0
    with pytest.raises(LocalProtocolError, match="faster"):
        author.writer.write(Kind.PROGRESS, 0, PAYLOADS[Kind.PROGRESS], NOW)
    assert author.write(Kind.PROGRESS, NOW + author.writer.delay(Kind.PROGRESS, 0, NOW) + 1)


def test_a_second_that_others_remember_is_in_no_mark_yet() -> None:
    remembered = entry_of_past_life(NOW)
    heir = Author()
    heir.writer.observe(remembered)
    assert heir.writer.mark_needed(Kind.MEMBER, 0, NOW) is not None
    assert heir.write(Kind.BEAT, NOW)
    assert heir.written[-1][1] == remembered.tick + 1


def test_past_lives_that_are_heard_of_newest_first_leave_a_mark_that_can_be_stored() -> None:
    """The disk was lost, and others send back the entries, in any order."""
    heir = Author()
    for hours in range(1, 20):
        heir.writer.observe(entry_of_past_life(NOW - 3600 * hours))
    assert heir.write(Kind.BEAT, NOW)
    assert len(heir.mark) <= MAX_SPANS
    assert heir.mark[-1][1] == NOW


@pytest.mark.parametrize("offset", [75.0, 90.0, 3600.0, 30 * 86_400.0, -3600.0])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_clock_that_is_set_right_leaves_its_author_heard(offset: float, is_restarted: bool) -> None:
    author = Author()
    assert author.write(Kind.BEAT, NOW)
    author.write(Kind.BEAT, NOW + 1 + offset)  # after a step back it may have to wait
    if is_restarted:
        author.restart()
    assert author.write(Kind.BEAT, NOW + 2)
    assert author.written[-1][1] == NOW + 2
    for second in range(3, 8):
        assert author.write(Kind.MEMBER, NOW + 10 * second)


def test_what_was_signed_by_a_fast_clock_is_passed_over_when_its_time_comes() -> None:
    author = Author()
    for second in range(3):
        assert author.write(Kind.BEAT, NOW + 3600 + second)
    for second in range(3500, 3700):
        author.write(Kind.BEAT, NOW + second)
    assert len(set(author.written)) == len(author.written)
    assert NOW + 3699 <= author.written[-1][1] <= NOW + 3699 + MAX_LEAD


def test_a_clock_that_jumps_again_and_again_is_remembered_within_a_bound() -> None:
    author = Author()
    for jump in range(3 * MAX_SPANS):
        author.write(Kind.BEAT, NOW + 1_000 * jump)
    assert len(author.mark) == MAX_SPANS
    assert not author.write(Kind.BEAT, NOW + 500), "the oldest spans are one"
    assert author.write(Kind.BEAT, NOW + 1_000 * (3 * MAX_SPANS - 1) - 500)


BOB = b"b" * 32


@pytest.mark.parametrize(
    ("loss", "told"), [(None, None), (2.5, 2_500_000), (math.nan, None), (math.inf, 2**31 - 1), (1e9, 2**31 - 1)]
)
def test_any_state_has_a_heartbeat(loss: float | None, told: int | None) -> None:
    state = NodeState(round=2**40, inner_steps=7, tokens=9, tokens_per_second=3.9, loss=loss, partner=peer_id_of(BOB))
    assert beat_of(state) == Beat(7, 2**31 - 1, told, 3, BOB[:PARTNER_BYTES])
    assert beat_of(NodeState()).partner == b""
    assert progress_of(state, 4, 5) == Progress(7, 2**31 - 1, 9, 4, 5)


def test_the_training_is_a_part_of_the_state() -> None:
    state = NodeState(round=3, phase="paused", stage=2)
    training = training_of(state)
    assert type(training) is TrainingState
    assert NodeState(**msgspec.structs.asdict(training), phase="paused", stage=2) == state
