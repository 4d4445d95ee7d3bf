"""The run state: a node's knowledge of its run, a CRDT of signed, expiring, single-writer registers.

    RunState = author -> {(kind, index) -> newest entry}  or  FORKED, with the proof

A node writes under its own key only, so there are no concurrent writers of one value to reconcile: the larger tick
wins. An author that signs two entries for one slot and tick has forked, which the two signatures prove to every node;
a proof masks its author everywhere. So merging is a join (commutative, associative, idempotent), and only its author
can alter, delete or roll back an entry. Entries expire by their own tick, a newer one never before an older, so there
are no tombstones. Text CRDTs (pycrdt, loro, automerge) were tried and trust their peers: one spoofed client id left two
of their replicas different for ever.

Authors and proofs have tables of a fixed size each. The above is exactly true only while neither is full: in a full
one, `farandole.protocol.state.author_places` decides which authors are kept, by the peers that introduced them.

Equal states have equal roots: a hash over 256 buckets of authors, updated lazily. Heartbeats are not part of it.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from ..run.invitations import InvitationError, RevokedError, SeatTakenError, UnwitnessedError, decode_admission
from ..run.roster import Roster
from ..wire.bounds import PeerMeters, TokenBucket
from ..wire.errors import RemoteProtocolError
from ..wire.identity import peer_id_of, with_name
from ..wire.messagepack import encode
from .author_places import AuthorPlaces, Introducer
from .entries import (
    ID_BYTES,
    MAX_SLOTS,
    MAX_TICK,
    PROOF_TTL,
    RULES,
    Checker,
    Delta,
    Entry,
    Key,
    Kind,
    Member,
    Payload,
    Progress,
    Proof,
    Signed,
    slot_of,
)

MAX_AUTHORS = 4_096
"""With at most 50 KB an author this bounds a state to 205 MB under attack; an honest author takes 0.6 KB."""
MAX_PROOFS = 1_024
"""Proofs of forks: 0.6 MB. A run has few, each the end of a key. A forgotten fork is found again if it still matters,
because its author's two entries then meet."""
NEWCOMER_BURST = 128
"""New authors that one peer may bring unasked at once: more than join between two syncs with others."""
NEWCOMER_RATE = 5.0
"""New authors a second that one peer may bring; 300 a minute. This node's own syncs ask for the deferred ones."""
NUM_BUCKETS = 256
DIGEST_BYTES = 16
_EMPTY_DIGEST = hashlib.sha256().digest()[:DIGEST_BYTES]
MAX_AHEAD = 60.0
"""Seconds: an entry further in the future is deferred (not stored, offered again by a later sync), not invalid."""
AUTHOR_BURST = 64
"""Entries of one author at once: more than it has slots for (54). Its ticks alone would let an author write 14,400
leases of the last hour in one go."""
AUTHOR_RATE = 4.0
"""Entries per second and author; an honest author writes a heartbeat a second at most, and little else."""
_LEAST_BEAT_TTL = float(RULES[Kind.BEAT].ttl)

PayloadType = TypeVar("PayloadType", bound=Payload)
_BEAT = Kind.BEAT  # looked up millions of times
_KIND_OF: dict[type[Payload], Kind] = {rule.payload: kind for kind, rule in RULES.items()}


class Outcome(enum.Enum):
    """The outcome of one item of a merge."""

    NEW = "new"
    KNOWN = "known"
    OLD = "old"  # a newer entry is in the slot
    MASKED = "masked"  # its author has forked
    DEFERRED = "deferred"  # too far in the future, or too many at once: welcome later
    EXPIRED = "expired"
    UNINVITED = "uninvited"  # its author is no member, as far as this node knows
    CROWDED = "crowded"  # the table is full, and every other has precedence
    INVALID = "invalid"  # no honest node can have accepted it


@dataclass(slots=True)
class MergeReport:
    """The results of a merge; `new` and `proofs` may be unknown to others yet."""

    introducer: Introducer | None = None
    """The peer that sent it; None: this node, or its disk."""
    is_asked: bool = True
    """Whether this node had asked for it."""
    new: list[Entry] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    """The outcome of each item, proofs first."""
    faults: list[str] = field(default_factory=list)
    """Why items were invalid: each is a fault of the sender."""
    displacing: dict[bytes, None] = field(default_factory=dict)
    """Authors that are new here, each in the place of another one, in the order in which they came."""
    num_too_many: int = 0
    """Authors that are new here, and that the peer brought faster than it may: refused, or not passed on."""


