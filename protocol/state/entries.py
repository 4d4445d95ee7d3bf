"""Entries: what nodes of a run publish to each other, signed, each in a slot that only its author can write.

`RULES` holds the kinds of entry with their slots, quanta, lifetimes and sizes. An entry is sent as `Signed`; its body
is parsed once and kept as it was received, never encoded again. Whether an item is *valid* depends only on the item and
on the run, so every node decides the same, whatever else it knows: `Checker` decides it.

Releases must decide the same too, or a newer node would blame an older one for what that one passes on. So a later
release changes entries in two ways only. It appends fields to a payload: older nodes skip them, and an appended field
that no schema fits counts as missing (`Rule.checked`). And it takes a kind from `LATER_KINDS`, whose limits are fixed
now: older nodes keep and pass on such entries unread. The signed bytes travel whole, so nothing is lost on the way.
"""

from __future__ import annotations

import enum
import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

import msgspec

from ..run.invitations import MAX_ADMISSION_BYTES
from ..wire.errors import RemoteProtocolError
from ..wire.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, is_signed_by
from ..wire.messagepack import DECODING_ERRORS, PRINTABLE, MessageDecoder, encode

DOMAIN = b"farandole/entry/1"
ID_BYTES = 16
MAX_BODY_BYTES = 640
"""At most 592 bytes of payload and 15 bytes around them, with room to spare."""
MAX_COMMITMENT_BYTES = 272
MAX_COMMITMENT_BODY_BYTES = MAX_COMMITMENT_BYTES + 16
"""An accusation, of at most 512 bytes, contains a whole commitment."""
MAX_TICK = 2**40 - 1

# msgspec's Meta: checked while decoding, before anything is kept
Key = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
SignatureField = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**56)]
"""A counter that only grows: steps, tokens, bytes. The sum over all authors stays below 2**63 x 2."""
Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
PARTNER_BYTES = 8
MAX_MEMBER_ADDRESS_CHARS = 192
"""The longest multiaddr in a member's entry. A relayed one takes 85 characters besides its relay's host name."""
_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MEMBER_ADDRESS_CHARS, pattern=r"\A/[\x21-\x7e]*\Z")]
MAX_NAME_CHARS = 32
"""With 8 short addresses, or two of the longest, the longest name fits in a payload of 512 bytes."""
MAX_SUSPECTS = 48
"""The number of 8-byte prefixes that a payload of 512 bytes holds."""
REVOKED_PER_ENTRY = 14
"""The number of 32-byte keys, revoked and readmitted together, that a payload of 512 bytes holds."""
MAX_NOTES = 8
"""The notes of all programs of one author."""
MAX_NOTE_BYTES = 448
"""One note with a name of 48 characters fits in a payload of 512 bytes."""
NoteName = Annotated[str, msgspec.Meta(min_length=1, max_length=48, pattern=r"\A[0-9A-Za-z._/-]*\Z")]
"""A name that programs choose, of a note or of a protocol of theirs."""
KeyPrefix = Annotated[bytes, msgspec.Meta(max_length=PARTNER_BYTES)]
"""The first bytes of a public key: enough to distinguish a run's members, too few to prove anything."""
LossMicros = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A loss in millionths of a nat: whole numbers, so that every node computes the same from it."""


class Kind(enum.IntEnum):
    """The kinds of entry; the numbers are on the wire. A new one takes its number from `LATER_KINDS`."""

    MEMBER = 1
    BEAT = 2
    PROGRESS = 3
    LEASE = 4
    CHECKPOINT = 5
    SUSPECTS = 6
    NOTICE = 9  # 7 and 8 were kinds that no node read
    STAGE_LEASE = 10
    ADMISSION = 11
    REVOCATION = 12
    COMMITMENT = 16
    ACCUSATION = 17
    NOTES = 18


def shown_name(name: str) -> str:
    """Return a member's name as every node shows it: unchanged, or empty if it could pass for something else.

    It has one line of at most `MAX_NAME_CHARS` characters. `str.isprintable` refuses controls, ends of lines, and what
    is invisible or turns the direction of text; a quote would end the quotes around a name; a pile of accents would
    cover the lines above.
    """
    marks = "".join("^" if unicodedata.category(letter).startswith("M") else "." for letter in name)
    is_plain = len(name) <= MAX_NAME_CHARS and name.isprintable() and name.strip() == name and '"' not in name
    return name if is_plain and not marks.startswith("^") and "^^^^" not in marks else ""


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """The content of an entry; one type for each kind. A later release may append fields, which have defaults."""


class Member(Payload, frozen=True):
    """Membership of the run: the author's stage, its hardware, and its addresses."""

    stage: Annotated[int, msgspec.Meta(ge=0, le=511)] = 0
    device: Annotated[str, msgspec.Meta(max_length=48, pattern=PRINTABLE)] = ""
    memory: Count = 0
    """The device's memory in bytes."""
    speed: Count = 0
    """Tokens per second, as measured by its author; no node relies on it."""
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=8)] = ()
    """Multiaddrs, best first; ``/p2p/<author>`` at the end may be left out."""
    left: bool = False
    """Whether the author has left; others no longer wait for its heartbeats."""
    incarnation: Count = 0
    """Distinguishes a restarted node from its earlier process."""
    is_bound: bool = False
    """Whether the author keeps its stage, whatever the run needs: others do not wait for it to move. Older entries end
    before this field."""
    is_paused: bool = False
    """Whether the author has no trainer for now: no node averages with it, or sends it microbatches. Older entries end
    before this field."""
    version: Annotated[str, msgspec.Meta(max_length=32, pattern=r"\A[0-9A-Za-z.+!-]*\Z")] = ""
    """The author's release of farandole, as it says; empty: an older entry. It is only shown."""
    name: str = ""
    """The name that the author gives itself; empty: none, an older entry, or one that `shown_name` refuses. It is only
    shown, in quotes and after the author's id: a liar gains another's name, never its id."""

    def __post_init__(self) -> None:
        """Clear a name that must not be shown; an entry with one stays valid, as older releases pass it on."""
        msgspec.structs.force_setattr(self, "name", shown_name(self.name))


