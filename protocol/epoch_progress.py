"""How far the epochs of a run are, by what its authors say together."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .entries import Entry, Kind, Lease
from .slices import part_mask, said_by
from .state import RunState

# Authors that must say that a section is done, to a visitor; half of them in runs of fewer.
MAX_WITNESSES = 3


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """How far a run's epochs are."""

    corpus: bytes
    epoch: int
    done: int
    """The sections of this epoch that are done."""


def epoch_progress(state: RunState, live: Iterable[bytes]) -> EpochProgress | None:
    """How far the run is, by what those of its live members say who have the text that most have; None if nobody does.

    What was done of late, for which the members had no need to tell all that is done, is missing.
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
    """The sections that an author's entries say to be done."""
    told = 0
    for entry in entries:
        if entry.kind is Kind.LEASE and entry.index:
            lease: Lease = entry.payload
            if (lease.corpus, lease.epoch) == (corpus, epoch):
                told |= part_mask(entry.index - 1, lease.done)
    return told


def median_epoch(said: Iterable[Lease]) -> int | None:
    """Returns where the run is, by what its live members say, the lower one of two; None if nobody says anything."""
    epochs = [lease.epoch for lease in said]
    return int(statistics.median_low(epochs)) if epochs else None
