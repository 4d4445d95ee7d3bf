"""Histories of a node: counts and the newest of its exchanges, and the newest part of its loss curves."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import Final

from .status import ExchangeStatus

# Newest exchanges that the first line of the status, and a screen, use.
MAX_EXCHANGES: Final = 16
# Partners whose exchanges are counted, as many as the run state has authors; the one with the fewest is dropped first.
MAX_PARTNERS: Final = 4_096
# Recent partners: as many as links are shown, and twice as many rounds.
MAX_PARTNERS_REMEMBERED: Final = 128
# Points of a curve for one screen or report; a month's run keeps its newest part here.
MAX_LOSSES: Final = 256


class ExchangeHistory:
    """Counts since the node began, and the newest exchanges."""

    def __init__(self) -> None:
        self.num_committed = 0
        self.num_alone = 0
        self.num_failed = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        """Of contributions and of checkpoints."""
        self.recent: deque[ExchangeStatus] = deque(maxlen=MAX_EXCHANGES)
        self.partners: Counter[str] = Counter()
        """Peer id -> committed exchanges."""
        self.paths: Counter[str] = Counter()
        """How contributions moved -> committed exchanges."""
        self.last_by_peer: OrderedDict[str, ExchangeStatus] = OrderedDict()
        """Peer id -> the last exchange with it, the newest at the end."""
        self.bandwidths: dict[str, float] = {}
        """Peer id -> bytes a second, both ways together, of the last committed exchange with it."""

    @property
    def last(self) -> ExchangeStatus | None:
        """The newest exchange, or round without one."""
        return self.recent[-1] if self.recent else None

    def add(self, exchange: ExchangeStatus) -> None:
        """Add an exchange that has ended, or a round that was taken alone (an empty ``partner``)."""
        name = exchange.partner
        if exchange.verdict == "committed":
            self.num_committed += 1
            if name not in self.partners and len(self.partners) >= MAX_PARTNERS:
                del self.partners[min(self.partners, key=self.partners.__getitem__)]
            self.partners[name] += 1
            self.paths[exchange.path] += 1
        elif name:
            self.num_failed += 1
        else:
            self.num_alone += 1
        self.bytes_sent += exchange.bytes_sent
        self.bytes_received += exchange.bytes_received
        self.recent.append(exchange)
        if not name:
            return
        self.last_by_peer[name] = exchange
        self.last_by_peer.move_to_end(name)
        if exchange.verdict == "committed" and exchange.seconds > 0:
            self.bandwidths[name] = (exchange.bytes_sent + exchange.bytes_received) / exchange.seconds
        if len(self.last_by_peer) > MAX_PARTNERS_REMEMBERED:
            forgotten, _ = self.last_by_peer.popitem(last=False)
            self.bandwidths.pop(forgotten, None)


class LossHistory:
    """Points of both curves, each (round, nats a token). A loss that is not finite is left out."""

    def __init__(self) -> None:
        self.training: deque[tuple[int, float]] = deque(maxlen=MAX_LOSSES)
        self.validation: deque[tuple[int, float]] = deque(maxlen=MAX_LOSSES)
        self.bits_per_byte: float | None = None
        """The newest validation loss in bits per byte; None where it is not known."""
        self.first: float | None = None
        """Training loss of the first round."""

    def add_training(self, round_index: int, loss: float | None) -> None:
        """Add the mean training loss of a finished round, where it is known."""
        if loss is not None and math.isfinite(loss):
            self.first = loss if self.first is None else self.first
            self.training.append((round_index, loss))

    def add_validation(self, round_index: int, loss: float, bits_per_byte: float | None = None) -> bool:
        """Add the validation loss after a round; returns False if it is not finite."""
        if not math.isfinite(loss):
            return False
        self.validation.append((round_index, loss))
        self.bits_per_byte = bits_per_byte
        return True