class Beat(Payload, frozen=True):
    """A heartbeat, with the author's progress."""

    inner_steps: Count
    round: Small
    loss: LossMicros | None
    tokens_per_second: Count
    partner: KeyPrefix = b""
    """The peer that the author averaged with in its last round; empty: no peer, or an older entry."""


class Progress(Payload, frozen=True):
    """The author's part of counters that only grow; a run's total is the sum over its authors."""

    inner_steps: Count
    rounds: Small
    tokens: Count
    bytes_sent: Count
    bytes_received: Count


class LeasedSlices(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive slices of the data; the author has trained on the first ``done`` of them. It has no later fields:
    what a release adds is appended to `Lease`.
    """

    first: Small
    count: Small
    done: Small = 0


class Lease(Payload, frozen=True):
    """Slot 0: the slices of the data that the author leases. Other slots: sections of the epoch known to be done."""

    epoch: Small
    corpus: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """Hash of the author's text: slices of another text are other slices."""
    leases: Annotated[tuple[LeasedSlices, ...], msgspec.Meta(max_length=8)] = ()
    """Leases in the order in which they are taken; only in slot 0."""
    done: Annotated[bytes, msgspec.Meta(max_length=192)] = b""
    """A bit for each section (`farandole.protocol.epochs.leases`), the least significant of the first byte first."""


class CheckpointNotice(Payload, frozen=True):
    """The author holds this checkpoint, or a copy of it."""

    round: Small
    stage: Annotated[int, msgspec.Meta(ge=0, le=511)]
    id: Sha256
    """`farandole.protocol.checkpoints.blocks.SignedIndex.id`."""
    size: Count
    total_tokens: Count
    inner_steps: Count


class Suspects(Payload, frozen=True):
    """The peers whose contributions the author now finds suspect (`farandole.protocol.state.believing`)."""

    peers: Annotated[tuple[KeyPrefix, ...], msgspec.Meta(max_length=MAX_SUSPECTS)]


class Notice(Payload, frozen=True):
    """A command or message from the run's creator to all members."""

    action: Literal["pause", "resume", "stop", "say"]
    """Slot 0: the command that holds from now on. Slot 1: ``say``, only a message."""
    text: Annotated[str, msgspec.Meta(max_length=256, pattern=PRINTABLE)] = ""


class StageLease(Payload, frozen=True):
    """A lease to move between stages; until it ends no other node may leave ``source`` or go to ``target``."""

    source: Annotated[int, msgspec.Meta(ge=0, le=511)]
    target: Annotated[int, msgspec.Meta(ge=0, le=511)]
    """The same as ``source``: the author has released the lease."""
    is_settled: bool = False
    """Whether the author moves now: it has waited for others' leases, and none was before its own."""


class AdmissionProof(Payload, frozen=True):
    """The proof that the author was admitted to a run of invited members."""

    admission: Annotated[bytes, msgspec.Meta(max_length=MAX_ADMISSION_BYTES)]
    """`farandole.protocol.run.invitations.Admission`, encoded."""


class Revocation(Payload, frozen=True):
    """The creator's last word: it revokes some members with the ones that they invited, and readmits others."""

    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=REVOKED_PER_ENTRY)]
    """Keys of members, or of bearers, whose invites become invalid."""
    readmitted: Annotated[tuple[Key, ...], msgspec.Meta(max_length=REVOKED_PER_ENTRY)] = ()
    """Members that stay although their invite was revoked, or their seat is another's."""


