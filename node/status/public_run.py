"""What a run's public page shows: nothing that its members do not sign for everybody, and no address."""

from __future__ import annotations

import msgspec

Point = tuple[float, float]


class PublicMember(msgspec.Struct, frozen=True):
    """A member of the run."""

    peer_id: str
    state: str
    """``live``, ``paused``, ``left`` or ``gone``."""
    tokens: int
    rounds: int
    tokens_per_second: float
    """0 unless it is live."""
    device: str


class PublicRun(msgspec.Struct, frozen=True):
    """A run at one moment."""

    name: str
    run_id: str
    """In hexadecimal."""
    parameters: int
    at: float
    """Unix seconds."""
    live: int
    """Number of live members."""
    round: int
    """The latest round of a live member."""
    tokens: int
    """Tokens of all members, as they have signed them, also of the ones that have left."""
    tokens_per_second: float
    loss: float | None
    """Mean training loss of the live members, in nats a token."""
    notice: str
    """The creator's last message or command; empty if there is none."""
    members: list[PublicMember]
    """The ones with most tokens first."""
