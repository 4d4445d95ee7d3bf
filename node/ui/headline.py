"""The first line of ``farandole status``: whether this node is well, and if not, what to do about it.

The rules are ordered by gravity; the first that holds is shown. Each describes the problem in words that need no
knowledge of farandole, and a remedy that can be typed or done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal

import trio

from ..base.causes import DIAL_MOVED, WIDER_INVITE, clock_words, release_words
from ..base.figures import count, duration, loss, plural
from ..join.bootstrap import ONLY_PRIVATE
from ..status.status import NO_START, REFUSED_HERE, REFUSED_THERE, ExchangeStatus, NodeStatus

Level = Literal["well", "busy", "trouble"]

# Joining, and the first look for the weights that a run starts from, take this long without anything being wrong.
USUAL_SECONDS: Final = 30.0
# A single failed exchange is normal; this number in a row has a cause.
FAILURES_IN_A_ROW: Final = 3
# Beginning of an exchange's verdict, the text to show if the last verdicts all begin so, and the remedy. Where two
# contributions are far apart both ends refuse, and it is chance whose verdict comes first.
_REFUSALS: Final = (
    (
        (f"failed: {REFUSED_HERE}",),
        "this node refuses what its partners send",
        "nothing to do, if the loss below falls; else `farandole peers` shows whose differs, theirs or ours",
    ),
    (
        (f"failed: {REFUSED_THERE}", f"failed: {REFUSED_HERE}"),
        "others refuse this node's contributions",
        "if its loss is far from the others' below, stop it, move away the folder `checkpoints` and join again",
    ),
)


# The phases of a node that is not, or may not be, in the run yet.
_JOINING: Final = ("starting", "joining", "fetching weights", "preparing")
_JOIN: Final = (
    "ask any member for a new invite (`farandole run invite`); check that this machine is online and that its firewall "
    "lets it out; `farandole doctor INVITE` finds out why"
)
_SLOW_LINE: Final = (
    "the line may be too slow for this run, or lose too much, or an inner step take longer here than partners wait: "
    "`farandole doctor INVITE` says what the run needs"
)
_START: Final = (
    "start a node on a machine that has them: `farandole join MANIFEST --start FOLDER`; the others fetch them"
)


@dataclass(frozen=True, slots=True)
class Headline:
    """One line for a person."""

    level: Level
    """``well``: nothing to do; ``busy``: the node will be well without help; ``trouble``: read the remedy."""
    text: str
    remedy: str = ""
    lasts: float = 0.0
    """Seconds for which the trouble has lasted at least; 0 where the status does not tell."""

    @property
    def sentences(self) -> str:
        """The text, and the remedy where there is one."""
        return f"{self.text}. {self.remedy[0].upper()}{self.remedy[1:]}" if self.remedy else self.text


def headline(status: NodeStatus, now: float) -> Headline:
    """Return the first line of a status; ``now`` is Unix time."""
    return next(_rules(status, now))


def _rules(status: NodeStatus, now: float) -> Iterator[Headline]:
    """Yield what holds, gravest first; the last is always there."""
    # What is wrong with this node
    if status.phase == "failed":
        text = f"not training: {status.phase_detail or 'the trainer failed'}"
        yield Headline("trouble", text, "see `farandole doctor` and the log")
    if status.disk:
        text, _, remedy = status.disk.partition("; ")
        yield Headline("trouble", text, remedy)
    if status.phase == "leaving":
        yield Headline("busy", "leaving the run")
    if status.phase == "paused":
        yield Headline("busy", f"not training: {status.phase_detail}")
    if status.phase == "preparing" and status.is_trainer_dead:
        times = "once" if status.trainer_restarts == 1 else f"{status.trainer_restarts} times"
        remedy = status.warnings[-1] if status.warnings else "its last words are in the log, whose end says where it is"
        yield Headline("trouble", f"the trainer died ({times} so far) and is started again: nothing to do yet", remedy)
    if status.clock is not None and status.clock.is_harmful:
        yield Headline("trouble", *clock_words(status.clock))

    # What is wrong between it and others
    run, is_relay = status.run, status.phase == "relaying"
    is_alone = run.members_live <= 1 and not is_relay and status.phase != "finished"
    is_outside = not status.is_member and status.phase in _JOINING
    if status.release_conflict and is_alone:
        text, remedy = release_words(status.release_conflict, status.version)
        part = "not in the run yet" if is_outside else "training alone"
        yield Headline("trouble", f"{part}: {text}", remedy)
    if is_outside:
        since = now - status.started_at
        waiting = f"not in the run yet, for {duration(since)}: {status.phase_detail or status.phase}"
        if since < USUAL_SECONDS:
            yield Headline("busy", waiting)
        is_private = status.phase_detail.startswith(ONLY_PRIVATE)
        yield Headline("trouble", waiting, WIDER_INVITE if is_private else _JOIN, since)
    if is_relay and status.waits_for and not status.connected_peers:
        yield Headline("busy", f"waiting for {status.waits_for}")
    have_all_left = run.members_left and not run.members_gone and not run.members_heard
    if status.isolation and not status.connected_peers and not have_all_left:
        text = f"cut off from all other members: {status.isolation}"
        goes_on = "" if is_relay else ". Training goes on meanwhile"
        remedy = f"check this machine's internet; {DIAL_MOVED}; `farandole doctor` says more{goes_on}"
        yield Headline("trouble", text, remedy)
    yield from _exchange_troubles([exchange for exchange in status.recent_exchanges if exchange.partner])
    if status.phase in _JOINING:
        waiting = f"in the run, not training yet: {status.phase_detail or status.phase}"
        since = now - status.phase_since
        if status.phase_detail == NO_START and since >= USUAL_SECONDS:
            yield Headline("trouble", waiting, _START, since)
        yield Headline("busy", waiting)
    if is_alone and not status.is_member:
        text = "training alone: this node is no longer a member of this run"
        yield Headline("trouble", text, "ask the run's creator for a new invite, and join again with it")
    if is_alone:
        yield _alone(run.members_left, run.members_gone + run.members_heard)

    # Nothing
    if is_relay:
        yield Headline("well", f"relaying for {plural(status.connected_peers, 'connected peer')}")
    company = f"with {plural(run.members_live - 1, 'other')}"
    if status.phase == "finished":
        yield Headline("well", f"{status.phase_detail.partition(';')[0]}; here {company} for those who still train")
    text = f"training {company}, round {status.round}, {count(status.tokens_per_second)} tokens/s"
    if status.loss is not None:
        text += f", loss {loss(status.loss)}"
    last = next((exchange for exchange in reversed(status.recent_exchanges) if exchange.verdict == "committed"), None)
    if last is not None:
        text += f"; averaged {duration(now - last.ended_at)} ago with {status.called(last.partner)}"
    yield Headline("well", text)


def _alone(left: int, gone: int) -> Headline:
    """Return the line of a node whose others have left the run, or are gone."""
    invite = "`farandole run invite` prints an invite for others"
    if not left and not gone:
        return Headline("trouble", "training alone: there is no other live member in this run", invite)
    if not gone:
        return Headline("busy", f"training alone: {plural(left, 'other')} left, and may come back")
    text = f"training alone: {plural(gone, 'other')} gone{f', {left} left' if left else ''}"
    return Headline("trouble", text, f"{DIAL_MOVED}; {invite}")


def _exchange_troubles(tried: Sequence[ExchangeStatus]) -> Iterator[Headline]:
    """Yield why the newest exchanges fail, or that judging takes this machine longer than they have time for."""
    last = tried[-FAILURES_IN_A_ROW:]
    num_failed = len(list(takewhile(lambda exchange: exchange.verdict != "committed", reversed(tried))))
    if num_failed >= FAILURES_IN_A_ROW:
        reason = last[-1].verdict.removeprefix("failed:").strip()
        for prefixes, text, remedy in _REFUSALS:
            if all(exchange.verdict.startswith(prefixes) for exchange in last):
                refused = reason.rpartition("refused:")[2].strip()
                yield Headline("trouble", f"{text}, the last {num_failed} in a row: {refused}", remedy)
        yield Headline("trouble", f"no exchange succeeds, the last {num_failed} in a row failed: {reason}", _SLOW_LINE)
    if len(last) == FAILURES_IN_A_ROW and all(exchange.late_seconds for exchange in last):
        seconds = duration(last[-1].late_seconds)
        text = f"this machine is busy: judging takes {seconds}, and exchanges have less"
        remedy = "leave it more processor time; if a loop of your own trains, measure less in its `evaluate`"
        yield Headline("trouble", text, remedy)


# Remedies for what lasts, at the terminal.
#
# They are those of the status's first line: a person who watches the terminal of ``farandole join`` or ``farandole
# relay`` need not know `farandole status` to read what to do. Each is printed once, and again only after another one or
# after the node was well.

# The status of a run with a thousand members takes some milliseconds.
STATUS_INTERVAL: Final = 5.0
# A trouble that is over sooner, such as the moment between the loss of a peer and the next one, needs no person.
REMIND_AFTER: Final = 30.0


class Reminder:
    """Decides which remedies to print."""

    def __init__(self) -> None:
        self._told = self._seen = ""
        self._seen_at = 0.0

    def look(self, status: NodeStatus, now: float) -> str:
        """Return the line to print, empty if there is none; ``now`` is monotonic."""
        found = headline(status, status.at)
        if found.level == "well":
            self._told = ""
        elif found.remedy and any(text.endswith(found.remedy) for text in status.warnings):
            self._told = found.remedy  # it was printed when the warning arose
        if found.remedy != self._seen:
            self._seen, self._seen_at = found.remedy, now
        is_new = found.remedy not in ("", self._told)
        if not is_new or max(found.lasts, now - self._seen_at) < REMIND_AFTER:
            return ""
        self._told = found.remedy
        return found.sentences


async def keep_reminding(look: Callable[[], NodeStatus], remind: Callable[[str], None]) -> None:
    """Print remedies until cancelled."""
    reminder = Reminder()
    while True:
        await trio.sleep(STATUS_INTERVAL)
        if line := reminder.look(look(), trio.current_time()):
            remind(line)