class Commitment(Payload, frozen=True):
    """The author's training in one round, which an auditor replays and compares. Its slot: the round modulo the slots.

    The batches follow from the run, the author, ``first_step`` and ``steps`` (`farandole.training.data.dataset`).
    """

    round: Small
    start: Sha256
    """Id of the checkpoint (`protocol.checkpoints.blocks.SignedIndex.id`) of the state before the first inner step."""
    first_step: Count
    steps: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    begun_at: Count
    """Inner step at which AdamW's means began, and from which the ramp of the learning rate counts."""
    microbatch: Annotated[int, msgspec.Meta(ge=0, le=65_536)]
    fragment: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    end: Sha256
    """BLAKE3 of AdamW's means after the last inner step, before the outer step, which does not change them."""
    contribution: Sha256
    """BLAKE3 of the contribution: the weights after the last inner step, by the run's rule and codec."""
    corpus: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """Hash of the author's text."""
    build: Annotated[str, msgspec.Meta(max_length=48, pattern=PRINTABLE)]
    """Releases of farandole and PyTorch."""
    device: Annotated[str, msgspec.Meta(max_length=48, pattern=PRINTABLE)]
    """Class of the processor (`farandole.training.base.determinism.device_class`)."""


class ProgramNotes(Payload, frozen=True):
    """Short notes of programs of the author's owner (`protocol.programs`): name and value."""

    notes: Annotated[
        tuple[tuple[NoteName, Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]], ...],
        msgspec.Meta(max_length=MAX_NOTES),
    ] = ()


class Accusation(Payload, frozen=True):
    """A signed commitment that the accuser replayed twice with another result. Others replay it themselves."""

    author: Key
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_COMMITMENT_BODY_BYTES)]
    """Body of the `Signed` entry with the `Commitment`; its signature is the next field."""
    signature: SignatureField


@dataclass(frozen=True, slots=True)
class Rule:
    """The limits of a kind of entry."""

    payload: type[Payload]
    slots: int
    """Entries of this kind that an author has at once: the key space is finite by construction."""
    quantum: int
    """Seconds per tick."""
    ttl: int
    """Seconds from the start of an entry's tick to its expiry; the author cannot choose it."""
    max_bytes: int
    """Most bytes of the payload."""
    checked: int
    """Fields of the payload that every release checks, with the same bounds. A fault in a later one makes no entry
    invalid: nodes that do not know the field pass it on, and are not to blame."""


_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400

