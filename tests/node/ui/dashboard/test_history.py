from __future__ import annotations

import math

import msgspec
import pytest

from farandole.node.status.status import MemberStatus, NodeStatus
from farandole.node.ui.dashboard import views
from farandole.node.ui.dashboard.views import MAX_POINTS_A_NODE, Curve, RunHistory

from ...statuses import ALICE, BOB, NOW, STATUS


def in_round(round_index: int, alices: str = "", bobs: str = "", loss: float = 2.0) -> NodeStatus:
    """Return a status in which both are in that round, after averaging with these partners."""

    def member(peer: str, partner: str) -> MemberStatus:
        return msgspec.structs.replace(
            STATUS.members[0], peer_id=peer, round=round_index, last_partner=partner, loss=loss
        )

    return msgspec.structs.replace(STATUS, members=[member(ALICE, alices), member(BOB, bobs)])


def observe(history: RunHistory, status: NodeStatus, now: float) -> None:
    history.observe(status.run, status.members, status.validation, now)


def test_a_meeting_is_seen_once_though_both_tell_of_it() -> None:
    history = RunHistory()
    observe(history, in_round(1, alices=BOB, bobs=ALICE), NOW)  # before it was seen: no meeting of now
    observe(history, in_round(2, alices=BOB), NOW + 1)
    observe(history, in_round(2, alices=BOB, bobs=ALICE), NOW + 2)
    observe(history, in_round(3, alices=BOB, bobs=ALICE), NOW + 3)
    observe(history, in_round(4), NOW + 4)

    meetings = list(history.meetings.values())
    assert [(meeting.round, meeting.at) for meeting in meetings] == [(2, NOW + 1), (3, NOW + 3)]
    assert {meetings[0].one, meetings[0].other} == {ALICE, BOB}


def test_newcomers_are_seen_though_thousands_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MAX_CURVES", 2)
    history, one = RunHistory(), in_round(1).members[0]
    for generation in "abc":
        members = [msgspec.structs.replace(one, peer_id=f"{generation}{number}") for number in range(2)]
        for round_index in (1, 2):
            now = [msgspec.structs.replace(each, round=round_index, last_partner=BOB) for each in members]
            observe(history, msgspec.structs.replace(STATUS, members=now), NOW)
        assert set(history.losses) == {f"{generation}0", f"{generation}1"}
        assert list(history.meetings.values())[-1].one == f"{generation}1"


def test_what_cannot_be_drawn_or_is_not_newer_is_no_point() -> None:
    curve = Curve(8)
    for x, y in ((0, 1.0), (1, math.nan), (2, 2.0), (3, math.inf), (2, 4.0), (1, 5.0)):
        curve.add(x, y)
    assert curve.points == [(0, 1.0), (2, 2.0)]


def test_a_curve_stays_small_and_keeps_its_ends_in_order() -> None:
    curve = Curve(MAX_POINTS_A_NODE)
    for x in range(100_000):
        curve.add(x, -x)

    xs = [x for x, _ in curve.points]
    assert MAX_POINTS_A_NODE / 4 < len(xs) < MAX_POINTS_A_NODE
    assert xs == sorted(xs)
    assert xs[0] == 0
    assert xs[-1] > 95_000
