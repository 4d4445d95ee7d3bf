"""Rounds that are over, one line each: a sentence for people, and JSON in a file that any tool reads.

The file (``rounds.jsonl``) is a log, turned over when it is full (`farandole.node.base.logs`): a few months of an
ordinary node's rounds. A crash may cut its last line short, so lines that cannot be read are left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec


class RoundRecord(msgspec.Struct, frozen=True):
    """A round, as this node saw it end."""

    at: float
    """Unix seconds."""
    round: int
    inner_steps: int
    """In this round, as are the tokens."""
    tokens: int
    seconds: float
    """Of inner steps."""
    loss: float | None
    """Mean training loss, nats a token."""
    validation: float | None
    """Loss on held-out text, if it was measured since the round before."""
    verdict: str
    """``committed``, ``alone: <reason>`` or ``failed: <reason>``; empty if there was nobody to ask."""
    partner: str
    """Peer id; empty when the outer step was taken alone."""
    bytes_sent: int
    """Of all exchanges of the round, those that failed among them."""
    bytes_received: int
    exchange_seconds: float
    path: str
    """``bulk`` or ``stream``."""
    late_steps: int
    """Inner steps between the contribution and the outer step."""
    clip: float = 1.0
    """As in `farandole.node.status.status.ExchangeStatus`."""
    failed_partner: str = ""
    """Peer id of the partner with whom an exchange of this round came to nothing; empty if none did."""
    failure: str = ""
    """That exchange's verdict, ``failed: <reason>``, where `verdict` is that of what came after it."""
    failed_bytes_sent: int = 0
    """Of `bytes_sent`, in exchanges that failed."""

    @property
    def contribution_bytes(self) -> int:
        """Sent in the exchange that was committed."""
        return self.bytes_sent - self.failed_bytes_sent

    @property
    def line(self) -> str:
        """For people."""
        line = f"round {self.round}: {self.inner_steps} inner steps"
        if self.loss is not None:
            line += f", loss {self.loss:.3f}"
        if self.late_steps:
            line += f", outer step {self.late_steps} inner steps late"
        if self.verdict != "committed":
            return f"{line}; {self.verdict}" if self.verdict else line
        megabytes = self.contribution_bytes / 1e6
        line += f"; averaged with {self.partner[-8:]}"
        if self.clip < 1.0:
            line += f", of whose contribution {self.clip:.0%} counted"
        return f"{line}, {megabytes:.2f} MB each way in {self.exchange_seconds:.2f} s"


def read_rounds(path: Path) -> Iterator[RoundRecord]:
    """The rounds in a file and in the one that it took the place of, oldest first; none if there are none."""
    for part in (path.with_name(f"{path.name}.1"), path):
        if not part.exists():
            continue
        with part.open("rb") as file:
            for line in file:
                try:
                    yield msgspec.json.decode(line, type=RoundRecord)
                except msgspec.MsgspecError:
                    continue


def write_csv(records: Iterable[RoundRecord], file: TextIO) -> None:
    """A table with a header; what is not known is empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(RoundRecord.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(record) for record in records)