RULES: dict[Kind, Rule] = {
    # BEAT's quantum is one second, so nodes of small runs can beat every two seconds and miss a dead node within ten.
    Kind.MEMBER: Rule(Member, slots=1, quantum=5, ttl=_HOUR, max_bytes=512, checked=9),
    Kind.BEAT: Rule(Beat, slots=1, quantum=1, ttl=2 * _MINUTE, max_bytes=64, checked=5),
    Kind.PROGRESS: Rule(Progress, slots=1, quantum=60, ttl=7 * _DAY, max_bytes=64, checked=5),
    Kind.LEASE: Rule(Lease, slots=8, quantum=2, ttl=_HOUR, max_bytes=256, checked=4),
    Kind.CHECKPOINT: Rule(CheckpointNotice, slots=4, quantum=10, ttl=_DAY, max_bytes=256, checked=6),
    Kind.SUSPECTS: Rule(Suspects, slots=1, quantum=5, ttl=_HOUR, max_bytes=512, checked=1),
    Kind.NOTICE: Rule(Notice, slots=4, quantum=10, ttl=7 * _DAY, max_bytes=512, checked=2),
    # Renewed during a move; after a node that dies during one, the lease soon expires and blocks no other node.
    Kind.STAGE_LEASE: Rule(StageLease, slots=1, quantum=1, ttl=3 * _MINUTE, max_bytes=16, checked=3),
    # Renewed daily while its author is online.
    Kind.ADMISSION: Rule(AdmissionProof, slots=1, quantum=10, ttl=21 * _DAY, max_bytes=592, checked=1),
    # For as long as any run lasts, whether the creator's node is on or not.
    Kind.REVOCATION: Rule(Revocation, slots=8, quantum=10, ttl=3_650 * _DAY, max_bytes=512, checked=2),
    # The last four rounds, which is how long an author keeps their starts.
    Kind.COMMITMENT: Rule(Commitment, slots=4, quantum=1, ttl=_HOUR, max_bytes=MAX_COMMITMENT_BYTES, checked=12),
    Kind.ACCUSATION: Rule(Accusation, slots=4, quantum=60, ttl=_DAY, max_bytes=448, checked=3),
    # The first kind that was later than a release: nodes of that one pass it on unread, so no field is checked.
    Kind.NOTES: Rule(ProgramNotes, slots=1, quantum=5, ttl=_HOUR, max_bytes=512, checked=0),
}
_SHORT_LATER = Rule(Payload, slots=1, quantum=5, ttl=_HOUR, max_bytes=512, checked=0)
_LONG_LATER = Rule(Payload, slots=4, quantum=60, ttl=7 * _DAY, max_bytes=512, checked=0)
LATER_KINDS: Final[dict[int, Rule]] = dict.fromkeys(range(19, 26), _SHORT_LATER) | dict.fromkeys((26, 27), _LONG_LATER)
"""Kinds for later releases. A kind that takes a number here keeps its limits, `checked` included, so releases agree on
which of its entries are valid, and for how long. Each reader of such a kind checks its author's rights itself. They
hold at most 8 kB an author."""
ALL_RULES: Final[dict[int, Rule]] = {**LATER_KINDS, **{int(kind): rule for kind, rule in RULES.items()}}
"""The limits of each kind, known or of a later release. There are no others."""
MAX_SLOTS = sum(rule.slots for rule in ALL_RULES.values())
PROOF_TTL = 30 * _DAY
"""A proof outlives every entry but a revocation, which counts again after it."""


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An entry in the form in which it is sent."""

    author: Key
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]
    signature: SignatureField


class Proof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Proof that an author has forked: two of its entries for one slot and tick. ``id(a) < id(b)``."""

    a: Signed
    b: Signed


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signed part of an entry: kind, slot, tick, and the payload as it was encoded by the author."""

    kind: Annotated[int, msgspec.Meta(ge=0, le=255)]
    index: Annotated[int, msgspec.Meta(ge=0, le=255)]
    tick: Annotated[int, msgspec.Meta(ge=0, le=MAX_TICK)]
    data: msgspec.Raw


class Entry(msgspec.Struct, frozen=True, eq=False):
    """A parsed entry. Its signature is checked separately: `Checker.is_genuine`."""

    author: bytes
    kind: int
    """A `Kind`, or one of `LATER_KINDS` that this release does not know."""
    index: int
    tick: int
    id: bytes
    payload: Any
    """The kind's payload; None if this release does not know the kind, or cannot read what a later one may."""
    signed: Signed
    slot: int
    """Kind and index as one number."""
    written_at: int
    """Unix seconds of the start of its tick."""
    expires_at: int
    """Unix seconds; a newer entry of a slot never expires before an older one."""


