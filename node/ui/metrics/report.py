"""Sends each round of this node to an experiment tracker when it is over, and goes on where it stopped.

It follows the file of rounds, which the node writes whether or not anybody reads it: the node does not know of it. A
tracker that does not answer is asked again after growing pauses, and what it has not got is still in the file.

What was sent last is kept in a small file for each run at a tracker, in the folder ``reports`` next to the rounds. It
is written after the tracker has taken a batch. So only a crash between the two sends a batch twice.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import msgspec

from farandole.training.base.durable import replacing

from ...base.backoff import pauses
from ...base.system.files import OWNER_ALONE_FOLDER, HeldError, locked_file
from ...status.round_log import RoundFigures, RoundRecord, figures_of, read_rounds
from .trackers import ReportedRun, Tracker, TrackerError, TrackerUnreachableError

REPORTS: Final = "reports"
POLL_SECONDS: Final = 2.0
# Rounds of one request: below the limits of all trackers, and a crash repeats no more than these.
MAX_BATCH: Final = 64
FIRST_PAUSE: Final = 2.0
LONGEST_PAUSE: Final = 300.0
_Result = TypeVar("_Result")


class LastSent(msgspec.Struct, frozen=True):
    """The round that was sent last."""

    place: str
    """`OpenedRun.place`, for people."""
    round: int
    at: float
    """When it ended, Unix seconds."""
    tokens_in_all: int


@dataclass(frozen=True)
class ReportPatience:
    """How a report waits, and tells people why."""

    wait: Callable[[float], bool]
    """Wait for these seconds, or less if the report must end; return whether it must."""
    say: Callable[[str], None]
    """Show a line to people."""
    rng: Random
    is_once: bool = False
    """Whether a tracker that does not answer is an error at once."""

    def until_done(self, work: Callable[[], _Result]) -> _Result:
        """Try until the tracker answers, with growing pauses. Raises `TrackerError`, or `_EndedError` in a pause."""
        for pause in pauses(FIRST_PAUSE, LONGEST_PAUSE, self.rng):
            try:
                return work()
            except TrackerUnreachableError as error:
                if self.is_once:
                    raise
                self.say(f"{error}; next attempt in {pause:.0f} s, nothing is lost")
            if self.wait(pause):
                break
        raise _EndedError


class _EndedError(Exception):
    """The report must end, and what is left to send is for a later one."""


def report_rounds(path: Path, tracker: Tracker, run: ReportedRun, patience: ReportPatience) -> int:
    """Send the rounds in a file, and then each that is added, until ``patience.wait`` returns True.

    Return the number of rounds sent. With ``patience.is_once``, send what is there and return. The tracker is finished
    in any case. Raises `TrackerError` if the tracker refuses, or another process reports to the same place; `OSError`
    if a file fails.
    """
    num_sent = 0
    try:
        opened = patience.until_done(partial(tracker.start, run))
        patience.say(f"rounds go to {opened.where}")
        with _open_memory(path.with_name(REPORTS), opened.place) as memory:
            sent = None if opened.is_new else memory.read()
            tokens = 0 if sent is None else sent.tokens_in_all
            stamp = None
            while True:
                before, stamp = stamp, _stamp(path)
                records = _after(list(read_rounds(path)), sent) if stamp != before else []
                if stamp and (_stamp(path) or stamp)[0] != stamp[0]:  # rotated meanwhile: a part may not have been read
                    records, stamp = [], None
                rounds = list(figures_of(records, tokens))
                for begin in range(0, len(rounds), MAX_BATCH):
                    batch = rounds[begin : begin + MAX_BATCH]
                    patience.until_done(partial(tracker.log, batch))
                    sent = memory.write(batch[-1])
                    num_sent += len(batch)
                    patience.say(_line(batch))
                    tokens = sent.tokens_in_all
                if patience.is_once or patience.wait(POLL_SECONDS):
                    break
    except _EndedError:
        pass
    finally:
        try:
            tracker.finish()
        except TrackerUnreachableError as error:
            patience.say(f"{error}; what was sent is there")
    return num_sent


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what is another value once the file has changed, or was rotated."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size


def _line(batch: Sequence[RoundFigures]) -> str:
    first, last = batch[0].record.round, batch[-1].record.round
    return f"round {last} sent" if len(batch) == 1 else f"rounds {first} to {last} sent"


def _after(records: list[RoundRecord], sent: LastSent | None) -> list[RoundRecord]:
    """Return the rounds after the one that was sent last; by time, if that is no longer in the file."""
    if sent is None:
        return records
    for index in range(len(records) - 1, -1, -1):
        if (records[index].round, records[index].at) == (sent.round, sent.at):
            return records[index + 1 :]
    return [record for record in records if record.at > sent.at]


@dataclass(frozen=True)
class _Memory:
    """The file that has the round that was sent last to one place."""

    path: Path
    place: str

    def read(self) -> LastSent | None:
        """Return it; None if there is none. Raises `TrackerError` if the file is damaged."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=LastSent)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise TrackerError(f"{self.path} is damaged; without it, all rounds are sent again") from error

    def write(self, last: RoundFigures) -> LastSent:
        """Replace the file, and return what it has."""
        sent = LastSent(self.place, last.record.round, last.record.at, last.tokens_in_all)
        with replacing(self.path) as file:
            file.write(msgspec.json.encode(sent))
        return sent


@contextlib.contextmanager
def _open_memory(folder: Path, place: str) -> Iterator[_Memory]:
    """Yield the file of a place; no other process has it within the block. Raises `TrackerError` if one does."""
    folder.mkdir(mode=OWNER_ALONE_FOLDER, exist_ok=True)
    path = folder / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"
    try:
        with locked_file(path.with_suffix(".lock")):
            yield _Memory(path, place)
    except HeldError as error:
        raise TrackerError(f"another process (pid {error}) sends this node's rounds there") from error
