"""The remedies that the terminal shows, each once between two states, and the reports of a node in a large run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
import trio
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.causes import clock_words
from farandole.node.mesh.host import open_host
from farandole.node.status.journal import MAX_EXCHANGES, Journal
from farandole.node.status.status import NO_START, NodeStatus
from farandole.node.ui.headline import REMIND_AFTER, STATUS_INTERVAL, Reminder, keep_reminding
from farandole.node.ui.reporting import Reporter
from farandole.protocol.state.believing import ClockSkew
from farandole.protocol.state.entries import Beat, Delta, Kind, Member, Progress
from farandole.protocol.state.liveness import Liveness
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.identity import peer_id_of

from ...protocol import authors
from ..hosts import LOOPBACK, open_node
from ..statuses import NOW, STATUS, ended

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


RUN_ID = b"r" * 32
NUM_MEMBERS = 1_000


def run_of_many() -> tuple[RunState, Liveness]:
    """Return what a newcomer hears of a large run, of which it has reached all members but one."""
    state, liveness, now = RunState(RUN_ID, b"c" * 32), Liveness(), time.time()
    for number in range(NUM_MEMBERS):
        payloads = {
            Kind.MEMBER: Member(device="cpu", addresses=("/ip4/127.0.0.1/tcp/9",) if number % 3 else ()),
            Kind.PROGRESS: Progress(0, 0, 0, 0, 0),
            Kind.BEAT: Beat(0, 0, 10_000_000, 10_000, b""),
        }
        for kind, said in payloads.items():
            state.merge(Delta((authors.signed(number, kind, 0, authors.tick_at(kind, now), said, RUN_ID),)), now)
        liveness.beat(authors.author_of(number), 1, trio.current_time())
        if number:
            liveness.trust(authors.author_of(number))
    return state, liveness


async def test_a_status_for_the_screen_stays_small_and_says_all_of_the_run() -> None:
    journal = Journal(lambda text: None)
    for round_index in range(3 * MAX_EXCHANGES):
        peer = round_index.to_bytes(32, "big")
        journal.record_exchange(ended(round_index, peer, bytes_sent=1, bytes_received=1, seconds=1))
        journal.note("x" * 10_000)
    async with open_node(run_id=RUN_ID) as (host, connectivity), open_host(authors.key_of(700), LOOPBACK) as other:
        reporter = Reporter(host, journal, RUN_ID, "large", 0.0, Shaping(), connectivity, *run_of_many())
        await other.connect(host.author, host.addresses)
        while not host.connected:
            await host.connections.changed.park()
        status = reporter.status(max_members=64)
        assert (status.run.members_live, status.run.members_heard, status.run.members_gone) == (NUM_MEMBERS - 1, 1, 0)
        assert len(status.members) == 64
        assert (status.members[0].peer_id, status.members[0].path) == (peer_id_of(other.author), "direct")
        assert len(status.recent_exchanges) == MAX_EXCHANGES
        assert len(msgspec.json.encode(status)) < 128_000
        assert len(reporter.status().members) == NUM_MEMBERS


async def test_others_that_left_are_counted_when_their_entries_are_over() -> None:
    counts, now = list[int](), time.time()
    async with open_node(run_id=RUN_ID) as (host, connectivity):
        reporter = Reporter(host, Journal(lambda text: None), RUN_ID, "small", 0.0, Shaping(), connectivity)
        for member in (None, Member(left=True), None, Member(), None):
            reporter.state, reporter.liveness = RunState(RUN_ID, b"c" * 32), Liveness()
            if member is not None:
                entry = authors.signed(1, Kind.MEMBER, 0, authors.tick_at(Kind.MEMBER, now), member, RUN_ID)
                reporter.state.merge(Delta((entry,)), now)
            counts.append(reporter.status().run.members_left)
    assert counts == [0, 1, 1, 0, 0]
