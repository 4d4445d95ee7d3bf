"""How far the epochs of a run are, by what its authors say together."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .entries import Entry, Kind, Lease
from .slices import part_mask
from .state import RunState

# So many authors must say that a section is done, of whom nobody has heard it as a lease's; fewer in runs of fewer.
MAX_WITNESSES = 3


class Witnesses:
    """Which sections of an epoch authors say to be done: a mask of those that one says, at least, that two say, ..."""

    def __init__(self) -> None:
        self._masks = [0] * MAX_WITNESSES

    def add(self, said: int) -> None:
        """One author more says that these are done."""
        for number in range(len(self._masks) - 1, 0, -1):
            self._masks[number] |= self._masks[number - 1] & said
        self._masks[0] |= said

    def believed(self, num_live: int) -> int:
        """The sections of which enough say so: half of those who live, and never many."""
        return self._masks[max(1, min(MAX_WITNESSES, -(-num_live // 2))) - 1]


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
    witnesses = Witnesses()
    for author in said:
        witnesses.add(_told(state.entries_of(author), corpus, epoch))
    return EpochProgress(corpus, epoch, witnesses.believed(num_authors))


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
