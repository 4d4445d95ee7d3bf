"""The state of one round of pairing: its agreement, its times, and the peers that were asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from blake3 import blake3


@dataclass(slots=True)
class Bond:
    """A proposal of ours that is outstanding, or the agreement with a partner."""

    peer: bytes
    session: bytes
    is_proposer: bool
    is_partner_ready: bool = False
    due_at: float = 0.0
    """When the partner should be ready, by its word and ours; known once we have agreed."""


@dataclass(slots=True)
class PairingRound:
    """State of one round; times are monotonic seconds."""

    fragment: int = 0
    order: bytes = b""
    """Key of the coins that decide whose proposal comes first; drawn at random."""
    started_at: float = 0.0
    ends_at: float | None = None
    """End of the box; without boxes the expected end, if known."""
    ready_at: float = math.inf
    propose_at: float = 0.0
    num_proposals: int = 0
    has_broken: bool = False
    """Whether the first exchange broke."""
    failure: str = ""
    """What first went wrong in this round, for people."""
    ask_at: dict[bytes, float] = field(default_factory=dict)
    """Live peer -> not before; infinity: not in this round."""
    lost: set[bytes] = field(default_factory=set)
    """Peers whose connection broke: it may be made again once."""
    matched: set[bytes] = field(default_factory=set)
    """Peers in turn that declined a proposal because they have a partner: they may be asked once more."""
    asked_again: set[bytes] = field(default_factory=set)
    """Peers that were asked once more."""
    declined: set[bytes] = field(default_factory=set)
    """Peers in turn whose proposal this node declined because it has a partner."""
    num_given_up: int = 0
    """Partners given up for peers that asked a second time."""

    @property
    def is_ready(self) -> bool:
        """Return whether the contribution is made."""
        return self.ready_at < math.inf

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the contribution is ready, None if unknown."""
        if self.is_ready:
            return 0.0
        return None if self.ends_at is None else max(0.0, self.ends_at - now)

    def comes_first(self, peer: bytes, bond: Bond) -> bool:
        """Return whether a peer's proposals come before ours, ``bond``: half do; asking again changes nothing."""
        return blake3(peer + bond.session, key=self.order).digest()[0] % 2 == 0
