"""Rounds as a file of TensorBoard events: one scalar for each figure, at the round's index and the time when it ended.

Importing this needs the extra ``tensorboard``, whose tensorboardX writes such files. TensorBoard itself is needed only
to look at them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from .figures import RoundFigures

# TensorBoard looks for files with "tfevents" in their names. The name is fixed, so a later file replaces this one.
FILE_NAME: Final = "events.out.tfevents.0.farandole"
_VERSION: Final = "brain.Event:2"


def write_events(rounds: Iterable[RoundFigures], folder: Path) -> Path:
    """Write the rounds into a file in ``folder``, which is made if it is missing; return its path. Raises `OSError`."""
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
