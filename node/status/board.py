"""The board: what this node did and does, written by its parts and read by ``farandole status``."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from farandole.protocol.identity import peer_id_of

from .round_log import RoundRecord
from .status import REFUSED_HERE, REFUSED_THERE, Event, ExchangeStatus, Phase

# The course of the loss on one screen and in a report; a month's run keeps its newest part here.
MAX_LOSSES = 256
MAX_WARNINGS = 20
# What the first line of the status, and a screen, look back upon.
MAX_EXCHANGES = 16
# Whoever looks again after a quarter of an hour of ordinary rounds has missed nothing; some 20 kB of each status.
MAX_EVENTS = 128
# A line of the screen or two; what peers give as a reason is no longer than that.
MAX_EVENT_CHARS = 400
# Whose exchanges are counted, as many as the run state has authors; with whom there were fewest is forgotten first.
MAX_PARTNERS = 4_096
# Partners of late: as many as links are shown, and twice as many rounds.
MAX_PARTNERS_REMEMBERED = 128


@dataclass
class Board:
    """Counters and words. ``say`` tells a person at the terminal, ``clock`` is Unix time.

    What is told is also kept as events, and so are things that only who looks at them wants to know (`note`).
    """

    say: Callable[[str], None]
    clock: Callable[[], float] = time.time
    phase: Phase = "starting"
    detail: str = ""
    waits_for: str = ""
    phase_since: float = 0.0
    isolation: str = ""
    """What a node that is connected to no member does about it; empty when it is, or when nobody else is known."""
    stage: int = 0
    providers: list[int] = field(default_factory=list)
    """Live members of each stage, this node included."""
    speed: float = 0.0
    """Tokens a second that this node could take through its stage if it never waited; 0: not measured yet."""
    round: int = 0
    inner_steps: int = 0
    inner_steps_this_round: int = 0
    round_steps: int = 0
    """Inner steps of a round; 0: as many as its time allows."""
    round_seconds: float = 0.0
    """Of a round that is boxed in time; 0: it is not."""
    round_since: float = 0.0
    tokens: int = 0
    tokens_per_second: float = 0.0
    utilisation: float | None = None
    """Share of the trainer's time that went into inner steps."""
    recent_utilisation: float | None = None
    """The same of the last few rounds."""
    late_steps: int = 0
    """Inner steps between the newest contribution and its outer step."""
    num_parameters: int = 0
    loss: float | None = None
    loss_first: float | None = None
    device: str = ""
    trainer_pid: int | None = None
    trainer_restarts: int = 0
    is_trainer_dead: bool = False
    """It died, and the next one is not ready yet."""
    device_memory: tuple[int, int] | None = None
    """Bytes of the GPU that the trainer has taken, and that it has; None where there is none."""
    microbatch: int = 0
    """Sequences that the trainer takes at a time, where it has no memory for a whole batch; 0: all."""
    exchanges_ok: int = 0
    exchanges_alone: int = 0
    exchanges_failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    last_partner: bytes | None = None
    """The public key of whom the last round was averaged with; None: nobody."""
    recent_exchanges: deque[ExchangeStatus] = field(default_factory=lambda: deque(maxlen=MAX_EXCHANGES))
    partners: Counter[str] = field(default_factory=Counter)
    last_exchanges: OrderedDict[str, ExchangeStatus] = field(default_factory=OrderedDict)
    """Peer id -> the last exchange with it, the newest at the end."""
    bandwidths: dict[str, float] = field(default_factory=dict)
    """Peer id -> bytes a second, both ways together, of the last exchange with it that was committed."""
    paths: Counter[str] = field(default_factory=Counter)
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))
    validation: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_WARNINGS))
    tell_round: Callable[[RoundRecord], None] | None = None
    """Tells of a round and keeps it; None: it is said, as everything else."""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _told_validation: tuple[int, float] | None = None
    _tell: Callable[[str], None] = field(init=False)

    def __post_init__(self) -> None:
        self._tell, self.say = self.say, self._say

    def _say(self, text: str) -> None:
        self.note(text)
        self._tell(text)

    def note(self, text: str, *, is_warning: bool = False) -> None:
        """Something happened that need not be told at the terminal."""
        self.events.append(Event(self.clock(), text[:MAX_EVENT_CHARS], is_warning))

    def enter(self, phase: Phase, detail: str = "", waits_for: str = "") -> None:
        """A new phase, or new words for the present one."""
        if phase != self.phase:
            self.phase_since = self.clock()
        self.phase, self.detail, self.waits_for = phase, detail, waits_for

    def announce(self, phase: Phase, detail: str, waits_for: str = "") -> None:
        """`enter`, and tell the person at the terminal."""
        self.enter(phase, detail, waits_for)
        self.say(detail)

    def warn(self, text: str) -> None:
        """Something a person should know; kept, and told once in a row."""
        if not self.warnings or self.warnings[-1] != text:
            self.warnings.append(text)
            self.note(text, is_warning=True)
            self._tell(f"warning: {text}")

    def record_loss(self, round_index: int, loss: float | None) -> None:
        """Mean training loss of a finished round, where it is known. One that is not finite is no point of a curve."""
        if loss is None:
            return
        self.loss = loss
        if not math.isfinite(loss):
            return
        if self.loss_first is None:
            self.loss_first = loss
        self.losses.append((round_index, loss))

    def record_validation(self, round_index: int, loss: float) -> None:
        """Loss on held-out text after a round."""
        if math.isfinite(loss):
            self.validation.append((round_index, loss))
        else:
            self.warn(f"the loss on held-out text is {loss} after round {round_index}: the replica diverges")

    def record_exchange(
        self,
        round_index: int,
        partner: bytes | None,
        verdict: str,
        *,
        sent: int = 0,
        received: int = 0,
        seconds: float = 0.0,
        path: str = "",
    ) -> None:
        """The end of an exchange, or of a round without one (``partner`` None)."""
        name = peer_id_of(partner) if partner else ""
        self.last_partner = partner if verdict == "committed" else None
        if verdict == "committed":
            self.exchanges_ok += 1
            if name not in self.partners and len(self.partners) >= MAX_PARTNERS:
                del self.partners[min(self.partners, key=self.partners.__getitem__)]
            self.partners[name] += 1
            self.paths[path] += 1
        elif partner:
            self.exchanges_failed += 1
            self._note_failure(name, round_index, verdict)
        else:
            self.exchanges_alone += 1
        self.bytes_sent += sent
        self.bytes_received += received
        exchange = ExchangeStatus(round_index, name, verdict, sent, received, seconds, self.clock(), path)
        self.recent_exchanges.append(exchange)
        if name:
            self._remember_partner(exchange)

    def _note_failure(self, name: str, round_index: int, verdict: str) -> None:
        reason = verdict.removeprefix("failed: ")
        if reason.startswith(REFUSED_HERE):
            return  # which is warned of, with the reason
        if reason.startswith(REFUSED_THERE):
            text = f"{name[-8:]} refused this node's contribution: {reason.removeprefix(REFUSED_THERE).strip()}"
        else:
            text = f"the exchange of round {round_index} with {name[-8:]} failed: {reason}"
        self.note(text)

    def _remember_partner(self, exchange: ExchangeStatus) -> None:
        name = exchange.partner
        self.last_exchanges.pop(name, None)
        self.last_exchanges[name] = exchange
        if exchange.verdict == "committed" and exchange.seconds > 0:
            self.bandwidths[name] = (exchange.bytes_sent + exchange.bytes_received) / exchange.seconds
        if len(self.last_exchanges) > MAX_PARTNERS_REMEMBERED:
            forgotten, _ = self.last_exchanges.popitem(last=False)
            self.bandwidths.pop(forgotten, None)

    @property
    def last_exchange(self) -> ExchangeStatus | None:
        """The newest."""
        return self.recent_exchanges[-1] if self.recent_exchanges else None

    def finish_round(
        self, round_index: int, *, inner_steps: int, tokens: int, seconds: float, loss: float | None, late_steps: int
    ) -> None:
        """A round is over, and its exchange, if there was one, recorded: tell of it, and keep it."""
        last = self.last_exchange
        if last is None or last.round != round_index:
            last = ExchangeStatus(round_index, "", "", 0, 0, 0.0, 0.0)
        measured = self.validation[-1] if self.validation else None
        record = RoundRecord(
            at=self.clock(),
            round=round_index,
            inner_steps=inner_steps,
            tokens=tokens,
            seconds=seconds,
            loss=None if loss is None or not math.isfinite(loss) else loss,
            validation=measured[1] if measured and measured != self._told_validation else None,
            verdict=last.verdict,
            partner=last.partner,
            bytes_sent=last.bytes_sent,
            bytes_received=last.bytes_received,
            exchange_seconds=last.seconds,
            path=last.path,
            late_steps=late_steps,
        )
        self._told_validation = measured
        if self.tell_round is None:
            self.say(record.line)
        else:
            self.note(record.line)
            self.tell_round(record)
