"""The local author: gives each new entry its tick, and signs it.

An author must never sign two entries for one slot and tick, which would bar it from the run. Within one life a counter
per slot prevents this. Across a crash a *mark* does: it lists the spans of time in which the node may have written, and
the node stores each new mark durably before it signs beyond it. Others' clocks play no part.

Why spans, and not one number: otherwise a clock that is an hour fast for a minute would silence its node for an hour
once it is set right, as all ticks up to then would count as used. Why spans of seconds, and not of ticks: a tick may be
a minute long, and a clock that is a minute and a half fast has jumped for heartbeats, but not for entries that are
written once a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..wire.errors import LocalProtocolError
from ..wire.identity import public_bytes, sign
from .entries import (
    ALL_RULES,
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
from .state import MAX_AHEAD

CLOCK_ERROR = 10.0
"""Seconds by which others' clocks may be off while this one is right."""
MAX_LEAD = MAX_AHEAD - CLOCK_ERROR
"""Seconds that ticks may run ahead of this node's clock: others accept this even where their clocks are behind."""
MAX_SPANS = 8
"""Most spans in a mark. Beyond it the oldest two are joined, and nothing can be written between them."""
_JUMP = MAX_AHEAD + CLOCK_ERROR
"""Seconds between two writes from which the clock has jumped, or the node was away. After a smaller jump others may
have accepted entries that are ahead of their clocks, and accept no earlier ones: then the ticks must go on after
them."""

Mark = tuple[tuple[int, int], ...]
"""Spans in order, each a first and a last Unix second. A tick outside all spans was never used."""


@dataclass(slots=True)
class _Span:
    """A span of Unix seconds in which entries may have been written; up to ``floor`` by a past life."""

    first: int
    last: int
    floor: int = -1
    ticks: dict[int, int] = field(default_factory=dict)
    """Slot -> newest tick of this life."""
    is_marked: bool = True
    """Whether it is in the stored mark."""


def _is_near(span: _Span, tick: int, quantum: int, now: float) -> bool:
    """Return whether the tick reaches into the span, or might follow it at once; else it is written before it.

    Others may have entries of the span, and accept nothing older, so the tick must follow it where it can.
    """
    return span.first <= max((tick + 1) * quantum, now + MAX_LEAD - quantum)


class Writer:
    """Writes one author's entries. ``now`` is Unix seconds by this node's clock."""

    def __init__(self, key: Ed25519PrivateKey, run_id: bytes) -> None:
        self.author = public_bytes(key)
        self._key = key
        self._run_id = run_id
        self._spans: list[_Span] = []

    def resume(self, mark: Mark) -> None:
        """Begin a life after one that stored this mark. Call it before anything is written."""
        self._spans = [_Span(first, last, last) for first, last in mark]

    def _next_tick(self, kind: Kind, index: int, now: float) -> int:
        """Return an unused tick, later than any that others may have, unless the clock was set back by a jump."""
        quantum, slot = RULES[kind].quantum, slot_of(kind, index)
        tick = int(now // quantum)
        for span in self._spans:
            if not _is_near(span, tick, quantum, now):
                break
            tick = max(tick, span.ticks.get(slot, -1) + 1, span.floor // quantum + 1)
        return tick

    def _second_of(self, kind: Kind, tick: int, now: float) -> int:
        """Return when a tick counts as written: now, or its beginning if that is later."""
        return max(int(now), tick * RULES[kind].quantum)

    def delay(self, kind: Kind, index: int, now: float) -> float:
        """Return the seconds until the slot may be written: 0 unless it is written much faster than its ticks pass."""
        return max(0.0, self._next_tick(kind, index, now) * RULES[kind].quantum - MAX_LEAD - now)

    def mark_needed(self, kind: Kind, index: int, now: float) -> Mark | None:
        """Return the mark to store durably and confirm with `marked` before this slot is written; None if not needed.

        It is no further ahead than the entry itself, so that a node that restarts repeatedly does not run ahead of the
        clock.
        """
        tick = self._next_tick(kind, index, now)
        second = self._second_of(kind, tick, now)
        if self._span_of(second) is not None:
            return None
        spans = [(span.first, span.last) for span in self._spans]
        before = sum(first <= second for first, _ in spans)
        if before and second - spans[before - 1][1] < _JUMP:
            spans[before - 1] = (spans[before - 1][0], second)
        elif before < len(spans) and _is_near(self._spans[before], tick, RULES[kind].quantum, now):
            spans[before] = (second, spans[before][1])  # of this life, or the tick would follow it
        else:
            spans.insert(before, (second, second))
        while len(spans) > MAX_SPANS:
            oldest = 0 if before else 1  # but not the new one with a later one, in which its ticks would count as used
            spans[oldest : oldest + 2] = [(spans[oldest][0], spans[oldest + 1][1])]
        return tuple(spans)

    def marked(self, mark: Mark) -> None:
        """Confirm that the mark is on disk."""
        outside, marked = [], [_Span(first, last) for first, last in mark]
        for span in self._spans:
            joined = next((each for each in marked if each.first <= span.first <= each.last), None)
            if joined is None:
                outside.append(span)
            else:
                joined.floor = max(joined.floor, span.floor)
                joined.ticks |= span.ticks  # later ones, as spans are in order
        self._spans = sorted([*outside, *marked], key=lambda span: span.first)

    def _span_of(self, second: int) -> _Span | None:
        return next((span for span in self._spans if span.is_marked and span.first <= second <= span.last), None)

    def write(self, kind: Kind, index: int, payload: Payload, now: float) -> Entry:
        """Sign an entry for the slot, newer than every earlier one.

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
        span = self._span_of(self._second_of(kind, tick, now))
        if span is None:
            raise LocalProtocolError("an entry beyond the stored mark: a crash now could fork this author")
        span.ticks[slot_of(kind, index)] = tick
        body = encode_body(kind, index, tick, payload)
        signed = Signed(self.author, body, sign(self._key, DOMAIN, self._run_id, body))
        return make_entry(kind, index, tick, payload, signed)

    def observe(self, entry: Entry) -> None:
        """Note an entry of this author from a past life, received from others: no later entry may have its tick."""
        if entry.author != self.author:
            return
        ends_at = entry.written_at + ALL_RULES[entry.kind].quantum
        before = sum(span.first < ends_at for span in self._spans)
        if not before:
            self._spans.insert(0, _Span(entry.written_at, entry.written_at, entry.written_at - 1, is_marked=False))
        span = self._spans[max(0, before - 1)]
        span.ticks[entry.slot] = max(span.ticks.get(entry.slot, -1), entry.tick)
