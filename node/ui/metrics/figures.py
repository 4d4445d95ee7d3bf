"""The figures of a round that other programs plot: the one list of their names, and a file of them for TensorBoard.

Trackers show them too (`farandole.node.ui.metrics.report`). Names have only characters that all of these take: letters,
spaces, slashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...status.round_log import RoundRecord

# TensorBoard looks for files with "tfevents" in their names. The name is fixed, so a later file replaces this one.
FILE_NAME: Final = "events.out.tfevents.0.farandole"
_VERSION: Final = "brain.Event:2"


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


def write_events(rounds: Iterable[RoundFigures], folder: Path) -> Path:
    """Write a file of TensorBoard events into ``folder``, which is made if it is missing; return the file's path.

    Each figure is a scalar at the round's index and the time when it ended. Raises `OSError`, and `ImportError` without
    the extra ``tensorboard``; TensorBoard itself is needed only to look at the file.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with closing(RecordWriter(str(path))) as writer:
        for number, figures in enumerate(rounds):
            record = figures.record
            if not number:
                writer.write(Event(wall_time=record.at, file_version=_VERSION).SerializeToString())
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.values.items()]
            event = Event(wall_time=record.at, step=record.round, summary=Summary(value=values))
            writer.write(event.SerializeToString())
    return path
