"""The creator's notices in the run state: neither others' notices nor old ones get through."""

from __future__ import annotations

import pytest

from farandole.protocol.state.entries import Delta, Kind, Notice, Signed
from farandole.protocol.state.state import RunState

from ..authors import CREATOR, NOW, RUN_ID, signed, tick_at

CREATORS_NUMBER, MALLORY = 255, 1


def notice(action: str, at: float, number: int = CREATORS_NUMBER, run_id: bytes = RUN_ID) -> Signed:
    return signed(number, Kind.NOTICE, 0, tick_at(Kind.NOTICE, at), Notice(action), run_id)  # type: ignore[arg-type]


def action_of(state: RunState) -> str | None:
    said = state.payload(CREATOR, Notice)
    return None if said is None else said.action


def test_an_old_pause_that_is_played_again_does_not_undo_a_resume() -> None:
    state = RunState(RUN_ID, CREATOR)
    pause, resume = notice("pause", NOW - 60), notice("resume", NOW)
    state.merge(Delta((pause,)), NOW)
    assert action_of(state) == "pause"
    for entries in ((resume,), (pause,), (pause, resume), (resume, pause)):
        state.merge(Delta(entries), NOW)
        assert action_of(state) == "resume"


@pytest.mark.parametrize("action", ["pause", "resume", "stop", "say"])
def test_no_one_but_the_creator_can_say_it(action: str) -> None:
    state = RunState(RUN_ID, CREATOR)
    genuine = notice(action, NOW)
    by_mallory = notice(action, NOW, MALLORY)
    as_creator = Signed(CREATOR, by_mallory.body, by_mallory.signature)
    of_another_run = notice(action, NOW, run_id=b"o" * 32)
    for forged in (by_mallory, as_creator, of_another_run):
        state.merge(Delta((forged,)), NOW)
        assert action_of(state) is None
    state.merge(Delta((genuine,)), NOW)
    assert action_of(state) == action
