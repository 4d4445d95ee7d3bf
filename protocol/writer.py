"""The local author: gives each new entry its tick, and signs it.

The one thing that an author must never do is to sign two entries for one slot and tick, which would bar it from the
run. Within one life a counter a slot sees to that. Across a crash a *mark* does: it says in which spans of time ticks
may have been used, and the node stores each new mark durably before it signs beyond it. Others' clocks play no part.

Why spans, and not one number: a clock that is an hour fast for a minute would else silence its node for an hour once it
is set right, as all ticks up to then would count as used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
MAX_SPANS = 8
"""A clock that jumps more often has the oldest two joined, between which nothing is written then."""
_SLACK = max(rule.quantum for rule in RULES.values())
"""Seconds that a span begins before its first tick: so long ago others may begin that are written at the same time."""
_JUMP = 2 * _SLACK + 1
"""Seconds between two ticks which make the clock one that has jumped, or a node that was away."""

Mark = tuple[tuple[int, int], ...]
"""Spans in order, first and last Unix second: no tick that begins outside them has ever been used."""


@dataclass(slots=True)
class _Span:
    """Ticks that begin from ``first`` to ``last`` may have been used, up to ``floor`` by a past life."""

    first: int
    last: int
    floor: int
    ticks: dict[int, int] = field(default_factory=dict)
    """Slot -> newest tick of this life."""


class Writer:
    """Writes one author's entries. ``now`` is Unix seconds by this node's clock."""

    def __init__(self, key: Ed25519PrivateKey, run_id: bytes) -> None:
        self.author = public_bytes(key)
        self._key = key
        self._run_id = run_id
        self._spans: list[_Span] = []

    def resume(self, mark: Mark) -> None:
        """Begin a life after one that stored this mark. To be called before anything is written."""
        self._spans = [_Span(first, last, last) for first, last in mark]

    def _next_tick(self, kind: Kind, index: int, now: float) -> int:
        """Later than all that were used before it by the clock, and none that was used."""
        quantum, slot = RULES[kind].quantum, slot_of(kind, index)
        tick = int(now // quantum)
        for span in self._spans:
            if max(now, tick * quantum) < span.first:
                break
            tick = max(tick, span.ticks.get(slot, -1) + 1, span.floor // quantum + 1)
        return tick

    def delay(self, kind: Kind, index: int, now: float) -> float:
        """Seconds until the slot may be written: 0 unless it is written much more often than its ticks pass."""
        return max(0.0, self._next_tick(kind, index, now) * RULES[kind].quantum - MAX_LEAD - now)

    def mark_needed(self, kind: Kind, index: int, now: float) -> Mark | None:
        """The mark to store durably, and then to confirm with `marked`, before this slot is written; None: none.

        It is no further ahead than the entry itself, so that a node that dies and restarts again and again does not
        run away from the clock.
        """
        begins_at = self._next_tick(kind, index, now) * RULES[kind].quantum
        if self._span_of(begins_at) is not None:
            return None
        spans = [(span.first, span.last) for span in self._spans]
        before = sum(first <= begins_at for first, _ in spans)
        if before and begins_at - spans[before - 1][1] < _JUMP:
            spans[before - 1] = (spans[before - 1][0], begins_at)
        else:
            spans.insert(before, (max(0, begins_at - _SLACK), begins_at))
        if len(spans) > MAX_SPANS:
            oldest = 0 if before else 1  # but not the new one with a later one, in which its ticks would count as used
            spans[oldest : oldest + 2] = [(spans[oldest][0], spans[oldest + 1][1])]
        return tuple(spans)

    def marked(self, mark: Mark) -> None:
        """The mark is on disk."""
        outside = [span for span in self._spans if not any(first <= span.first <= last for first, last in mark)]
        spans = [*outside, *(self._joined(first, last) for first, last in mark)]
        self._spans = sorted(spans, key=lambda span: span.first)

    def _joined(self, first: int, last: int) -> _Span:
        """The spans that lie in this one, as one."""
        joined = _Span(first, last, first - 1)
        for span in self._spans:
            if first <= span.first <= last:
                joined.floor = max(joined.floor, span.floor)
                joined.ticks |= span.ticks  # later ones, as spans are in order
        return joined

    def _span_of(self, second: int) -> _Span | None:
        return next((span for span in self._spans if span.first <= second <= span.last), None)

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
        span = self._span_of(tick * rule.quantum)
        if span is None:
            raise LocalProtocolError("an entry beyond the stored mark: a crash now could fork this author")
        span.ticks[slot_of(kind, index)] = tick
        body = encode_body(kind, index, tick, payload)
        signed = Signed(self.author, body, sign(self._key, DOMAIN, self._run_id, body))
        return make_entry(kind, index, tick, payload, signed)

    def observe(self, entry: Entry) -> None:
        """An entry of this very author came back from others: one of a past life, and no later one may equal it."""
        if entry.author != self.author:
            return
        before = sum(span.first <= entry.written_at for span in self._spans)
        if not before:
            self._spans.insert(0, _Span(entry.written_at, entry.written_at, entry.written_at - 1))
        span = self._spans[max(0, before - 1)]
        span.ticks[entry.slot] = max(span.ticks.get(entry.slot, -1), entry.tick)
