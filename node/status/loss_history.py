"""History of the loss: the newest part of the training and validation curves."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

# Points of a curve for one screen or report; a month's run keeps its newest part here.
MAX_LOSSES: Final = 256


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