def make_entry(kind: int, index: int, tick: int, payload: Payload | None, signed: Signed) -> Entry:
    """Return an entry with the values that follow from its kind."""
    rule = ALL_RULES[kind]
    written_at = tick * rule.quantum
    return Entry(
        signed.author,
        kind,
        index,
        tick,
        entry_id(signed.author, signed.body),
        payload,
        signed,
        slot_of(kind, index),
        written_at,
        written_at + rule.ttl,
    )


def name_of(kind: int) -> str:
    """Return a kind's name, for errors."""
    return kind.name if isinstance(kind, Kind) else f"kind {kind}"


def slot_of(kind: int, index: int) -> int:
    """Return kind and index as one number."""
    return kind << 8 | index


_decode_body = msgspec.msgpack.Decoder(Body).decode
_decode_fields = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_payload_decoders: dict[int, Callable[[msgspec.Raw], Payload]] = {
    kind: msgspec.msgpack.Decoder(rule.payload).decode for kind, rule in RULES.items()
}


def entry_id(author: bytes, body: bytes) -> bytes:
    """Return an entry's id, 16 bytes; the signature is left out, so that only the author can make a second id."""
    return hashlib.sha256(author + body).digest()[:ID_BYTES]


def _read_payload(kind: int, data: msgspec.Raw, rule: Rule) -> Payload | None:
    """Decode a payload; None if its kind is unknown here. Fields that a later release appended are skipped.

    Raises one of `DECODING_ERRORS` if a field that every release checks is wrong.
    """
    decode = _payload_decoders.get(kind)
    if decode is None:
        return None
    try:
        return decode(data)
    except DECODING_ERRORS:
        if rule.checked == len(rule.payload.__struct_fields__):
            raise
    return decode(msgspec.Raw(encode(_decode_fields(data)[: rule.checked]))) if rule.checked else None


def encode_body(kind: int, index: int, tick: int, payload: Payload) -> bytes:
    """Encode the bytes that an author signs."""
    return encode(Body(kind, index, tick, msgspec.Raw(encode(payload))))


def payload_size(payload: Payload) -> int:
    """Return the bytes of an encoded payload, which `Rule.max_bytes` bounds."""
    return len(encode(payload))


def fit_member(member: Member) -> Member:
    """Return the member with as many of its first addresses as fit in its kind's bytes."""
    while payload_size(member) > RULES[Kind.MEMBER].max_bytes and member.addresses:
        member = msgspec.structs.replace(member, addresses=member.addresses[:-1])
    return member


def _refuse(problem: str, cause: Exception | None = None) -> NoReturn:
    raise RemoteProtocolError(f"not a valid entry: {problem}") from cause


