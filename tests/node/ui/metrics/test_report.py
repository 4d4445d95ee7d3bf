"""Sending rounds to a tracker: once each, however often it begins anew, and whatever the tracker does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from logging.handlers import RotatingFileHandler
from random import Random

import msgspec
import pytest

from farandole.node.app.commands.uninstall import foreign_in, made_in
from farandole.node.base.system.files import locked_file
from farandole.node.status.round_log import RoundFigures
from farandole.node.ui.metrics.report import MAX_BATCH, ReportPatience, report_rounds
from farandole.node.ui.metrics.trackers import (
    OpenedRun,
    ReportedRun,
    TrackerError,
    TrackerUnreachableError,
    open_tracker,
    reported_run,
)
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.errors import FarandoleError

from .conftest import MODEL, SIGNED, NodeFolder, rounds

PEER = "12D3KooWA4Z2yBhyCBVqZPMkKPr8Yk9GQKCkFyrY4AOzkExample"
RUN = reported_run(Manifest("tiny run", MODEL), SIGNED.run_id.hex(), PEER)


class ListTracker:
    """A tracker that keeps what it gets, and is away, or refuses, when it should."""

    def __init__(self) -> None:
        self.kept: list[RoundFigures] = []
        self.batches: list[int] = []
        self.faults: list[TrackerError] = []
        """The next calls raise these."""
        self.id = "first"
        self.is_open = False

    def start(self, run: ReportedRun) -> OpenedRun:
        self._fail()
        self.is_open = True
        return OpenedRun(f"list {self.id}", is_new=not self.kept, where="a list")

    def log(self, rounds: Sequence[RoundFigures]) -> None:
        assert self.is_open
        self._fail()
        self.kept += rounds
        self.batches.append(len(rounds))

    def finish(self) -> None:
        self.is_open = False

    @property
    def indices(self) -> list[int]:
        return [each.record.round for each in self.kept]

    def _fail(self) -> None:
        if self.faults:
            raise self.faults.pop(0)


class Story:
    """Reports, and does the next step of a story in each wait; ends after the last one."""

    def __init__(self, node: NodeFolder, tracker: ListTracker) -> None:
        self.node = node
        self.tracker = tracker
        self.said: list[str] = []
        self.waits: list[float] = []

    def report(self, *steps: Callable[[], object], is_once: bool = False) -> int:
        left = iter(steps)
        patience = ReportPatience(lambda seconds: self._wait(left, seconds), self.said.append, Random(0), is_once)
        return report_rounds(self.node.rounds, self.tracker, RUN, patience)

    def _wait(self, left: Iterator[Callable[[], object]], seconds: float) -> bool:
        self.waits.append(seconds)
        step = next(left, None)
        if step is not None:
            step()
        return step is None


@pytest.fixture
def story(node: NodeFolder) -> Story:
    return Story(node, ListTracker())


def test_rounds_go_when_they_are_over_and_once_each(story: Story) -> None:
    """Also when it begins before there is a round, and again after it has ended."""
    node, tracker = story.node, story.tracker
    assert story.report(lambda: node.add(rounds(0, 1)), lambda: None, lambda: node.add(rounds(2))) == 3
    assert (tracker.indices, tracker.is_open) == ([0, 1, 2], False)
    node.add(rounds(3, 4))
    assert story.report(lambda: node.add(rounds(5))) == 3
    assert story.report() == 0
    assert tracker.indices == [0, 1, 2, 3, 4, 5]
    assert [each.tokens_in_all for each in tracker.kept] == [640 * number for number in range(1, 7)]
    assert tracker.kept[2].values["round/tokens in all"] == 3 * 640


def test_once_sends_what_is_there(story: Story) -> None:
    story.node.add(rounds(*range(MAX_BATCH + 3)))
    assert story.report(is_once=True) == MAX_BATCH + 3
    assert (story.tracker.batches, story.waits) == ([MAX_BATCH, 3], [])
    story.node.add(rounds(MAX_BATCH + 3))
    assert story.report(is_once=True) == 1
    assert story.tracker.indices == list(range(MAX_BATCH + 4))


def test_a_tracker_that_is_away_gets_everything_later(story: Story) -> None:
    """Its pauses grow, and it may be away from the beginning."""
    node, tracker = story.node, story.tracker
    node.add(rounds(0, 1))
    tracker.faults = [TrackerUnreachableError("away") for _ in range(4)]

    def go_away() -> None:
        node.add(rounds(2))
        tracker.faults = [TrackerUnreachableError("away")]

    nothing = [lambda: None] * 4
    assert story.report(*nothing, go_away, lambda: node.add(rounds(3)), lambda: None) == 4
    assert tracker.indices == [0, 1, 2, 3]
    first, _, _, fourth = story.waits[:4]
    assert fourth > 2 * first  # doubled three times, each between half and one and a half of that
    assert len([line for line in story.said if line.startswith("away; next attempt in ")]) == 5


def test_who_ends_a_report_while_the_tracker_is_away_loses_nothing(story: Story) -> None:
    story.node.add(rounds(0, 1))
    story.tracker.faults = [TrackerUnreachableError("away")]
    assert story.report() == 0
    assert (story.tracker.indices, story.tracker.is_open) == ([], False)
    assert story.report() == 2


def test_once_reports_that_the_tracker_is_away(story: Story) -> None:
    story.node.add(rounds(0))
    story.tracker.faults = [TrackerUnreachableError("away")]
    with pytest.raises(TrackerUnreachableError, match="away"):
        story.report(is_once=True)
    assert story.report(is_once=True) == 1


def test_a_refusal_ends_it(story: Story) -> None:
    story.node.add(rounds(0))
    story.tracker.faults = [TrackerError("no such key")]
    with pytest.raises(TrackerError, match="no such key"):
        story.report()
    assert not story.tracker.is_open


def test_another_place_gets_all_rounds_and_so_does_a_run_that_was_deleted(story: Story) -> None:
    node, tracker = story.node, story.tracker
    node.add(rounds(0, 1))
    story.report()
    tracker.id = "second"
    assert story.report() == 2
    tracker.kept.clear()
    assert story.report() == 2
    assert [each.tokens_in_all for each in tracker.kept] == [640, 1280]


def test_rounds_that_the_node_repeats_after_a_crash_are_sent(story: Story) -> None:
    """They are other rounds, at other times; the first ones are not sent again."""
    node, tracker = story.node, story.tracker
    node.add(rounds(0, 1, 2))
    story.report()
    node.add(msgspec.structs.replace(record, at=record.at + 600) for record in rounds(1, 2, 3))
    assert story.report() == 3
    assert tracker.indices == [0, 1, 2, 1, 2, 3]


def test_when_the_last_round_is_no_longer_in_the_file_later_ones_are_sent(story: Story) -> None:
    node, tracker = story.node, story.tracker
    node.add(rounds(0, 1))
    story.report()
    node.rounds.unlink()
    node.add(rounds(0, 5, 6))
    assert story.report() == 2
    assert tracker.indices == [0, 1, 5, 6]


def test_two_processes_do_not_send_the_same_rounds(story: Story) -> None:
    story.node.add(rounds(0))
    story.report()
    (lock,) = (story.node.path / "reports").glob("*.lock")
    with locked_file(lock), pytest.raises(TrackerError, match="another process"):
        story.report()


def test_rounds_go_once_each_across_rotations_and_a_line_without_its_end_waits(story: Story) -> None:
    """The real handler of the log writes and rotates the file."""
    path, lines = story.node.rounds, [msgspec.json.encode(record).decode() for record in rounds(*range(8))]
    size = max(map(len, lines)) + 1
    with closing(RotatingFileHandler(path, maxBytes=3 * size, backupCount=1, encoding="utf-8")) as node:

        def write(*indices: int) -> None:
            for index in indices:
                node.handle(logging.LogRecord("rounds", logging.INFO, "", 0, lines[index], None, None))

        write(0, 1)
        assert story.report(lambda: write(2, 3, 4), lambda: None, lambda: write(5), lambda: None) == 6
        write(6)
    assert path.with_name(f"{path.name}.1").exists()
    with path.open("a") as file:
        file.write('{"at": 1, "rou\n' + lines[7][:20])

    def end_line() -> None:
        with path.open("a") as file:
            file.write(lines[7][20:] + "\n")

    assert story.report(end_line, lambda: None) == 2
    assert story.tracker.indices == list(range(8))


def test_a_damaged_memory_sends_nothing_twice(story: Story) -> None:
    story.node.add(rounds(0))
    story.report()
    (memory,) = (story.node.path / "reports").glob("*.json")
    memory.write_bytes(b"{")
    with pytest.raises(TrackerError, match=r"damaged; without it, all rounds are sent again"):
        story.report()
    assert story.tracker.indices == [0]


def test_what_it_remembers_is_removed_with_the_node(story: Story) -> None:
    story.node.add(rounds(0))
    story.report()
    assert foreign_in(story.node.path) == []
    assert made_in(story.node.path)


def test_what_a_tracker_learns_of_the_run() -> None:
    assert RUN.name == f"tiny run {PEER[-8:]}"
    assert RUN.settings["outer.codec"] == "fp32"
    assert RUN.settings["model.width"] == 16
    assert {RUN.settings["run"], RUN.settings["run id"], RUN.settings["member"]} == {
        "tiny run",
        SIGNED.run_id.hex(),
        PEER,
    }
    assert not any(name.startswith("admission") for name in RUN.settings)


def test_names_are_short_and_without_control_characters() -> None:
    name = "a\u00e9b" + "c" * 55 + "\n"  # the manifest's pattern allows a line's end at the end
    run = reported_run(Manifest(name, MODEL), SIGNED.run_id.hex(), PEER)
    assert run.name == f"a\u00e9b{'c' * 55} {PEER[-8:]}"
    assert len(run.key) <= 40
    assert all(each.isalnum() or each == "-" for each in run.key)


@pytest.mark.parametrize("target", ["wandb", "wandb:", "neptune:mine", ":x", ""])
def test_a_target_that_names_no_tracker(target: str) -> None:
    with pytest.raises(FarandoleError, match=r"names no tracker: write trackio:PROJECT\|wandb:PROJECT"):
        open_tracker(target)
