"""Everybody agrees on whose checkpoint is copied, and by whom."""

from __future__ import annotations

import random

from farandole.protocol.copies import (
    MAX_ROUNDS_OLDER,
    NUM_COPIERS,
    Choice,
    choose,
    copied_author,
    is_copier,
    ranked,
)
from farandole.protocol.entries import CheckpointNotice

RUN = b"r" * 32
MEMBERS = [bytes([number]) * 32 for number in range(12)]
ANN, BOB, CYD, DAN = MEMBERS[:4]


def notice(round_index: int, name: bytes = b"x") -> CheckpointNotice:
    return CheckpointNotice(round_index, 0, name * 32, 1, 1, 1)


def test_all_rank_alike_and_stages_and_runs_differ() -> None:
    shuffled = random.Random(1).sample(MEMBERS, len(MEMBERS))
    assert ranked(RUN, 0, shuffled) == ranked(RUN, 0, MEMBERS)
    assert len({tuple(ranked(RUN, stage, MEMBERS)) for stage in range(10)}) == 10
    assert ranked(b"s" * 32, 0, MEMBERS) != ranked(RUN, 0, MEMBERS)


def test_who_leaves_changes_no_other_rank() -> None:
    order = ranked(RUN, 0, MEMBERS)
    for member in MEMBERS:
        assert ranked(RUN, 0, set(MEMBERS) - {member}) == [other for other in order if other != member]


def test_the_first_that_has_announced_is_copied_by_the_two_next() -> None:
    order = ranked(RUN, 0, MEMBERS)
    assert copied_author(RUN, 0, []) is None
    assert copied_author(RUN, 0, order[3:]) == order[3]
    copiers = [member for member in MEMBERS if is_copier(RUN, 0, MEMBERS, order[0], member)]
    assert sorted(copiers) == sorted(order[1 : 1 + NUM_COPIERS])
    assert is_copier(RUN, 0, MEMBERS, order[3], order[0])
    assert not is_copier(RUN, 0, MEMBERS, order[3], order[3])


def test_a_newcomer_takes_the_newest_that_two_hold_if_hardly_any_is_newer() -> None:
    notices = {
        ANN: [notice(20, b"a")],
        BOB: [notice(21, b"b"), notice(20, b"a")],
        CYD: [notice(18, b"c"), notice(20, b"a")],
        DAN: [notice(18, b"c")],
    }
    assert choose(notices, 0) == Choice(b"a" * 32, 20, (ANN, BOB, CYD))
    assert choose(notices, 20) is None
    notices[BOB][0] = notice(20 + MAX_ROUNDS_OLDER + 1, b"b")
    assert choose(notices, 0) is None
    assert choose({}, 0) is None
    assert choose({ANN: [notice(20, b"a")], BOB: [notice(20, b"b")]}, 0) is None
