"""Which peers are asked last: those with whom an exchange has come to nothing, for longer each time.

A contribution that was refused, a partner that was not ready in time, an exchange that broke: none of it proves ill
will, and all of it costs a round. A peer is put off for some rounds, twice as many after each failure in a row. It is
put off, not shut out: where no other peer is free it is met all the same, so two nodes alone go on meeting. Nothing
here is said to others, so nobody can be slandered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# Rounds after the first failure; twice as many after each further one in a row, up to a limit.
FIRST_ROUNDS, MAX_ROUNDS = 2, 256
# Peers that are remembered, those that failed last: as many as a node meets in days.
MAX_PEERS = 4_096


@dataclass(slots=True)
class _FailedExchanges:
    in_a_row: int
    until: int
    """The round from which the peer is as good as any other."""


class PartnerBackoff:
    """The failures of one node's peers, in rounds of its own."""

    def __init__(self) -> None:
        self._of: OrderedDict[bytes, _FailedExchanges] = OrderedDict()

    def note_failure(self, peer: bytes, round_: int) -> None:
        """Nothing came of the exchange with a peer."""
        failures = self._of.setdefault(peer, _FailedExchanges(0, 0))
        self._of.move_to_end(peer)
        failures.in_a_row += 1
        failures.until = round_ + 1 + min(FIRST_ROUNDS << min(failures.in_a_row - 1, 30), MAX_ROUNDS)
        while len(self._of) > MAX_PEERS:
            self._of.popitem(last=False)

    def note_success(self, peer: bytes) -> None:
        """The exchange with a peer was committed."""
        self._of.pop(peer, None)

    def puts_off(self, peer: bytes, round_: int) -> bool:
        """Whether others come before this peer."""
        failures = self._of.get(peer)
        return failures is not None and round_ < failures.until
