"""The board: what this node did and does, written by its parts and read by ``farandole status``."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from farandole.protocol.identity import peer_id_of

from ..metrics.rounds import RoundRecord
from .status import ExchangeStatus, Phase

# The course of the loss on one screen and in a report; a month's run keeps its newest part here.
MAX_LOSSES = 256
MAX_WARNINGS = 20
# What the first line of the status, and a screen, look back upon.
MAX_EXCHANGES = 16


@dataclass
class Board:
    """Counters and words. ``say`` tells a person at the terminal, ``clock`` is Unix time."""

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
    paths: Counter[str] = field(default_factory=Counter)
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))
    validation: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_WARNINGS))
    tell_round: Callable[[RoundRecord], None] | None = None
    """Tells of a round and keeps it; None: it is said, as everything else."""
    _told_validation: tuple[int, float] | None = None

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
            self.say(f"warning: {text}")

    def record_loss(self, round_index: int, loss: float | None) -> None:
        """Mean training loss of a finished round, where it is known."""
        if loss is None:
            return
        self.loss = loss
        if self.loss_first is None:
            self.loss_first = loss
        self.losses.append((round_index, loss))

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
            self.partners[name] += 1
            self.paths[path] += 1
        elif partner:
            self.exchanges_failed += 1
        else:
            self.exchanges_alone += 1
        self.bytes_sent += sent
        self.bytes_received += received
        self.recent_exchanges.append(
            ExchangeStatus(round_index, name, verdict, sent, received, seconds, self.clock(), path)
        )

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
            loss=loss,
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
            self.tell_round(record)
