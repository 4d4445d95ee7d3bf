"""The journal of a node: its present state and its past events, for people and for the status.

The parts of a node write here, each its own fields of `NodeState`; heartbeats and the status read. No decision of a
training loop depends on it.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from farandole.protocol.rounds.pairing_events import ExchangeEnded
from farandole.protocol.rounds.training_events import RoundEnd
from farandole.protocol.state.node_state import NodeState, Phase
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.bounds import Latest
from farandole.protocol.wire.identity import peer_id_of, short_name

from .round_log import RoundRecord
from .status import NO_STREAM, NOT_BEGUN, REFUSED_HERE, REFUSED_THERE, Event, ExchangeStatus

# Newest exchanges that the first line of the status, and a screen, use.
MAX_EXCHANGES: Final = 32
# Partners whose exchanges are counted, as many as the run state has authors; the one with the fewest is dropped first.
MAX_PARTNERS: Final = 4_096
# Points of a curve for one screen or report; a month's run keeps its newest part here.
MAX_LOSSES: Final = 256


# Durations and counts change all the time; that is no news.
_FIGURES: Final = re.compile(r"\d")


def without_figures(text: str) -> str:
    """Return what is the same for two texts that differ in their figures alone."""
    return _FIGURES.sub("", text)


@dataclass
class History:
    """What has happened since the node began, by the names that `NodeStatus` has for it."""

    exchanges_ok: int = 0
    exchanges_alone: int = 0
    exchanges_failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    """Of contributions and of checkpoints."""
    recent_exchanges: deque[ExchangeStatus] = field(default_factory=lambda: deque(maxlen=MAX_EXCHANGES))
    partners: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))
    loss_first: float | None = None
    validation: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))
    bits_per_byte: float | None = None

    def add(self, exchange: ExchangeStatus) -> None:
        """Add an exchange that has ended, or a round that was taken alone (an empty ``partner``)."""
        name = exchange.partner
        if exchange.verdict == "committed":
            self.exchanges_ok += 1
            if name not in self.partners and len(self.partners) >= MAX_PARTNERS:
                del self.partners[min(self.partners, key=self.partners.__getitem__)]
            self.partners[name] += 1
            self.paths[exchange.path] += 1
        elif name:
            self.exchanges_failed += 1
        else:
            self.exchanges_alone += 1
        self.bytes_sent += exchange.bytes_sent
        self.bytes_received += exchange.bytes_received
        self.recent_exchanges.append(exchange)

    def add_loss(self, round_index: int, loss: float | None) -> None:
        """Add the mean training loss of a finished round, where it is known; one that is not finite is left out."""
        if loss is not None and math.isfinite(loss):
            self.loss_first = loss if self.loss_first is None else self.loss_first
            self.losses.append((round_index, loss))

    def facts(self, max_partners: int) -> dict[str, Any]:
        """Return the fields of a `NodeStatus` that tell it, with the most frequent partners."""
        copies = {name: list(value) if isinstance(value, deque) else value for name, value in vars(self).items()}
        partners = dict(self.partners.most_common(max_partners))
        last = self.recent_exchanges[-1] if self.recent_exchanges else None
        return {**copies, "partners": partners, "paths": dict(self.paths), "last_exchange": last}


# What peers do to a node, and nothing else says: how often until the peer is named, and in which words.
DEEDS: Final = {
    "accused": (1, "is not met any more"),
    "flooded": (1, "flooded this node, which keeps it out for a while"),
    "crowded": (3, "brings authors that crowd others out of the run state"),
    "refused": (3, "sent contributions that were refused"),
    "clipped": (3, "sent contributions that counted in part, or not at all"),
    "absent": (3, "agreed to exchanges and did not come"),
}
# Named peers in a status: an attacker may have many keys.
MAX_NAMED: Final = 32
# Deeds that may be chance: each good exchange takes back one.
_FORGIVEN: Final = ("refused", "clipped", "absent")
# In these a fast, honest partner counts in part (`farandole.training.screening.guard.MIN_KNOWN`).
FIRST_MEETINGS: Final = 4


class Conduct:
    """What each peer has done to this node. Only what this node has seen itself counts, not what others say."""

    def __init__(self) -> None:
        self._counts: Latest[bytes, Counter[str]] = Latest(MAX_PARTNERS)
        self._named: Latest[bytes, list[str]] = Latest(MAX_PARTNERS)

    def add(self, peer: bytes, deed: str) -> bool:
        """Note one of `DEEDS`; return whether the peer is to be named for it now, which is once."""
        counts = self._counts[peer] = self._counts.get(peer, Counter())
        counts[deed] += 1
        named = self._named.get(peer, [])
        if counts[deed] < DEEDS[deed][0] or deed in named:
            return False
        self._named[peer] = [*named, deed]
        return True

    def forgive(self, peer: bytes) -> None:
        """Note an exchange with a peer that went well."""
        counts = self._counts.get(peer, Counter())
        for deed in _FORGIVEN:
            counts[deed] = max(0, counts[deed] - 1)

    def words(self) -> dict[bytes, str]:
        """Return what peers are named for; the newest `MAX_NAMED`."""
        newest = list(self._named.items())[-MAX_NAMED:]
        return {peer: ", ".join(DEEDS[deed][1] for deed in deeds) for peer, deeds in newest}


MAX_WARNINGS: Final = 20
# A warning that nothing ends is about a moment.
WARNING_SECONDS: Final = 86_400.0
# Causes of warnings that say that something could not be stored begin so (`NodeStatus.disk`).
DISK: Final = "disk: "
# Events of about a quarter of an hour of ordinary rounds; about 20 kB of each status.
MAX_EVENTS: Final = 128
# A line of the screen or two; the reasons that peers give are no longer than that.
MAX_EVENT_CHARS: Final = 400


@dataclass(eq=False)
class Journal:
    """State, events, warnings, exchanges and losses of one node.

    ``say`` prints a line for the person at the terminal, ``clock`` is Unix time. ``keep_round`` keeps the record of a
    round.
    """

    _say: Callable[[str], None]
    clock: Callable[[], float] = time.time
    keep_round: Callable[[RoundRecord], None] | None = None
    state: NodeState = field(default_factory=NodeState)
    history: History = field(default_factory=History)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    conduct: Conduct = field(default_factory=Conduct)
    run: RunState | None = None
    """The run's state once it is known: what peers call themselves, and who invited them."""
    _standing: dict[str, Event] = field(default_factory=dict)
    """Warnings by their cause, or by themselves, newest last."""
    _told_validation: tuple[int, float] | None = None

    # The state

    def update(self, **changes: Any) -> None:
        """Replace these fields of the state."""
        self.state = msgspec.structs.replace(self.state, **changes)

    def enter(self, phase: Phase, detail: str = "", waits_for: str = "") -> None:
        """Begin a phase, or describe the present one in other words."""
        since = self.state.phase_since if phase == self.state.phase else self.clock()
        self.update(phase=phase, phase_detail=detail, waits_for=waits_for, phase_since=since)

    def announce(self, phase: Phase, detail: str, waits_for: str = "") -> None:
        """`enter`, and print the detail at the terminal."""
        self.enter(phase, detail, waits_for)
        self.say(detail)

    # Events

    def say(self, text: str) -> None:
        """Print a line at the terminal, and keep it as an event."""
        self.note(text)
        self._say(text)

    def note(self, text: str, *, is_warning: bool = False) -> None:
        """Keep an event that need not be printed."""
        self.events.append(Event(self.clock(), text[:MAX_EVENT_CHARS], is_warning))

    def warn(self, text: str, cause: str = "") -> None:
        """Keep and print a warning; a repetition of the last one is not printed again.

        With a ``cause`` it stands until `over`, and of one cause there is one: only other words are printed again.
        """
        key, last = cause or text, next(reversed(self._standing), "")
        before = self._standing.pop(key, None)
        self._standing[key] = Event(self.clock(), text, is_warning=True)
        if len(self._standing) > MAX_WARNINGS:  # peers that are named push no lasting trouble out
            moments = (other for other, event in self._standing.items() if other == event.text)
            del self._standing[next(moments, next(iter(self._standing)))]
        is_told = before is not None and without_figures(before.text) == without_figures(text)
        if not is_told or not (cause or key == last):
            self.remind(text)

    def over(self, cause: str) -> None:
        """End the warning of a cause, if there is one."""
        self._standing.pop(cause, None)

    @property
    def standing(self) -> list[Event]:
        """The warnings whose causes have not ended, newest last."""
        oldest = self.clock() - WARNING_SECONDS
        return [event for key, event in self._standing.items() if event.at >= oldest or key != event.text]

    @property
    def warnings(self) -> list[str]:
        """Texts of `standing`."""
        return [event.text for event in self.standing]

    @property
    def disk(self) -> str:
        """What could not be stored last; empty if everything is."""
        return next((event.text for key, event in reversed(self._standing.items()) if key.startswith(DISK)), "")

    def called(self, peer: bytes) -> str:
        """Return the end of a peer's id, with the name that it gives itself, for the log."""
        return short_name(peer) if self.run is None else self.run.called(peer)

    def blame(self, peer: bytes, deed: str, detail: str = "") -> None:
        """Note what a peer has done, one of `DEEDS`; a warning names it once, and who invited it."""
        if self.conduct.add(peer, deed):
            words = f"{DEEDS[deed][1]}{f': {detail}' if detail else ''}"
            self.warn(f"{self.called(peer)} {self._with_sponsor(peer, words)}")

    @property
    def remarks(self) -> dict[str, str]:
        """Peer id -> what a peer is named for, and who invited it; the peers that were named last."""
        return {peer_id_of(peer): self._with_sponsor(peer, words) for peer, words in self.conduct.words().items()}

    def _with_sponsor(self, peer: bytes, words: str) -> str:
        roster = None if self.run is None else self.run.roster
        sponsor = None if roster is None else roster.sponsor_of(peer)
        return words if sponsor is None else f"{words} (invited by {self.called(sponsor)})"

    def remind(self, text: str) -> None:
        """Print what the status shows in its first line as a warning, and keep it as an event."""
        self.note(text, is_warning=True)
        self._say(f"warning: {text}")

    # Rounds

    def record_validation(self, round_index: int, loss: float, bits_per_byte: float | None = None) -> None:
        """Record the validation loss after a round, in nats a token, and in bits per byte where these are known."""
        if math.isfinite(loss):
            self.history.validation.append((round_index, loss))
            self.history.bits_per_byte = bits_per_byte
        else:
            self.warn(f"the loss on held-out text is {loss} after round {round_index}: the replica diverges")

    def record_exchange(self, ended: ExchangeEnded) -> None:
        """Record the end of an exchange."""
        exchange = ExchangeStatus(
            ended.round,
            peer_id_of(ended.peer),
            "committed" if ended.committed else f"failed: {ended.reason}",
            ended.bytes_sent,
            ended.bytes_received,
            ended.seconds,
            self.clock(),
            ended.path,
            ended.clip,
            ended.late_seconds,
        )
        self.history.add(exchange)
        if ended.committed and ended.clip >= 1.0:
            self.conduct.forgive(ended.peer)
        elif ended.committed and self.history.exchanges_ok > FIRST_MEETINGS:
            self.blame(ended.peer, "clipped")
        elif ended.reason.startswith(REFUSED_HERE):
            self.blame(ended.peer, "refused")
        elif ended.reason in (NOT_BEGUN, NO_STREAM):
            self.blame(ended.peer, "absent")
        if not ended.committed:
            name = self.called(ended.peer)
            if ended.reason.startswith(REFUSED_THERE):
                reason = ended.reason.removeprefix(REFUSED_THERE).strip()
                self.note(f"{name} refused this node's contribution: {reason}")
            elif not ended.reason.startswith(REFUSED_HERE):  # else a warning has said so already, with the reason
                self.note(f"the exchange of round {ended.round} with {name} failed: {ended.reason}")

    def finish_round(self, end: RoundEnd) -> None:
        """Print and keep the record of a round; its exchanges are recorded already, but not that it was taken alone."""
        done, used = end.contributed, None if end.alone or not end.exchanges else end.exchanges[-1]
        failed = [exchange for exchange in end.exchanges if exchange is not used]
        verdict = f"alone: {end.alone}" if end.alone else "committed" if used else ""
        if end.alone:
            self.history.add(ExchangeStatus(done.round, "", verdict, 0, 0, 0.0, self.clock()))
        measured = self.history.validation[-1] if self.history.validation else None
        is_new = measured is not None and measured != self._told_validation
        record = RoundRecord(
            at=self.clock(),
            round=done.round,
            inner_steps=done.inner_steps_this_round,
            tokens=done.tokens_this_round,
            seconds=done.seconds,
            loss=None if done.loss is None or not math.isfinite(done.loss) else done.loss,
            validation=measured[1] if measured and is_new else None,
            verdict=verdict,
            partner=peer_id_of(used.peer) if used else "",
            bytes_sent=sum(exchange.bytes_sent for exchange in end.exchanges),
            bytes_received=sum(exchange.bytes_received for exchange in end.exchanges),
            exchange_seconds=used.seconds if used else 0.0,
            path=used.path if used else "",
            late_steps=end.late_steps,
            clip=used.clip if used else 1.0,
            failed_partner=peer_id_of(failed[-1].peer) if failed else "",
            failure=f"failed: {failed[-1].reason}" if failed else "",
            failed_bytes_sent=sum(exchange.bytes_sent for exchange in failed),
            skipped_steps=done.skipped_steps,
            bits_per_byte=self.history.bits_per_byte if is_new else None,
        )
        self._told_validation = measured
        self.say(record.line(self.called(used.peer) if used else ""))
        if self.keep_round is not None:
            self.keep_round(record)