_Ref = tuple[
    Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)],
    Annotated[int, msgspec.Meta(ge=0, le=MAX_TICK)],
    Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)],
]
"""An entry's slot, tick and id."""


class AuthorRefs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """References to one author's entries, without the contents; as anti-entropy sends them."""

    author: Key
    is_forked: bool
    slots: Annotated[tuple[_Ref, ...], msgspec.Meta(max_length=MAX_SLOTS)]
    """Heartbeats are left out."""

    def by_slot(self) -> dict[int, tuple[int, bytes]]:
        """Return slot -> (tick, id)."""
        return {slot: (tick, entry_id) for slot, tick, entry_id in self.slots}


class _Author:
    """The record of one author."""

    __slots__ = ("bucket", "digest", "expires_at", "fork", "key", "meter", "slots")

    def __init__(self, key: bytes, bucket: int, now: float) -> None:
        self.key = key
        self.bucket = bucket
        self.slots: dict[int, Entry] = {}
        self.fork: Proof | None = None
        self.expires_at = float("inf")  # not later than the first of its entries
        self.digest: bytes | None = None
        self.meter = TokenBucket(AUTHOR_BURST, AUTHOR_RATE, now)

    def refs(self) -> AuthorRefs:
        entries = self.slots.items()
        slots = tuple((slot, entry.tick, entry.id) for slot, entry in entries if entry.kind is not _BEAT)
        return AuthorRefs(self.key, self.fork is not None, slots)

    def compute_digest(self) -> bytes:
        """Return a hash over everything except heartbeats; empty if there is nothing else."""
        if self.fork is not None:
            return hashlib.sha256(self.key + b"forked").digest()
        slots = self.refs().slots
        refs = sorted(slot.to_bytes(2, "big") + tick.to_bytes(5, "big") + entry_id for slot, tick, entry_id in slots)
        return hashlib.sha256(self.key + b"".join(refs)).digest() if refs else b""


