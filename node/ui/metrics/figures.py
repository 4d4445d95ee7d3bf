"""The figures of a round that other programs plot: the one list of their names.

TensorBoard and the trackers show them (`farandole.node.ui.metrics.tensorboard`, `farandole.node.ui.metrics.report`).
Names have only characters that all of these take: letters, spaces, slashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...status.round_log import RoundRecord


@dataclass(frozen=True)
class RoundFigures:
    """A round that is over, as a plot shows it."""

    record: RoundRecord
    tokens_in_all: int
    """Tokens of this round and the earlier ones that are known."""
    values: dict[str, float]
    """The known figures by their names."""


def figures_of(records: Iterable[RoundRecord], tokens_before: int = 0) -> Iterator[RoundFigures]:
    """Yield the figures of each round; the rounds before the first one had ``tokens_before`` tokens in all."""
    for record in records:
        tokens_before += record.tokens
        yield RoundFigures(record, tokens_before, dict(_values(record, tokens_before)))


def _values(record: RoundRecord, tokens_in_all: int) -> Iterator[tuple[str, float]]:
    if record.loss is not None:
        yield "loss/training", record.loss
    if record.validation is not None:
        yield "loss/held out", record.validation
    if record.bits_per_byte is not None:
        yield "loss/bits per byte", record.bits_per_byte
    yield "round/inner steps", float(record.inner_steps)
    yield "round/tokens", float(record.tokens)
    yield "round/tokens in all", float(tokens_in_all)
    yield "round/seconds", record.seconds
    if record.seconds > 0:
        yield "round/tokens a second", record.tokens / record.seconds
    yield "exchange/committed", float(record.verdict == "committed")
    if record.verdict == "committed":
        yield "exchange/seconds", record.exchange_seconds
        yield "exchange/megabytes sent", record.bytes_sent / 1e6
        yield "exchange/megabytes received", record.bytes_received / 1e6
        yield "exchange/clip", record.clip
        yield "exchange/inner steps late", float(record.late_steps)
