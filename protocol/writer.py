"""The local author: gives each new entry its tick, and signs it.

The one thing that an author must never do is to sign two entries for one slot and tick, which would bar it from the
run. Within one life a counter a slot sees to that. Across a crash a *mark* does: no tick that begins after the mark has
ever been used, because the node stores each new mark durably before it signs beyond it. Others' clocks play no part.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .entries import (
    DOMAIN,
    MAX_TICK,
    RULES,
    Entry,
    Kind,
    Payload,
    Signed,
    encode_body,
    make_entry,
    payload_size,
    slot_of,
)
from .errors import LocalProtocolError
from .identity import public_bytes, sign

MAX_LEAD = 50.0
"""Seconds that ticks may run ahead of this node's clock: ten less than others accept, whose clocks are off too."""


class Writer:
    """Writes one author's entries. ``now`` is Unix seconds by this node's clock."""

    def __init__(self, key: Ed25519PrivateKey, run_id: bytes) -> None:
        self.author = public_bytes(key)
        self._key = key
        self._run_id = run_id
        self._mark = 0
        self._floor = 0
        self._last: dict[int, int] = {}

    def resume(self, mark: int) -> None:
        """Begin a life after one that stored this mark (Unix seconds). To be called before anything is written."""
        self._mark = self._floor = max(self._mark, mark)

    def _next_tick(self, kind: Kind, index: int, now: float) -> int:
        quantum = RULES[kind].quantum
        # what a past life may have used: ticks that begin at the mark it left or before
        past = self._floor // quantum if self._floor else -1
        last = max(self._last.get(slot_of(kind, index), -1), past)
        return max(last + 1, int(now // quantum))

    def delay(self, kind: Kind, index: int, now: float) -> float:
        """Seconds until the slot may be written: 0 unless it is written much more often than its ticks pass."""
        return max(0.0, self._next_tick(kind, index, now) * RULES[kind].quantum - MAX_LEAD - now)

    def mark_needed(self, kind: Kind, index: int, now: float) -> int | None:
        """The mark to store durably, and then to confirm with `marked`, before this slot is written; None: none.

        It is no further ahead than the entry itself, so that a node that dies and restarts again and again does not
        run away from the clock.
        """
        begins_at = self._next_tick(kind, index, now) * RULES[kind].quantum
        return begins_at if begins_at > self._mark else None

    def marked(self, mark: int) -> None:
        """The mark is on disk."""
        self._mark = max(self._mark, mark)

    def write(self, kind: Kind, index: int, payload: Payload, now: float) -> Entry:
        """A signed entry for the slot, newer than every one before it.

        Raises `LocalProtocolError` if the payload or the slot is not one of the kind's, if the slot was written too
        often (`delay`), or if the mark is not stored (`mark_needed`).
        """
        rule = RULES[kind]
        if not 0 <= index < rule.slots or type(payload) is not rule.payload:
            raise LocalProtocolError(f"{kind.name}[{index}] cannot hold a {type(payload).__name__}")
        if payload_size(payload) > rule.max_bytes:
            raise LocalProtocolError(f"{kind.name} holds {rule.max_bytes} bytes, not {payload_size(payload)}")
        tick = self._next_tick(kind, index, now)
        if tick * rule.quantum > now + MAX_LEAD or tick > MAX_TICK:
            raise LocalProtocolError(f"{kind.name}[{index}] is written faster than its ticks of {rule.quantum} s")
        if tick * rule.quantum > self._mark:
            raise LocalProtocolError("an entry beyond the stored mark: a crash now could fork this author")
        self._last[slot_of(kind, index)] = tick
        body = encode_body(kind, index, tick, payload)
        signed = Signed(self.author, body, sign(self._key, DOMAIN, self._run_id, body))
        return make_entry(kind, index, tick, payload, signed)

    def observe(self, entry: Entry) -> None:
        """An entry of this very author came back from others: one of a past life, and no later one may equal it."""
        if entry.author == self.author:
            self._last[entry.slot] = max(self._last.get(entry.slot, -1), entry.tick)
