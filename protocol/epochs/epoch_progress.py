"""Progress of a run's epochs, from the entries of its authors."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..run.slices import part_mask, said_by
from ..state.entries import Entry, Kind, Lease
from ..state.state import RunState

# Authors that must report a section as done before a visitor believes it; half of the authors in smaller runs.
MAX_WITNESSES = 3


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """The progress of a run's epochs."""

    corpus: bytes
    epoch: int
    done: int
    """The sections of this epoch that are done, a bit for each."""


def epoch_progress(state: RunState, live: Iterable[bytes]) -> EpochProgress | None:
    """Return the run's progress as reported by the live members with the most common text; None if no member reports.

    Sections done recently are missing, since members announce done sections at intervals.
    """
    said = {author: lease for author in live if (lease := state.payload(author, Lease)) is not None}
    if not said:
        return None
    [(corpus, num_authors)] = Counter(lease.corpus for lease in said.values()).most_common(1)
    epoch = median_epoch(lease for lease in said.values() if lease.corpus == corpus)
    assert epoch is not None, "somebody has this text"
    told = [_told(state.entries_of(author), corpus, epoch) for author in said]
    return EpochProgress(corpus, epoch, said_by(told, min(MAX_WITNESSES, -(-num_authors // 2))))


def _told(entries: Iterable[Entry], corpus: bytes, epoch: int) -> int:
    """Return the sections that an author's entries report as done, a bit for each."""
    told = 0
    for entry in entries:
        if entry.kind is Kind.LEASE and entry.index:
            lease: Lease = entry.payload
            if (lease.corpus, lease.epoch) == (corpus, epoch):
                told |= part_mask(entry.index - 1, lease.done)
    return told


def median_epoch(said: Iterable[Lease]) -> int | None:
    """Return the run's epoch as its live members report it, the lower one of two; None if no member reports one."""
    epochs = [lease.epoch for lease in said]
    return int(statistics.median_low(epochs)) if epochs else None
