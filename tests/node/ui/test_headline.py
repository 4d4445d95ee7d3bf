from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farandole.node.join.bootstrap import ONLY_PRIVATE
from farandole.node.status.status import NO_START, REFUSED_HERE, REFUSED_THERE, ExchangeStatus, NodeStatus
from farandole.node.ui.headline import FAILURES_IN_A_ROW, USUAL_SECONDS, headline
from farandole.protocol.run.releases import ReleaseConflict
from farandole.protocol.state.believing import ClockSkew
from farandole.protocol.state.state import MAX_AHEAD

from ..statuses import BOB, NOW, STATUS


def changed(**changes: object) -> NodeStatus:
    return msgspec.structs.replace(STATUS, **changes)


def alone_in_the_run(*, members_gone: int = 0, members_left: int = 0, **changes: object) -> NodeStatus:
    run = msgspec.structs.replace(STATUS.run, members_live=1, members_gone=members_gone, members_left=members_left)
    return changed(run=run, **changes)


def exchanges(*verdicts: str) -> list[ExchangeStatus]:
    return [
        ExchangeStatus(index, "" if verdict.startswith("alone") else BOB, verdict, 0, 0, 0.1, NOW - 40 + index)
        for index, verdict in enumerate(verdicts)
    ]


def test_a_healthy_node_says_that_there_is_nothing_to_do() -> None:
    found = headline(changed(recent_exchanges=exchanges("committed")), NOW)
    assert (found.level, found.remedy) == ("well", "")
    assert found.text == (
        f"training with 2 others, round 7, 9.50 k tokens/s, loss 2.500; averaged 40 s ago with {BOB[-8:]}"
    )


FAILED = "failed: the partner died"


@pytest.mark.parametrize(
    "changes",
    [
        {"clock": ClockSkew(MAX_AHEAD - 1, 3, is_agreed=True)},  # which entries tolerate
        {"release_conflict": ReleaseConflict(older=("0.0.1",))},  # others train with this node
        {"recent_exchanges": exchanges(*[FAILED] * (FAILURES_IN_A_ROW - 1))},
        {"recent_exchanges": exchanges(*[FAILED] * 5, "committed")},
        {"recent_exchanges": exchanges(*["alone: no peer is free"] * 5)},
    ],
)
def test_what_is_small_or_over_is_nobodys_business(changes: dict[str, object]) -> None:
    assert headline(changed(**changes), NOW).level == "well"


