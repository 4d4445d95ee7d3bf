"""The figures of a round that other programs plot: the one list of their names.

TensorBoard and the trackers show them (`farandole.node.ui.metrics.tensorboard`, `farandole.node.ui.metrics.report`).
Names have only characters that all of these take: letters, spaces, slashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from farandole.protocol.evaluation.evaluations import curve_of

from ...status.evaluation_log import EvaluationRecord
from ...status.round_log import RoundRecord


@dataclass(frozen=True)
class RoundFigures:
    """A round that is over, as a plot shows it."""

    record: RoundRecord
    tokens_in_all: int
    """Tokens of this round and the earlier ones that are known."""
    values: dict[str, float]
    """The known figures by their names."""


def figures_of(
    records: Iterable[RoundRecord],
    tokens_before: int = 0,
    evaluations: Sequence[EvaluationRecord] = (),
    heard_after: float = 0.0,
) -> Iterator[RoundFigures]:
    """Yield the figures of each round; the rounds before the first one had ``tokens_before`` tokens in all.

    ``evaluations``: those of the run. Each is shown with the round in which this node heard it, as trackers take no
    later figures of a round; the ones up to ``heard_after`` (Unix seconds) are left out.
    """
    for record in records:
        tokens_before += record.tokens
        values = dict(_values(record, tokens_before))
        new = {each.evaluation.mark for each in evaluations if heard_after < each.at <= record.at}
        known = [each.report for each in evaluations if each.evaluation.mark in new and each.at <= record.at]
        heard_after = record.at
        values |= {evaluation_name(point.task, point.metric): point.value for point in curve_of(known)}
        yield RoundFigures(record, tokens_before, values)


def evaluation_name(task: str, metric: str) -> str:
    """Return the name of a figure of an evaluation; characters that a tracker refuses become spaces."""
    return re.sub(r"[^0-9A-Za-z_/ -]+", " ", f"evaluation/{task}/{metric}").strip()


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
