from __future__ import annotations

from farandole.protocol.epochs.lease_claims import EpochProgress, epoch_progress
from farandole.protocol.run.slices import parts
from farandole.protocol.state.entries import Delta, Kind, Lease
from farandole.protocol.state.state import RunState

from ..authors import CREATOR, NOW, RUN_ID, author_of, signed, tick_at

CORPUS, OTHER_TEXT = b"one text", b"another."


def test_a_visitor_learns_how_far_the_epochs_are() -> None:
    state, done, live = RunState(RUN_ID, CREATOR), (1 << 3_000) - 1, [author_of(number) for number in range(1, 6)]
    assert epoch_progress(state, live) is None
    for number in range(1, 6):
        corpus, epoch = (OTHER_TEXT, 0) if number == 5 else (CORPUS, 1)
        said = done if number < 4 else (1 << 5_000) - 1
        leases = [
            (0, Lease(epoch, corpus)),
            *((part + 1, Lease(epoch, corpus, (), raw)) for part, raw in enumerate(parts(said))),
        ]
        entries = [signed(number, Kind.LEASE, index, tick_at(Kind.LEASE), lease) for index, lease in leases]
        state.merge(Delta(tuple(entries)), NOW)
    assert epoch_progress(state, live) == EpochProgress(CORPUS, 1, done)
    assert epoch_progress(state, live[4:]) == EpochProgress(OTHER_TEXT, 0, (1 << 5_000) - 1)