JOINING: dict[str, Any] = {"phase": "joining", "is_member": False}
NO_WEIGHTS = {"phase": "fetching weights", "phase_detail": NO_START}
CUT_OFF = {"isolation": "no member answered", "connected_peers": 0}
BEHIND, DISPUTED = ClockSkew(-3_660.0, 3, is_agreed=True), ClockSkew(3_660.0, 1, is_agreed=False)
NORM, LONG = "refused: the norm is off", "failed: the contributions took too long"
LATE = [msgspec.structs.replace(each, late_seconds=8.0) for each in exchanges(*["committed"] * 3)]


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (
            changed(**JOINING, phase_detail="dialling"),
            "not in the run yet, for 3 min 05 s: dialling -> farandole doctor",
        ),
        (
            changed(**JOINING, phase_detail=f"{ONLY_PRIVATE} (10.0.0.1)"),
            "not in the run yet -> public address or a relay",
        ),
        (changed(**NO_WEIGHTS, phase_since=NOW - USUAL_SECONDS), "in the run, not training yet -> --start FOLDER"),
        (alone_in_the_run(), "training alone: there is no other live member in this run -> farandole run invite"),
        (
            alone_in_the_run(members_gone=1, members_left=5),
            "training alone: 1 other gone, 5 left -> farandole dial ADDRESS",
        ),
        (
            alone_in_the_run(members_gone=2, isolation="no member answered", connected_peers=1),
            "training alone: 2 others gone -> farandole dial ADDRESS",
        ),
        (
            changed(disk="round 8 is not written; free 61.0 MB in /home"),
            "round 8 is not written -> free 61.0 MB in /home",
        ),
        (changed(phase="fetching weights", is_member=False, disk="no room; free 67.1 MB"), "no room -> free 67.1 MB"),
        (alone_in_the_run(is_member=False), "training alone: this node is no longer a member -> ask the run's creator"),
        (changed(**CUT_OFF), "cut off from all other members: no member answered -> check this machine's internet"),
        (changed(**CUT_OFF), "cut off -> if a member's public address changed: `farandole dial ADDRESS`"),
        (changed(**CUT_OFF, clock=BEHIND), "this machine's clock is 1 h 01 min behind -> timedatectl set-ntp true"),
        (
            changed(**CUT_OFF, clock=DISPUTED),
            "this machine's clock is 1 h 01 min ahead compared with -> the time on both",
        ),
        (
            changed(recent_exchanges=exchanges(*[f"failed: the partner aborted: {NORM}"] * 4)),
            "others refuse this node's contributions, the last 4 in a row: the norm is off -> move away the folder",
        ),
        (
            changed(recent_exchanges=exchanges(*[f"failed: {NORM}"] * 3)),
            "this node refuses what its partners send, the last 3 in a row: the norm is off -> farandole peers",
        ),
        (
            changed(recent_exchanges=exchanges(*[f"failed: {REFUSED_HERE} far", f"failed: {REFUSED_THERE} far"] * 2)),
            "others refuse this node's contributions, the last 4 in a row: far -> move away the folder",
        ),
        (
            alone_in_the_run(release_conflict=ReleaseConflict(newer=("9.8", "9.8"))),
            "training alone: 2 connected peers run farandole 9.8; this node runs 0.1.0 -> upgrade this node",
        ),
        (
            alone_in_the_run(**JOINING, release_conflict=ReleaseConflict(older=("0.0.1", ""))),
            "not in the run yet: 2 connected peers run farandole 0.0.1 and a farandole that does -> owners to upgrade",
        ),
        (
            changed(recent_exchanges=exchanges("committed", *[LONG, "alone: no peer is free"] * 5)),
            "no exchange succeeds, the last 5 in a row failed: the contributions took too long -> farandole doctor",
        ),
        (changed(recent_exchanges=LATE), "this machine is busy: judging takes 8.0 s, and exchanges -> measure less"),
        (
            changed(phase="preparing", trainer_restarts=2, is_trainer_dead=True, warnings=["it died: CUDA error"]),
            "the trainer died (2 times so far) and is started again -> CUDA error",
        ),
        (
            changed(phase="failed", phase_detail="the trainer died"),
            "not training: the trainer died -> farandole doctor",
        ),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(status: NodeStatus, told: str) -> None:
    found, (text, remedy) = headline(status, NOW), told.split(" -> ")
    assert found.level == "trouble"
    assert found.text.startswith(text)
    assert remedy in found.remedy


@pytest.mark.parametrize("connected", [0, 1])  # a relay, perhaps
@pytest.mark.parametrize(("left", "text"), [(1, "1 other"), (6, "6 others")])
def test_others_that_left_are_not_gone_and_the_internet_is_not_to_blame(left: int, text: str, connected: int) -> None:
    isolation = "dialled all known peers once, no member answered; next in 5 s"
    found = headline(alone_in_the_run(members_left=left, isolation=isolation, connected_peers=connected), NOW)
    assert found.level == "busy"
    assert found.sentences == f"training alone: {text} left, and may come back"


def test_what_takes_its_usual_time_is_no_trouble() -> None:
    young = changed(**JOINING, started_at=NOW - USUAL_SECONDS / 2)
    fetching = changed(phase="fetching weights", phase_detail="12.0 of 40.0 MB", phase_since=NOW - 900)
    looking = changed(**NO_WEIGHTS, phase_since=NOW - USUAL_SECONDS / 2)
    leaving = changed(phase="leaving")
    paused = changed(phase="paused", phase_detail="paused; `farandole resume` goes on")
    resumed = changed(phase="preparing", trainer_restarts=2)  # which was long ago
    for status in (young, fetching, looking, leaving, paused, resumed):
        assert headline(status, NOW).level == "busy"
    assert headline(paused, NOW).text == "not training: paused; `farandole resume` goes on"
    assert headline(fetching, NOW).text == "in the run, not training yet: 12.0 of 40.0 MB"


def test_a_relay_and_a_node_that_has_finished_are_well() -> None:
    relay = changed(phase="relaying", is_member=False)
    finished = changed(phase="finished", phase_detail="the run's creator has stopped it; staying for the others")

    cut_off = msgspec.structs.replace(relay, isolation="no peer answers", connected_peers=0)
    assert "Training" not in headline(cut_off, NOW).remedy
    assert headline(relay, NOW).text == "relaying for 2 connected peers"
    waiting = msgspec.structs.replace(cut_off, isolation="", waits_for="a member: on its machine, `farandole dial X`")
    found = headline(waiting, NOW)
    assert (found.level, found.text) == ("busy", "waiting for a member: on its machine, `farandole dial X`")
    assert headline(finished, NOW).text.startswith("the run's creator has stopped it; here with 2 others for")
