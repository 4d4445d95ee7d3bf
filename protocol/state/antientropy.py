"""Anti-entropy: two nodes find out over one stream which entries either lacks, and send each other only these.

    initiator                                   responder
      Hello(root)          ------------------>
                           <------------------    Hello(root)            equal roots: the session ends
                           <------------------    Buckets(256 digests)
      Refs of the buckets  ------------------>
      that differ (last)   <------------------    Delta ...              what the initiator lacks
                           <------------------    Wants                  what the responder lacks
      Delta ...            ------------------>
      Done                 ------------------>

Push spreads run state fast, and anti-entropy makes this reliable: whichever pushes were lost, each session leaves two
states equal (except for entries that one side must defer, and up to the session's bound; the next sessions go on). Full
tables may differ permanently, so a node whose table is full compares a few buckets in a session that it begins, wants
only as many new authors in the sessions of others as it has room for, and sends few to another full one. Heartbeats are
not part of the root; a node that joins, or that has not heard from a peer for a while, asks for them too
(`SyncHello.with_beats`).

A session does no I/O: `receive_data` takes bytes of the stream in pieces of any size, and returns the received entries
and the bytes to send. Messages are msgpack, in the frames of `farandole.protocol.wire.framing`.
"""

from __future__ import annotations

import contextlib
import random
from typing import Annotated

import msgspec

from ..wire.errors import LocalProtocolError, RemoteProtocolError
from ..wire.framing import FrameParser
from ..wire.framing import frame as in_frame
from ..wire.messagepack import MessageDecoder, encode
from .entries import ID_BYTES, MAX_DELTA_BYTES, MAX_SLOTS, Delta, Key, Kind, Proof, Signed, deltas_of, packed
from .state import DIGEST_BYTES, NUM_BUCKETS, AuthorRefs, RunState

VERSION = 1
PROTOCOL = "/farandole/state/2"
MAX_FRAME_BYTES = MAX_DELTA_BYTES + 16
MAX_SENT_BYTES = 2 * 1024 * 1024
"""Most bytes that one side sends in a session. Both sides' are 4 MB, two seconds of a 16 Mbit/s line, so no session
takes long."""
MAX_REFS_BYTES = 1024 * 1024
"""Share of references in them. The rest is left to later sessions, as buckets are taken in random order."""
MAX_BUCKETS_OF_FULL = 8
"""Buckets that a node with a full table compares in a session, the next ones each time: 128 authors, 16 KB of
references. This bounds what the differences of two full tables cost per session, and all buckets are compared within
six minutes.
"""
MAX_NEW_TO_FULL = 8
"""Authors unknown to the initiator that the responder sends if both tables seem to be full. A full table takes in no
new authors from a session, so these would travel for nothing; a table that is nearly equal gets the others later.
"""
FULL_SHARE = 64
"""A table counts as full from this share of its places free, 64 of 4,096: a few authors leave it between two sessions,
and their places must not make all authors of a liar travel again."""
_REF_BYTES = 2 + 3 + 6 + 2 + ID_BYTES
_AUTHOR_BYTES = 2 + 32 + 2 + 3
_MAX_AUTHORS_A_FRAME = 1_800

_Slot = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]


class SyncHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The first frame of each side: its run, clock and root."""

    version: Annotated[int, msgspec.Meta(ge=0, le=255)]
    run_id: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    now: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    """Unix seconds by the sender's clock: only to warn users whose clock is wrong."""
    root: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    with_beats: bool = False
    """Send heartbeats too."""


