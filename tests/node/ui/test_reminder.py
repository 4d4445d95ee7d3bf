"""The remedies that the terminal shows: each once, after a while, and again when there was another state in between."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import trio
from trio.testing import MockClock

from farandole.node.base.causes import clock_words
from farandole.node.status.journal import Journal
from farandole.node.status.status import NO_START, NodeStatus
from farandole.node.ui.headline import REMIND_AFTER, STATUS_INTERVAL, Reminder, keep_reminding
from farandole.protocol.state.believing import ClockSkew

from ..statuses import NOW, STATUS

WELL = STATUS
ALONE = msgspec.structs.replace(STATUS, run=msgspec.structs.replace(STATUS.run, members_live=1, members_gone=0))
ISOLATED = msgspec.structs.replace(STATUS, isolation="dialled all known peers once, none answered", connected_peers=0)


def told(*statuses: NodeStatus) -> list[tuple[int, str]]:
    """Return the index of each status at which a line is printed, and the line; half the patience is in between."""
    reminder = Reminder()
    lines = ((index, reminder.look(status, index * REMIND_AFTER / 2)) for index, status in enumerate(statuses))
    return [(index, line) for index, line in lines if line]


def test_a_moment_without_a_remedy_does_not_have_it_printed_again() -> None:
    waiting = msgspec.structs.replace(
        STATUS, phase="fetching weights", phase_detail=NO_START, phase_since=NOW - REMIND_AFTER, at=NOW
    )
    trying = msgspec.structs.replace(waiting, phase_detail="bob: cannot be reached")
    ((index, line),) = told(trying, waiting, trying, waiting, trying, waiting)
    assert index == 1, "it has lasted that long already, as the status says"
    assert "--start FOLDER" in line


SKEW = ClockSkew(-3_660.0, 3, is_agreed=True)
WRONG = msgspec.structs.replace(STATUS, clock=SKEW, warnings=[": ".join(clock_words(SKEW))])
ISOLATED_LONG = msgspec.structs.replace(ISOLATED, isolation="dialled all known peers 2 times, no member answered")
SET_RIGHT = msgspec.structs.replace(WRONG, clock=None, warnings=[], warned_at=[])
WRONG_AGAIN = msgspec.structs.replace(SET_RIGHT, clock=SKEW)


@pytest.mark.parametrize(
    ("statuses", "printed"),
    [
        ([WELL, ALONE, ALONE, WELL, ALONE, ALONE, WELL], []),  # it is soon over
        ([ALONE] * 9, [2]),
        ([*[ALONE] * 4, *[ISOLATED] * 4], [2, 6]),
        ([*[ALONE] * 4, WELL, *[ALONE] * 4], [2, 7]),  # the node was well in between
        ([*[ISOLATED] * 3, *[ISOLATED_LONG] * 3], [2]),  # other words for the same
        ([WRONG] * 9, []),  # it was printed as a warning
        ([*[WRONG] * 4, SET_RIGHT, *[WRONG_AGAIN] * 4], [7]),
    ],
)
def test_a_remedy_is_printed_when_it_is_news(statuses: list[NodeStatus], printed: list[int]) -> None:
    assert [index for index, _ in told(*statuses)] == printed


async def test_a_daemon_prints_it_as_a_warning_and_keeps_it_as_an_event(autojump_clock: MockClock) -> None:
    said: list[str] = []
    journal = Journal(said.append)
    statuses: Iterator[NodeStatus] = iter([WELL] * 3)
    with trio.move_on_after(REMIND_AFTER + 9 * STATUS_INTERVAL):
        await keep_reminding(lambda: next(statuses, ALONE), journal.remind)
    (line,) = said
    assert line.startswith("warning: training alone")
    (event,) = journal.events
    assert event.is_warning
    assert f"warning: {event.text}" == line
    assert not journal.warnings, "the first line of the status says it already"