class RunState:
    """The run state of one node (see the module). ``now`` is Unix seconds by this node's clock, in every method."""

    def __init__(
        self,
        run_id: bytes,
        creator: bytes,
        *,
        checker: Checker | None = None,
        roster: Roster | None = None,
        max_authors: int = MAX_AUTHORS,
    ) -> None:
        """``roster``: the run's members; None: the run is open. ``checker``: for simulations, which share its work."""
        self.run_id = run_id
        self.creator = creator
        self.checker = checker or Checker(run_id, creator)
        self.roster = roster
        self.beat_ttl = _LEAST_BEAT_TTL
        """Seconds; raised by `fit_beat_ttl` in large runs, where heartbeats are far apart."""
        self.dirty: set[bytes] = set()
        """Authors whose stored form (`export`) has changed since `take_dirty`."""
        self.places = AuthorPlaces(max_authors)
        """The places of authors that have not forked."""
        self.places.protect(lambda author: author == creator)
        self._newcomer_meters = PeerMeters(NEWCOMER_BURST, NEWCOMER_RATE)
        self._authors: dict[bytes, _Author] = {}
        self._proofs: dict[bytes, bool] = {}
        """Forked authors, the oldest proof first -> whether they had a place when they forked."""
        self._buckets: list[dict[bytes, _Author]] = [{} for _ in range(NUM_BUCKETS)]
        self.next_bucket = 0
        """Where the next session of anti-entropy goes on to compare, if it cannot compare all."""
        self._bucket_digests: list[bytes | None] = [_EMPTY_DIGEST] * NUM_BUCKETS
        self._root: bytes | None = None
        self._next_expiry = float("inf")
        self._latest = 0.0  # no entry was written later
        self._has_roster_changed = False

    # merging

    def merge(
        self, delta: Delta, now: float, introducer: Introducer | None = None, *, is_asked: bool = True
    ) -> MergeReport:
        """Merge a delta from a peer (``introducer``), or from this node or its disk (None).

        ``is_asked``: this node has asked for it; else the peer may bring few new authors at a time. Never raises for
        the contents of the delta.
        """
        report = MergeReport(introducer, is_asked)
        items: list[Proof | Signed] = [*delta.proofs, *delta.entries]
        report.outcomes = [self._merge_item(item, now, report) for item in items]
        if self._has_roster_changed:
            self._follow_roster(report)
            for place, item in enumerate(items):
                if report.outcomes[place] is Outcome.UNINVITED:  # its author's admission may have come after it
                    report.outcomes[place] = self._merge_item(item, now, report)
            self._follow_roster(report)
        return report

    def _merge_item(self, item: Proof | Signed, now: float, report: MergeReport) -> Outcome:
        try:
            if isinstance(item, Signed):
                return self._merge_entry(item, now, report)
            return self._merge_proof(item, now, report)
        except RemoteProtocolError as error:
            report.faults.append(str(error))
            return Outcome.INVALID

    def _merge_entry(self, signed: Signed, now: float, report: MergeReport) -> Outcome:
        """Parse an entry, check whether it matters, verify, meter and apply it: the cheapest checks first."""
        entry = self.checker.parse(signed)
        record = self._authors.get(entry.author)
        if record is not None and record.fork is not None:
            return Outcome.MASKED
        present = None if record is None else record.slots.get(entry.slot)
        if present is not None and entry.id == present.id:
            return Outcome.KNOWN
        if present is not None and entry.tick < present.tick:
            return Outcome.OLD
        if entry.written_at > now + MAX_AHEAD:
            return Outcome.DEFERRED
        if self._expiry(entry) <= now:
            return Outcome.EXPIRED
        if not self._is_invited(entry):
            return Outcome.UNINVITED
        if record is None and (refusal := self._refusal(entry.author, now, report)) is not None:
            return refusal
        if not self.checker.is_genuine(entry):
            raise RemoteProtocolError("not a valid entry: its signature")
        if record is None:
            if self.places.is_full and (rival := self.places.rival(entry.author, report.introducer)) is not None:
                self._drop(self._authors[rival])
                report.displacing[entry.author] = None
            self.places.add(entry.author, report.introducer)
            record = self._record(entry.author, now)
        if present is not None and entry.tick == present.tick:
            a, b = sorted((present, entry), key=lambda side: side.id)
            self._mask(record, Proof(a.signed, b.signed), entry.written_at, report)
            return Outcome.MASKED
        if not record.meter.take(now):
            return Outcome.DEFERRED
        record.slots[entry.slot] = entry
        self._latest = max(self._latest, entry.written_at)
        record.expires_at = min(record.expires_at, self._expiry(entry))
        self._next_expiry = min(self._next_expiry, record.expires_at)
        if entry.kind is not _BEAT:
            self._touch(record)
        self._has_roster_changed |= entry.kind is Kind.REVOCATION
        report.new.append(entry)
        return Outcome.NEW

    def _merge_proof(self, proof: Proof, now: float, report: MergeReport) -> Outcome:
        author = proof.a.author
        record = self._authors.get(author)
        if record is not None and record.fork is not None:
            return Outcome.KNOWN
        if self.roster is not None and not self.roster.is_member(author):
            return Outcome.UNINVITED
        if record is None and len(self._proofs) >= MAX_PROOFS:
            return Outcome.CROWDED
        if record is None and not self._may_bring_another(now, report):
            return Outcome.DEFERRED
        a, _ = self.checker.check_proof(proof)
        if a.written_at + PROOF_TTL <= now:
            return Outcome.EXPIRED
        self._mask(record or self._record(author, now), proof, a.written_at, report)
        return Outcome.NEW

    def _mask(self, record: _Author, proof: Proof, written_at: float, report: MergeReport) -> None:
        """Mask an author that has forked: drop its entries, and accept none until the proof expires.

        Its place becomes free. In a full table of proofs its proof replaces another, preferably one of an author that
        never had a place.
        """
        if len(self._proofs) >= MAX_PROOFS:
            never_placed = (author for author, was_placed in self._proofs.items() if not was_placed)
            self._drop(self._authors[next(never_placed, next(iter(self._proofs)))])
        self._proofs[record.key] = bool(record.slots)
        self.places.remove(record.key)
        record.slots.clear()
        record.fork = proof
        record.expires_at = written_at + PROOF_TTL
        self._next_expiry = min(self._next_expiry, record.expires_at)
        self._touch(record)
        report.proofs.append(proof)
        report.new[:] = [entry for entry in report.new if entry.author != record.key]

    # membership

    def _is_invited(self, entry: Entry) -> bool:
        """Return whether an entry's author is a member, maybe by this entry; `InvitationError` if that is forged."""
        if self.roster is None:
            return True
        if entry.kind is not Kind.ADMISSION:
            return self.roster.is_member(entry.author)
        admission = decode_admission(entry.payload.admission)
        if admission.member != entry.author:
            raise InvitationError("the admission of another member")
        if not self.checker.is_genuine(entry):  # its author chooses its seat and its witness
            raise RemoteProtocolError("not a valid entry: its signature")
        try:
            self.roster.admit(admission)
        except (RevokedError, SeatTakenError, UnwitnessedError):  # others may know more than this node, or less
            return self.roster.is_member(entry.author)
        self._has_roster_changed = True
        return True

    def _follow_roster(self, report: MergeReport) -> None:
        """Drop the entries of former members."""
        if self.roster is None:
            return
        self._has_roster_changed = False
        for entry in self.entries_of(self.creator):
            if entry.kind is Kind.REVOCATION:
                said = frozenset(entry.payload.keys), frozenset(entry.payload.readmitted)
                self.roster.hear_creator(entry.index, entry.tick, *said)
        gone = [record for author, record in self._authors.items() if not self.roster.is_member(author)]
        for record in gone:
            self._drop(record)
        authors = {record.key for record in gone}
        report.new[:] = [entry for entry in report.new if entry.author not in authors]

    def _refusal(self, author: bytes, now: float, report: MergeReport) -> Outcome | None:
        """Return why a new author is refused; None if it is admitted."""
        is_needed = self.places.is_needed(author)
        if not (is_needed or self._may_bring_another(now, report)):
            report.num_too_many += 1
            return Outcome.DEFERRED
        if not self.places.is_full:
            return None
        # Authors from a session are not news: its sender would count as the introducer of authors that others made up.
        is_news = is_needed or not report.is_asked or report.introducer is None
        return None if is_news and self.places.rival(author, report.introducer) is not None else Outcome.CROWDED

    def _may_bring_another(self, now: float, report: MergeReport) -> bool:
        """Return whether the peer may bring a new author or another's proof, which counts even if it is refused."""
        if report.is_asked or report.introducer is None:
            return True
        return self._newcomer_meters.of(report.introducer.peer, now).take(now)

    def _record(self, author: bytes, now: float) -> _Author:
        record = _Author(author, hashlib.sha256(author).digest()[0], now)  # by hash, as keys can be ground
        self._authors[author] = self._buckets[record.bucket][author] = record
        return record

    def _drop(self, record: _Author) -> None:
        self._touch(record)
        self.places.remove(record.key)
        self._proofs.pop(record.key, None)
        del self._authors[record.key], self._buckets[record.bucket][record.key]

    @property
    def num_free(self) -> int:
        """Return how many further authors there is room for; if none, this state need not become equal to others."""
        return 0 if len(self._proofs) >= MAX_PROOFS else max(self.places.capacity - len(self.places), 0)

    # expiry

    def _expiry(self, entry: Entry) -> float:
        return entry.written_at + self.beat_ttl if entry.kind is _BEAT else entry.expires_at

    def fit_beat_ttl(self, silence: float) -> None:
        """Keep heartbeats for 30 s longer than the ``silence`` (3T, seconds) after which a peer counts as dead."""
        self.beat_ttl = max(_LEAST_BEAT_TTL, silence + 30.0)

    def expire(self, now: float) -> list[Entry]:
        """Drop expired entries and return them. Cheap when there are none.

        Entries that are too far in the future since this node's clock was set back are dropped as well: they would be
        deferred if they came now, and while they are kept no present entry can take their place.
        """
        if now < self._next_expiry and self._latest <= now + MAX_AHEAD:
            return []
        gone: list[Entry] = []
        is_ahead = self._latest > now + MAX_AHEAD
        for record in [record for record in self._authors.values() if is_ahead or record.expires_at <= now]:
            held = record.slots.values()
            expired = [entry for entry in held if self._expiry(entry) <= now or entry.written_at > now + MAX_AHEAD]
            for entry in expired:
                del record.slots[entry.slot]
            gone += expired
            if record.fork is not None:
                if record.expires_at <= now:
                    self._drop(record)
                continue
            if any(entry.kind is not _BEAT for entry in expired):
                self._touch(record)
            record.expires_at = min(map(self._expiry, record.slots.values()), default=float("inf"))
            if not record.slots:
                self._drop(record)
        self._next_expiry = min((record.expires_at for record in self._authors.values()), default=float("inf"))
        if is_ahead:
            self._latest = max((entry.written_at for entry in self), default=0.0)
        return gone

    # digests

    def _touch(self, record: _Author) -> None:
        record.digest = self._bucket_digests[record.bucket] = self._root = None
        self.dirty.add(record.key)

    @property
    def bucket_digests(self) -> list[bytes]:
        """Return 256 x 16 bytes: SHA-256 over each bucket's sorted authors; XOR or sums could be cancelled."""
        for index, known in enumerate(self._bucket_digests):
            if known is None:
                records = [record for _, record in sorted(self._buckets[index].items())]
                for record in records:
                    record.digest = record.compute_digest() if record.digest is None else record.digest
                digests = b"".join(record.digest or b"" for record in records)
                self._bucket_digests[index] = hashlib.sha256(digests).digest()[:DIGEST_BYTES]
        return [digest for digest in self._bucket_digests if digest is not None]

    @property
    def root(self) -> bytes:
        """Return 32 bytes; equal on two nodes exactly when their states are (heartbeats apart)."""
        if self._root is None:
            self._root = hashlib.sha256(b"".join(self.bucket_digests)).digest()
        return self._root

    def refs(self, buckets: Iterable[int]) -> list[AuthorRefs]:
        """Return the references in these buckets, author by author."""
        refs = [record.refs() for index in buckets for record in self._buckets[index].values()]
        return [ref for ref in refs if ref.is_forked or ref.slots]

    # questions

    def __len__(self) -> int:
        """Return the number of entries, heartbeats included."""
        return sum(len(record.slots) for record in self._authors.values())

    def __contains__(self, author: bytes) -> bool:
        """Return whether there is an entry of an author, or the proof of a fork."""
        return author in self._authors

    def __iter__(self) -> Iterator[Entry]:
        """Yield every entry, in no particular order."""
        for record in self._authors.values():
            yield from record.slots.values()

    @property
    def authors(self) -> list[bytes]:
        """Return all authors with an entry, or the proof of a fork."""
        return list(self._authors)

    def entries(self, kind: Kind) -> Iterator[Entry]:
        """Yield all entries of a kind that this node can read."""
        return (entry for entry in self if entry.kind is kind and entry.payload is not None)

    def entries_of(self, author: bytes) -> list[Entry]:
        """Return all entries of an author; none if it has forked."""
        record = self._authors.get(author)
        return list(record.slots.values()) if record else []

    def get(self, author: bytes, kind: Kind, index: int = 0) -> Entry | None:
        """Return the newest entry of a slot."""
        record = self._authors.get(author)
        return record.slots.get(slot_of(kind, index)) if record else None

    def payload(self, author: bytes, payload_type: type[PayloadType], index: int = 0) -> PayloadType | None:
        """Return an author's newest payload of a type, for example ``state.payload(peer, Member)``."""
        entry = self.get(author, _KIND_OF[payload_type], index)
        return entry.payload if entry is not None else None

    def proof_of(self, author: bytes) -> Proof | None:
        """Return the proof that an author has forked, if it has."""
        record = self._authors.get(author)
        return record.fork if record else None

    def members(self) -> dict[bytes, Member]:
        """Return the members that have not left the run; `Liveness` knows whether they are live."""
        found = ((author, self.payload(author, Member)) for author in self._authors)
        return {author: member for author, member in found if member is not None and not member.left}

    def is_member(self, author: bytes) -> bool:
        """Return whether an author is a member that has not left the run."""
        member = self.payload(author, Member)
        return member is not None and not member.left

    def called(self, author: bytes) -> str:
        """Return the end of a peer's id, with the name that it gives itself."""
        member = self.payload(author, Member)
        return with_name(peer_id_of(author), "" if member is None else member.name)

    def total_progress(self) -> Progress:
        """Return the run's counters: the sum over all authors of the last week, including ones that have left."""
        parts = [entry.payload for entry in self.entries(Kind.PROGRESS)]
        return Progress(*(sum(getattr(part, name) for part in parts) for name in Progress.__struct_fields__))

    # storage

    def take_dirty(self) -> dict[bytes, bytes | None]:
        """Return the authors changed since the last call -> their stored form (an encoded `Delta`); None: dropped."""
        dirty, self.dirty = self.dirty, set()
        return {author: self.export(author) for author in dirty}

    def export(self, author: bytes) -> bytes | None:
        """Encode an author's entries without heartbeats, and its proof, to merge them later; None if there are none."""
        record = self._authors.get(author)
        if record is None:
            return None
        entries = tuple(entry.signed for entry in record.slots.values() if entry.kind is not _BEAT)
        proofs = (record.fork,) if record.fork is not None else ()
        return encode(Delta(entries, proofs)) if entries or proofs else None