class Buckets(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The responder's bucket digests, one after the other."""

    digests: Annotated[
        bytes, msgspec.Meta(min_length=NUM_BUCKETS * DIGEST_BYTES, max_length=NUM_BUCKETS * DIGEST_BYTES)
    ]


class Refs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The entries that the initiator has in some buckets; it lacks all others in them."""

    buckets: Annotated[bytes, msgspec.Meta(max_length=NUM_BUCKETS)]
    """Indices of the buckets that this frame completes, a byte each."""
    authors: Annotated[tuple[AuthorRefs, ...], msgspec.Meta(max_length=_MAX_AUTHORS_A_FRAME)]
    is_last: bool


class DeltaFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """Entries and proofs that the other side lacks."""

    delta: Delta


WantedSlots = tuple[Key, Annotated[tuple[_Slot, ...], msgspec.Meta(max_length=MAX_SLOTS)]]
"""An author, and its slots that the responder lacks; none: it lacks the proof that the author has forked."""


class Wants(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """The entries that the responder lacks."""

    authors: Annotated[tuple[WantedSlots, ...], msgspec.Meta(max_length=_MAX_AUTHORS_A_FRAME)]
    is_last: bool


class Done(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """The initiator has sent everything."""


Frame = SyncHello | Buckets | Refs | DeltaFrame | Wants | Done
decode_frame = MessageDecoder[Frame](Frame, "a frame of anti-entropy")
"""Decode a frame without its length."""


def encode_frame(frame: Frame) -> bytes:
    """Return a frame with its length before it."""
    return in_frame(encode(frame), MAX_FRAME_BYTES)


class Session:
    """One side of a session of anti-entropy. It reads the state; the caller merges the received deltas.

    Any method raises `RemoteProtocolError` if the peer breaks the protocol; the session is over then.
    """

    def __init__(
        self, state: RunState, rng: random.Random, now: float, *, is_initiator: bool, with_beats: bool = False
    ) -> None:
        """``now``: Unix seconds. ``with_beats``: only the initiator sets it."""
        state.expire(now)
        self.is_initiator = is_initiator
        self.is_done = False
        self.peer_now: int | None = None
        """The peer's clock at its Hello, Unix seconds."""
        self._state = state
        self._rng = rng
        self._with_beats = with_beats
        self._expected: tuple[type[Frame], ...] = (SyncHello,)
        self._parser = FrameParser(MAX_FRAME_BYTES)
        self._out = bytearray()
        self._num_sent = self._num_received = 0
        self._root = state.root
        self._hello = SyncHello(VERSION, state.run_id, max(0, int(now)), self._root, with_beats)
        self._refs: dict[bytes, AuthorRefs] = {}  # the initiator's
        self._covered: set[int] = set()
        self._lacking: dict[bytes, frozenset[int]] = {}
        self._beats_seen: dict[bytes, int] = {}

    def start(self) -> bytes:
        """Return the initiator's first bytes."""
        if not self.is_initiator or self._num_sent:
            raise LocalProtocolError("only the initiator starts, and once")
        self._send(self._hello)
        return self._take_output()

    def receive_data(self, data: bytes) -> tuple[list[Delta], bytes]:
        """Take bytes from the stream; return deltas to merge, and bytes to send back."""
        deltas: list[Delta] = []
        self._num_received += len(data)
        if self._num_received > MAX_SENT_BYTES + MAX_FRAME_BYTES:
            raise RemoteProtocolError("more bytes than a session of anti-entropy has")
        self._parser.receive_data(data)
        while (raw := self._parser.next_frame()) is not None:
            frame = decode_frame(raw)
            self._handle(frame)
            if isinstance(frame, DeltaFrame):
                deltas.append(frame.delta)
        if self.is_done and self._parser.buffered:
            raise RemoteProtocolError("bytes after the end of the session")
        return deltas, self._take_output()

    # frames in and out

    def _send(self, frame: Frame) -> None:
        raw = encode_frame(frame)
        self._num_sent += len(raw)
        self._out += raw

    def _take_output(self) -> bytes:
        out = bytes(self._out)
        self._out.clear()
        return out

    def _handle(self, frame: Frame) -> None:
        if self.is_done or not isinstance(frame, self._expected):
            raise RemoteProtocolError(f"{type(frame).__name__} out of turn")
        match frame:
            case SyncHello():
                self._on_hello(frame)
            case Buckets(digests):
                self._send_refs(digests)
                self._expected = (DeltaFrame, Wants)
            case Refs(buckets, authors, is_last):
                self._covered.update(buckets)
                self._refs.update((ref.author, ref) for ref in authors)
                if is_last:
                    self._answer()
            case DeltaFrame(delta) if self.is_initiator and self._with_beats:
                # merged or not, heartbeats that came from the peer are not sent back to it
                for signed in delta.entries:
                    with contextlib.suppress(RemoteProtocolError):  # merging raises it too
                        entry = self._state.checker.parse(signed)
                        if entry.kind is Kind.BEAT:
                            self._beats_seen[entry.author] = entry.tick
            case Wants(authors, is_last):
                self._lacking.update((author, frozenset(slots)) for author, slots in authors)
                if is_last:
                    self._send_lacking()
                    self.is_done = True
            case Done():
                self.is_done = True

    # what each frame leads to

    def _on_hello(self, hello: SyncHello) -> None:
        if hello.version != VERSION:
            raise RemoteProtocolError(f"version {hello.version} of anti-entropy; this is {VERSION}")
        if hello.run_id != self._state.run_id:
            raise RemoteProtocolError("a peer of another run")
        self.peer_now = hello.now
        is_equal = hello.root == self._root
        if self.is_initiator:
            self.is_done = is_equal and not self._with_beats
            self._expected = (DeltaFrame, Wants) if is_equal else (Buckets,)
            return
        self._with_beats = hello.with_beats
        self._send(self._hello)
        if not is_equal:
            self._send(Buckets(b"".join(self._state.bucket_digests)))
            self._expected = (Refs,)
        elif self._with_beats:
            self._answer()
        else:
            self.is_done = True

    @property
    def _is_full(self) -> bool:
        return self._state.num_free <= self._state.places.capacity // FULL_SHARE

    def _send_refs(self, theirs: bytes) -> None:
        """Send references of the buckets that differ, in frames of bounded size; a bucket belongs to that of its end.

        ``theirs``: the responder's digests.
        """
        places = range(0, len(theirs), DIGEST_BYTES)
        digests = enumerate(zip(self._state.bucket_digests, places, strict=True))
        differing = [index for index, (own, at) in digests if own != theirs[at : at + DIGEST_BYTES]]
        if self._is_full:
            differing.sort(key=lambda index: (index - self._state.next_bucket) % NUM_BUCKETS)
            differing = differing[:MAX_BUCKETS_OF_FULL]
            self._state.next_bucket = differing[-1] + 1 if differing else 0
        else:
            self._rng.shuffle(differing)
        ended, authors, size, total = bytearray(), list[AuthorRefs](), 0, 0
        for bucket in differing:
            if total > MAX_REFS_BYTES:
                break
            for ref in self._state.refs([bucket]):
                cost = _AUTHOR_BYTES + len(ref.slots) * _REF_BYTES
                if size + cost > MAX_DELTA_BYTES - NUM_BUCKETS:
                    self._send(Refs(bytes(ended), tuple(authors), False))
                    ended, authors, size = bytearray(), [], 0
                authors.append(ref)
                size += cost
                total += cost
            ended.append(bucket)
        self._send(Refs(bytes(ended), tuple(authors), True))

    def _answer(self) -> None:
        """Send, as the responder, what the initiator lacks, then what the initiator should send."""
        entries: list[Signed] = []
        proofs: list[Proof] = []
        wanted: list[WantedSlots] = []
        if self._with_beats:  # first, with the oldest authors before others: they fit even if there is no room for all
            entries += [entry.signed for entry in self._state.entries(Kind.BEAT)]
        mine = {ref.author: ref for ref in self._state.refs(sorted(self._covered))}
        if self._is_full and len(self._covered) <= MAX_BUCKETS_OF_FULL:  # full as well, or nearly equal
            unknown = sorted(ref.author for ref in mine.values() if ref.author not in self._refs and not ref.is_forked)
            for author in self._rng.sample(unknown, max(0, len(unknown) - MAX_NEW_TO_FULL)):
                del mine[author]
        for author in {**mine, **self._refs}:
            nothing = AuthorRefs(author, False, ())
            theirs = self._refs.get(author, nothing)
            own_slots, their_slots = mine.get(author, nothing).by_slot(), theirs.by_slot()
            proof = self._state.proof_of(author)
            if proof is not None:
                proofs += [] if theirs.is_forked else [proof]
            elif theirs.is_forked:
                wanted.append((author, ()))
            else:
                entries += [
                    entry.signed
                    for entry in self._state.entries_of(author)
                    if entry.kind is not Kind.BEAT and _is_news((entry.tick, entry.id), their_slots.get(entry.slot))
                ]
                if slots := tuple(slot for slot, ref in their_slots.items() if _is_news(ref, own_slots.get(slot))):
                    wanted.append((author, slots))
        known = [item for item in wanted if item[0] in self._state]
        new = [item for item in wanted if item[0] not in self._state]
        wanted = known + new[: self._state.num_free]
        parts = packed(wanted, lambda item: _AUTHOR_BYTES + 3 * len(item[1]), MAX_DELTA_BYTES - NUM_BUCKETS)
        packs = [*parts] or [()]
        wants = [Wants(pack, pack is packs[-1]) for pack in packs]
        self._send_deltas(deltas_of([*proofs, *entries]), reserve=sum(len(encode_frame(part)) for part in wants))
        for part in wants:
            self._send(part)
        self._refs.clear()
        self._expected = (DeltaFrame, Done)

    def _send_deltas(self, deltas: list[Delta], reserve: int) -> None:
        """Send as many as the session's bound allows; later sessions bring the rest."""
        for delta in deltas:
            frame = DeltaFrame(delta)
            if self._num_sent + len(encode_frame(frame)) + reserve > MAX_SENT_BYTES:
                return
            self._send(frame)

    def _send_lacking(self) -> None:
        """Send, as the initiator, what the responder lacks."""
        entries: list[Signed] = []
        proofs: list[Proof] = []
        for author, wanted in self._lacking.items():
            proof = self._state.proof_of(author)
            proofs += [proof] if proof else []
            entries += [entry.signed for entry in self._state.entries_of(author) if entry.slot in wanted]
        if self._with_beats:
            beats = self._state.entries(Kind.BEAT)
            entries += [beat.signed for beat in beats if beat.tick > self._beats_seen.get(beat.author, -1)]
        self._send_deltas(deltas_of([*proofs, *entries]), reserve=64)
        self._send(Done())


def _is_news(ref: tuple[int, bytes], known: tuple[int, bytes] | None) -> bool:
    """Return whether a reference is newer, or has the same tick and another id (a fork, which both must see)."""
    return known is None or ref[0] > known[0] or (ref[0] == known[0] and ref[1] != known[1])
