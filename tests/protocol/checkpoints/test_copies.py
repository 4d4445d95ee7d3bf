"""All nodes agree on which author's checkpoint is copied, and on the copiers."""

from __future__ import annotations

import random

from farandole.protocol.checkpoints.copies import MAX_ROUNDS_OLDER, NUM_COPIERS, Choice, choose, is_copier, ranked
from farandole.protocol.state.entries import CheckpointNotice

RUN = b"r" * 32
MEMBERS = [bytes([number]) * 32 for number in range(12)]
ANN, BOB, CYD, DAN = MEMBERS[:4]


def notice(round_index: int, name: bytes = b"x") -> CheckpointNotice:
    return CheckpointNotice(round_index, 0, name * 32, 1, 1, 1)


def test_all_rank_alike_stages_and_runs_differ_and_who_leaves_changes_no_other_rank() -> None:
    shuffled = random.Random(1).sample(MEMBERS, len(MEMBERS))
    assert ranked(RUN, 0, shuffled) == ranked(RUN, 0, MEMBERS)
    assert len({tuple(ranked(RUN, stage, MEMBERS)) for stage in range(10)}) == 10
    assert ranked(b"s" * 32, 0, MEMBERS) != ranked(RUN, 0, MEMBERS)
    order = ranked(RUN, 0, MEMBERS)
    for member in MEMBERS:
        assert ranked(RUN, 0, set(MEMBERS) - {member}) == [other for other in order if other != member]


def test_the_first_that_has_announced_is_copied_by_the_two_next() -> None:
    order = ranked(RUN, 0, MEMBERS)
    assert ranked(RUN, 0, order[3:]) == order[3:]
    copiers = [member for member in MEMBERS if is_copier(RUN, 0, MEMBERS, order[0], member)]
    assert sorted(copiers) == sorted(order[1 : 1 + NUM_COPIERS])
    assert is_copier(RUN, 0, MEMBERS, order[3], order[0])
    assert not is_copier(RUN, 0, MEMBERS, order[3], order[3])


def test_a_newcomer_takes_what_two_hold_where_the_run_is() -> None:
    notices = {
        ANN: [notice(20, b"a")],
        BOB: [notice(21, b"b"), notice(20, b"a")],
        CYD: [notice(18, b"c"), notice(20, b"a")],
        DAN: [notice(18, b"c")],
    }
    first, second = Choice(b"a" * 32, 20, (ANN, BOB, CYD)), Choice(b"c" * 32, 18, (CYD, DAN))
    assert choose(notices, 0) == [first, second]
    assert choose(notices, 0, {CYD: "", DAN: ""}) == [second, first], "of those reached, two hold that"
    near, far = dict.fromkeys((ANN, BOB, CYD), "home"), {DAN: "elsewhere"}
    assert choose(notices, 0, near | far) == [second, first], "its holders have less in common"
    assert choose(notices, 18) == [first]
    assert choose(notices, 20) == []
    assert choose({}, 0) == []
    assert choose({ANN: [notice(20, b"a")], BOB: [notice(20, b"b")]}, 0) == []


def test_two_liars_ahead_come_after_the_honest_and_what_lies_far_behind_the_run_is_not_chosen() -> None:
    honest = {member: [notice(60, b"h")] for member in MEMBERS[:6]}
    liars = {member: [notice(63, b"l")] for member in MEMBERS[6:8]}
    mad = {member: [notice(2**31 - 1, b"m")] for member in MEMBERS[8:10]}
    choices = choose(honest | liars | mad, 50)
    assert [choice.round for choice in choices] == [60, 63]
    crowd = {member: [notice(100_000, b"g")] for member in MEMBERS[8:]}
    assert choose({ANN: [notice(60, b"h")], BOB: [notice(60, b"h")]} | crowd, 50, {ANN: "", BOB: ""})[0].round == 60
    notices = {ANN: [notice(20, b"a")], BOB: [notice(20, b"a")], CYD: [notice(20 + MAX_ROUNDS_OLDER + 1, b"b")]}
    assert [choice.round for choice in choose(notices, 0)] == [20]
    assert choose(notices | {DAN: notices[CYD], MEMBERS[4]: notices[CYD]}, 0) == [
        Choice(b"b" * 32, 20 + MAX_ROUNDS_OLDER + 1, (CYD, DAN, MEMBERS[4]))
    ]
