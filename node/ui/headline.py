"""The first line of ``farandole status``: whether this node is well, and if not, what to do about it.

The rules are ordered by gravity; the first that holds is shown. Each describes the problem in words that need no
knowledge of farandole, and a remedy that can be typed or done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Final, Literal

import trio

from ..base.figures import count, duration, loss
from ..base.remedies import clock_words, release_words
from ..status.status import NO_START, REFUSED_HERE, REFUSED_THERE, SCREENED_LATE, NodeStatus

Level = Literal["well", "busy", "trouble"]

# Joining, and the first look for the weights that a run starts from, take this long without anything being wrong.
USUAL_SECONDS: Final = 30.0
# A single failed exchange is normal; this number in a row has a cause.
FAILURES_IN_A_ROW: Final = 3
_REFUSED_HERE: Final = f"failed: {REFUSED_HERE}"
_REFUSED_THERE: Final = f"failed: {REFUSED_THERE}"
# Beginning of an exchange's verdict, the text to show if the last verdicts all begin so, and the remedy. Where two
# contributions are far apart both ends refuse, and it is chance whose verdict comes first.
_REFUSALS: Final = (
    (
        (_REFUSED_HERE,),
        "this node refuses what its partners send",
        "nothing to do, if the loss below falls; else `farandole peers` shows whose differs, theirs or ours",
    ),
    (
        (_REFUSED_THERE, _REFUSED_HERE),
        "others refuse this node's contributions",
        "if its loss is far from the others' below, stop it, move away the folder `checkpoints` and join again",
    ),
    (
        (f"failed: {SCREENED_LATE}",),
        "this machine is too slow or too busy to judge contributions",
        "leave it more processor time; if a loop of your own trains, measure less in its `evaluate`",
    ),
)


_SLOW_LINE: Final = (
    "the line may be too slow for this run, or lose too much: `farandole doctor INVITE` says what the run needs"
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


def headline(status: NodeStatus, now: float) -> Headline:
    """Return the first line of a status; ``now`` is Unix time."""
    return next(chain(_own_troubles(status), _troubles_with_others(status, now), _well(status, now)))


def _own_troubles(status: NodeStatus) -> Iterator[Headline]:
    if status.phase == "failed":
        text = f"not training: {status.phase_detail or 'the trainer failed'}"
        yield Headline("trouble", text, "see `farandole doctor` and the log")
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


def _troubles_with_others(status: NodeStatus, now: float) -> Iterator[Headline]:
    is_alone = status.run.members_live <= 1 and status.phase not in ("finished", "relaying")
    if status.release_conflict and is_alone:
        text, remedy = release_words(status.release_conflict, status.version)
        part = "training alone" if status.is_member else "not in the run yet"
        yield Headline("trouble", f"{part}: {text}", remedy)
    if not status.is_member and status.phase != "relaying":
        since = now - status.started_at
        waiting = f"not in the run yet, for {duration(since)}: {status.phase_detail or status.phase}"
        if since < USUAL_SECONDS:
            yield Headline("busy", waiting)
        remedy = (
            "ask any member for a new invite (`farandole run invite`); check that this machine is online and that its "
            "firewall lets it out; `farandole doctor INVITE` finds out why"
        )
        yield Headline("trouble", waiting, remedy, since)
    if status.isolation:
        text = f"cut off from all other members: {status.isolation}"
        goes_on = "" if status.phase == "relaying" else ". Training goes on meanwhile"
        yield Headline("trouble", text, f"check this machine's internet; `farandole doctor` says more{goes_on}")
    yield from _failures(status)
    if status.phase in ("starting", "joining", "fetching weights", "preparing"):
        waiting = f"in the run, not training yet: {status.phase_detail or status.phase}"
        since = now - status.phase_since
        if status.phase_detail == NO_START and since >= USUAL_SECONDS:
            yield Headline("trouble", waiting, _START, since)
        yield Headline("busy", waiting)
    if is_alone:
        known = f"; {status.run.members_gone} others were here" if status.run.members_gone else ""
        text = f"training alone: there is no other live member in this run{known}"
        yield Headline("trouble", text, "`farandole run invite` prints an invite for others")


def _failures(status: NodeStatus) -> Iterator[Headline]:
    tried = [exchange for exchange in status.recent_exchanges if exchange.partner]
    num_failed = len(list(takewhile(lambda exchange: exchange.verdict != "committed", reversed(tried))))
    if num_failed < FAILURES_IN_A_ROW:
        return
    last = tried[-FAILURES_IN_A_ROW:]
    for prefixes, text, remedy in _REFUSALS:
        if all(exchange.verdict.startswith(prefixes) for exchange in last):
            reason = last[-1].verdict.removeprefix("failed:").rpartition("refused:")[2].strip()
            yield Headline("trouble", f"{text}, the last {num_failed} in a row: {reason}", remedy)
    reason = last[-1].verdict.removeprefix("failed:").strip()
    yield Headline("trouble", f"no exchange succeeds, the last {num_failed} in a row failed: {reason}", _SLOW_LINE)


def _well(status: NodeStatus, now: float) -> Iterator[Headline]:
    if status.phase == "relaying":
        yield Headline("well", f"relaying: {status.connected_peers} peers are connected")
    others = status.run.members_live - 1
    company = f"with {others} other{'s' if others != 1 else ''}"
    if status.phase == "finished":
        yield Headline("well", f"all rounds are done; here {company} for those who still train")
    text = f"training {company}, round {status.round}, {count(status.tokens_per_second)} tokens/s"
    if status.loss is not None:
        text += f", loss {loss(status.loss)}"
    last = next((exchange for exchange in reversed(status.recent_exchanges) if exchange.verdict == "committed"), None)
    if last is not None:
        text += f"; averaged {duration(now - last.ended_at)} ago with {last.partner[-8:]}"
    yield Headline("well", text)


# Events that follow from looking at a node: changes of its connections, and remedies for what lasts.
#
# Two looks at the connections, a few seconds apart, are compared, so that the parts that connect a node need no text
# for people. The remedies are those of the status's first line: a person who watches the terminal of ``farandole
# join`` or ``farandole relay`` need not know `farandole status` to read what to do. Each is printed once, and again
# only after another one or after the node was well.

CONNECTIONS_INTERVAL: Final = 2.0
# The status of a run with a thousand members takes some milliseconds.
STATUS_INTERVAL: Final = 5.0
# A trouble that is over sooner, such as the moment between the loss of a peer and the next one, needs no person.
REMIND_AFTER: Final = 30.0
_REACHED: Final = {"public": "directly", "punchable": "by hole punching", "relay only": "through a relay only"}


@dataclass(frozen=True, slots=True)
class Connections:
    """A node's connections, by the peers' short names."""

    reachability: str = "unknown"
    """As in `farandole.node.status.status.NodeStatus`."""
    relays: frozenset[str] = frozenset()
    """Relays through which others reach this node."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Peer -> ``direct``, ``punched`` or ``relayed``."""


