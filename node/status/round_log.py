"""Finished rounds, one line each: a sentence for people, and JSON in a file that any tool reads.

The file (``rounds.jsonl``) is a log, rotated when it is full (`farandole.node.base.logs`): a few months of an
ordinary node's rounds. A crash may cut its last line short, so lines that cannot be read are left out.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, TextIO

import msgspec

from ..base.figures import plural


class RoundRecord(msgspec.Struct, frozen=True):
    """A round, as this node saw it end."""

    at: float
    """Unix seconds."""
    round: int
    inner_steps: int
    """Inner steps of this round; the tokens are this round's, too."""
    tokens: int
    seconds: float
    """Duration of the inner steps."""
    loss: float | None
    """Mean training loss, nats a token."""
    validation: float | None
    """Loss on held-out text, if it was measured since the round before."""
    verdict: str
    """``committed``, ``alone: <reason>`` or ``failed: <reason>``; empty if there was no peer to ask."""
    partner: str
    """Peer id; empty when the outer step was taken alone."""
    bytes_sent: int
    """Bytes of all exchanges of the round, including failed ones."""
    bytes_received: int
    exchange_seconds: float
    path: str
    """``bulk`` or ``stream``."""
    late_steps: int
    """Inner steps between the contribution and the outer step."""
    clip: float = 1.0
    """As in `farandole.node.status.status.ExchangeStatus`."""
    failed_partner: str = ""
    """Peer id of the partner of a failed exchange of this round; empty if none failed."""
    failure: str = ""
    """The failed exchange's verdict, ``failed: <reason>``; `verdict` is the later exchange's."""
    failed_bytes_sent: int = 0
    """The part of `bytes_sent` in failed exchanges."""
    skipped_steps: int = 0
    """Inner steps that changed nothing because their gradients were not finite."""
    bits_per_byte: float | None = None
    """`validation` in bits per byte, which models with different tokenizers share; None where it is not known."""

    @property
    def contribution_bytes(self) -> int:
        """Bytes sent in the committed exchange."""
        return self.bytes_sent - self.failed_bytes_sent

    def line(self, partner: str = "") -> str:
        """Return the round as a line for people; ``partner``: what to call it, by default the end of its id."""
        line = f"round {self.round}: {plural(self.inner_steps, 'inner step')}"
        if self.skipped_steps:
            line += f" ({self.skipped_steps} without effect: gradients not finite)"
        if self.loss is not None:
            line += f", loss {self.loss:.3f}"
        if self.verdict != "committed":
            return f"{line}; {self.verdict}" if self.verdict else line
        megabytes = self.contribution_bytes / 1e6
        line += f"; averaged with {partner or self.partner[-8:]}"
        if self.clip < 1.0:
            line += f", of whose contribution {self.clip:.0%} counted"
        return f"{line}, {megabytes:.2f} MB each way in {self.exchange_seconds:.2f} s"


def read_rounds(path: Path) -> Iterator[RoundRecord]:
    """Yield the rounds in a log file and in the older one that it replaced, oldest first; missing files are empty."""
    for part in (path.with_name(f"{path.name}.1"), path):
        try:
            file = part.open("rb")
        except FileNotFoundError:
            continue
        with file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError):
                    yield msgspec.json.decode(line, type=RoundRecord)


def write_csv(records: Iterable[RoundRecord], file: TextIO) -> None:
    """Write a table with a header; unknown values are empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(RoundRecord.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(record) for record in records)


# The figures of a round that other programs plot: the one list of their names, and a file of them for TensorBoard.
#
# Experiment trackers import that file, too. Names have only characters that all of these take: letters, spaces,
# slashes.

# TensorBoard looks for files with "tfevents" in their names. The name is fixed, so a later file replaces this one.
FILE_NAME: Final = "events.out.tfevents.0.farandole"
_VERSION: Final = "brain.Event:2"


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


def write_events(records: Iterable[RoundRecord], tokens_before: int, folder: Path) -> Path:
    """Write a file of TensorBoard events into ``folder``, which is made if it is missing; return the file's path.

    Before the first round there were ``tokens_before`` tokens in all. Each figure is a scalar at the round's index and
    the time when it ended. Raises `OSError`, and `ImportError` without the extra ``tensorboard``; TensorBoard itself is
    needed only to look at the file.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with closing(RecordWriter(str(path))) as writer:
        for number, record in enumerate(records):
            if not number:
                writer.write(Event(wall_time=record.at, file_version=_VERSION).SerializeToString())
            tokens_before += record.tokens
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _values(record, tokens_before)]
            event = Event(wall_time=record.at, step=record.round, summary=Summary(value=values))
            writer.write(event.SerializeToString())
    return path
