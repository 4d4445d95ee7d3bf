"""Live nodes, however slow, that others take for dead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from .record import NodeRecord

# A node that was just started or thawed needs this time until others hear from it.
GRACE: Final = 15.0
_THERE: Final = ("working", "starved", "finished")


def false_deaths(records: Iterable[NodeRecord]) -> Iterator[tuple[int, int]]:
    """Yield (live node, observer whose latest status says that it is gone)."""
    records = [*records]
    for observer in records:
        status, seen_at = observer.status, observer.seen_at
        if status is None or seen_at is None or not _is_there(observer, seen_at):
            continue
        live = {member.peer_id for member in status.members if member.is_live or member.is_heard}
        for record in records:
            if record is not observer and _is_there(record, seen_at) and record.peer_id not in live:
                yield record.index, observer.index


def _is_there(record: NodeRecord, at: float) -> bool:
    return record.ledger.condition in _THERE and at - record.ledger.there_since >= GRACE