def changes(before: Connections, after: Connections) -> Iterator[str]:
    """Yield the changes between two states in words."""
    if after.reachability != before.reachability and after.reachability in _REACHED:
        yield f"others reach this node {_REACHED[after.reachability]}"
    yield from _of_relays(sorted(before.relays - after.relays), sorted(after.relays - before.relays))
    for peer, path in after.paths.items():
        was = before.paths.get(peer, "")
        if path == "relayed" and was != path:
            yield f"{peer} is reached through a relay"
        elif was == "relayed" and path == "punched":
            yield f"a hole is punched to {peer}: what went through a relay goes directly"
        elif was == "relayed" and path != was:
            yield f"{peer} is reached directly now, not through a relay"


def _of_relays(lost: list[str], found: list[str]) -> Iterator[str]:
    for old, new in zip(lost, found, strict=False):
        yield f"the relay {old} was replaced by {new}"
    for old in lost[len(found) :]:
        yield f"the relay {old} is one no more"
    for new in found[len(lost) :]:
        yield f"others reach this node through the relay {new}"


async def note_changes(look: Callable[[], Connections], note: Callable[[str], None]) -> None:
    """Note changes until cancelled."""
    seen = Connections()
    while True:
        before, seen = seen, look()
        for text in changes(before, seen):
            note(text)
        await trio.sleep(CONNECTIONS_INTERVAL)


class Reminder:
    """Decides which remedies to print."""

    def __init__(self) -> None:
        self._told = self._seen = ""
        self._seen_at = 0.0
        self._past: Sequence[str] = ()
        """Warnings from before the node was last well."""

    def look(self, status: NodeStatus, now: float) -> str:
        """Return the line to print, empty if there is none; ``now`` is monotonic."""
        found = headline(status, status.at)
        if found.level == "well":
            self._told, self._past = "", status.warnings
        elif found.remedy and any(text.endswith(found.remedy) for text in status.warnings if text not in self._past):
            self._told = found.remedy  # it was printed when the warning arose
        if found.remedy != self._seen:
            self._seen, self._seen_at = found.remedy, now
        is_new = found.remedy not in ("", self._told)
        if not is_new or max(found.lasts, now - self._seen_at) < REMIND_AFTER:
            return ""
        self._told = found.remedy
        return f"{found.text}. {found.remedy}"


async def keep_reminding(look: Callable[[], NodeStatus], remind: Callable[[str], None]) -> None:
    """Print remedies until cancelled."""
    reminder = Reminder()
    while True:
        await trio.sleep(STATUS_INTERVAL)
        if line := reminder.look(look(), trio.current_time()):
            remind(line)
