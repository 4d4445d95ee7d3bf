"""Rounds as a file of TensorBoard events: one scalar for each figure, at the round's index and the time when it ended.

Importing this needs the extra ``tensorboard``, whose tensorboardX writes such files. TensorBoard itself is needed only
to look at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from ...status.round_log import RoundRecord

# TensorBoard looks for files with "tfevents" in their names. The name is fixed, so a later file replaces this one.
FILE_NAME: Final = "events.out.tfevents.0.farandole"
_VERSION: Final = "brain.Event:2"


def write_events(records: Iterable[RoundRecord], folder: Path) -> Path:
    """Write the rounds into a file in ``folder``, which is made if it is missing; return its path. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with closing(RecordWriter(str(path))) as writer:
        for number, record in enumerate(records):
            if not number:
                writer.write(Event(wall_time=record.at, file_version=_VERSION).SerializeToString())
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(record)]
            event = Event(wall_time=record.at, step=record.round, summary=Summary(value=values))
            writer.write(event.SerializeToString())
    return path


def _scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """Yield tags and values of the known figures."""
    if record.loss is not None:
        yield "loss/training", record.loss
    if record.validation is not None:
        yield "loss/held out", record.validation
    if record.bits_per_byte is not None:
        yield "loss/held out, bits per byte", record.bits_per_byte
    yield "round/inner steps", record.inner_steps
    yield "round/tokens", record.tokens
    if record.seconds > 0:
        yield "round/tokens a second", record.tokens / record.seconds
    yield "exchange/committed", record.verdict == "committed"
    if record.verdict == "committed":
        yield "exchange/seconds", record.exchange_seconds
        yield "exchange/megabytes sent", record.bytes_sent / 1e6
        yield "exchange/megabytes received", record.bytes_received / 1e6
        yield "exchange/inner steps late", record.late_steps