class Checker:
    """A check that an item is valid in one run: a pure function of the item's bytes."""

    def __init__(self, run_id: bytes, creator: bytes) -> None:
        """``creator``: the public key that must sign a NOTICE or a REVOCATION."""
        self.run_id = run_id
        self.creator = creator

    def parse(self, signed: Signed) -> Entry:
        """Check everything but the signature; raise `RemoteProtocolError` with the problem."""
        author, raw = signed.author, signed.body
        if len(author) != PUBLIC_KEY_BYTES or len(raw) > MAX_BODY_BYTES or len(signed.signature) != SIGNATURE_BYTES:
            _refuse("a field's length")
        try:
            body = _decode_body(raw)
            kind: int = Kind(body.kind) if body.kind in RULES else body.kind
            rule = ALL_RULES.get(kind)
            if rule is None:
                _refuse(f"kind {kind}")
            if body.index >= rule.slots:
                _refuse(f"{name_of(kind)} has {rule.slots} slots, not {body.index + 1}")
            if memoryview(body.data).nbytes > rule.max_bytes:
                _refuse(f"a payload of {memoryview(body.data).nbytes} bytes; {name_of(kind)} has {rule.max_bytes}")
            payload = _read_payload(kind, body.data, rule)
        except DECODING_ERRORS as error:
            _refuse(str(error), error)
        if kind in (Kind.NOTICE, Kind.REVOCATION) and author != self.creator:
            _refuse(f"a {name_of(kind)} that is not the creator's")
        return make_entry(kind, body.index, body.tick, payload, signed)

    def is_genuine(self, entry: Entry) -> bool:
        """Return whether the author signed it for this run."""
        signed = entry.signed
        return is_signed_by(signed.author, signed.signature, DOMAIN, self.run_id, signed.body)

    def check(self, signed: Signed) -> Entry:
        """Return the entry if it is valid, signature included; otherwise raise `RemoteProtocolError`."""
        entry = self.parse(signed)
        if not self.is_genuine(entry):
            _refuse("its signature")
        return entry

    def check_proof(self, proof: Proof) -> tuple[Entry, Entry]:
        """Return both entries of a valid proof; otherwise raise `RemoteProtocolError`."""
        a, b = self.parse(proof.a), self.parse(proof.b)
        if (a.author, a.slot, a.tick) != (b.author, b.slot, b.tick) or a.id >= b.id:
            _refuse("a proof of nothing")
        if not (self.is_genuine(a) and self.is_genuine(b)):
            _refuse("a signature in a proof")
        return a, b


MAX_DELTA_BYTES = 64 * 1024
MAX_DELTA_ITEMS = 1_024
"""More than the smallest entries that fit in 64 KB."""


class Delta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Entries and proofs sent together: at most `MAX_DELTA_BYTES` if it comes from `deltas_of`."""

    entries: Annotated[tuple[Signed, ...], msgspec.Meta(max_length=MAX_DELTA_ITEMS)] = ()
    proofs: Annotated[tuple[Proof, ...], msgspec.Meta(max_length=MAX_DELTA_ITEMS)] = ()


decode_delta = MessageDecoder[Delta](Delta, "a delta", MAX_DELTA_BYTES)
"""Parse a peer's delta, without checking its items; `RemoteProtocolError` if it is too long or malformed."""


# Packing: entries and proofs in as few messages as their bound allows.
_DELTA_OVERHEAD = 16


def _wire_bytes(item: Signed | Proof) -> int:
    """Return an upper bound of an item's encoded size: an entry's three lengths and its array take at most 8 bytes."""
    if isinstance(item, Proof):
        return _wire_bytes(item.a) + _wire_bytes(item.b) + 1
    return len(item.body) + PUBLIC_KEY_BYTES + SIGNATURE_BYTES + 8


_Item = TypeVar("_Item")


def packed(items: Iterable[_Item], cost_of: Callable[[_Item], int], max_bytes: int) -> Iterator[tuple[_Item, ...]]:
    """Yield the items in their order, in groups that cost at most ``max_bytes`` each (or have a single item)."""
    pack: list[_Item] = []
    size = 0
    for item in items:
        cost = cost_of(item)
        if pack and size + cost > max_bytes:
            yield tuple(pack)
            pack, size = [], 0
        pack.append(item)
        size += cost
    if pack:
        yield tuple(pack)


def deltas_of(items: Iterable[Signed | Proof], max_bytes: int = MAX_DELTA_BYTES) -> list[Delta]:
    """Pack entries and proofs, in their order, into as few deltas as possible, each of at most ``max_bytes``."""
    return [
        Delta(tuple(i for i in pack if isinstance(i, Signed)), tuple(i for i in pack if isinstance(i, Proof)))
        for pack in packed(items, _wire_bytes, max_bytes - _DELTA_OVERHEAD)
    ]
