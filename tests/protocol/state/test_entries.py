from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.protocol.run.invitations import MAX_ADMISSION_BYTES
from farandole.protocol.state.entries import (
    MAX_BODY_BYTES,
    MAX_COMMITMENT_BODY_BYTES,
    MAX_DELTA_BYTES,
    MAX_NOTE_BYTES,
    MAX_SUSPECTS,
    REVOKED_PER_ENTRY,
    RULES,
    Accusation,
    AdmissionProof,
    Beat,
    Checker,
    CheckpointNotice,
    Commitment,
    Kind,
    Lease,
    LeasedSlices,
    Member,
    Notice,
    Payload,
    ProgramNotes,
    Progress,
    Proof,
    Revocation,
    Signed,
    StageLease,
    Suspects,
    decode_delta,
    deltas_of,
    fit_member,
    payload_size,
)
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import SMALL_ORDER_KEYS
from farandole.protocol.wire.messagepack import encode

from ..authors import CREATOR, RUN_ID, beat, flipped, member, notice, sign_body, signed

CHECKER = Checker(RUN_ID, CREATOR)
BIG = 2**56
LARGEST: dict[Kind, Payload] = {
    Kind.MEMBER: fit_member(
        Member(511, "x" * 48, BIG, BIG, ("/" + "a" * 191,) * 8, True, BIG, True, True, "1" * 32, "é" * 32)
    ),
    Kind.BEAT: Beat(BIG, 2**31 - 1, 2**31 - 1, BIG, bytes(8)),
    Kind.PROGRESS: Progress(BIG, 2**31 - 1, BIG, BIG, BIG),
    Kind.LEASE: Lease(2**31 - 1, b"c" * 8, (LeasedSlices(2**31 - 1, 2**31 - 1, 2**31 - 1),) * 2, b"d" * 192),
    Kind.CHECKPOINT: CheckpointNotice(2**31 - 1, 511, b"x" * 32, BIG, BIG, BIG),
    Kind.SUSPECTS: Suspects((bytes(8),) * MAX_SUSPECTS),
    Kind.NOTICE: Notice("resume", "t" * 256),
    Kind.STAGE_LEASE: StageLease(511, 511, True),
    Kind.ADMISSION: AdmissionProof(b"a" * MAX_ADMISSION_BYTES),
    Kind.COMMITMENT: Commitment(
        2**31 - 1, b"s" * 32, BIG, 2**31 - 1, BIG, 65_536, 65_535, b"e" * 32, b"c" * 32, b"t" * 8, "b" * 48, "d" * 48
    ),
    Kind.ACCUSATION: Accusation(b"a" * 32, bytes(MAX_COMMITMENT_BODY_BYTES), b"s" * 64),
    Kind.REVOCATION: Revocation((b"k" * 32,) * REVOKED_PER_ENTRY),
    Kind.NOTES: ProgramNotes((("n" * 48, b"v" * MAX_NOTE_BYTES),)),
}


@pytest.mark.parametrize("kind", Kind)
def test_the_largest_payload_of_each_kind_fits_and_comes_back(kind: Kind) -> None:
    rule = RULES[kind]
    item = signed(255, kind, rule.slots - 1, 2**40 - 1, LARGEST[kind])
    entry = CHECKER.check(item)
    assert (entry.kind, entry.index, entry.tick, entry.payload) == (kind, rule.slots - 1, 2**40 - 1, LARGEST[kind])
    assert payload_size(LARGEST[kind]) <= rule.max_bytes
    assert len(item.body) <= MAX_BODY_BYTES
    assert entry.expires_at == entry.tick * rule.quantum + rule.ttl


@pytest.mark.parametrize(
    ("kind", "index", "payload"),
    [
        (Kind.MEMBER, 1, Member()),  # no such slot
        (Kind.MEMBER, 0, Beat(0, 0, None, 0)),  # another kind's payload
        (Kind.MEMBER, 0, Member(device="x" * 49)),
        (Kind.MEMBER, 0, Member(device="\x1b[2J")),  # would clear a terminal
        (Kind.MEMBER, 0, Member(device="line\n")),
        (Kind.MEMBER, 0, Member(addresses=("no multiaddr",))),
        (Kind.MEMBER, 0, Member(addresses=("/ip4",) * 9)),
        (Kind.MEMBER, 0, Member(addresses=("/" + "a" * 191,) * 3)),  # each fits, together they don't
        (Kind.BEAT, 0, Beat(-1, 0, None, 0)),
        (Kind.BEAT, 0, Beat(BIG + 1, 0, None, 0)),
        (Kind.LEASE, 0, Lease(0, b"c" * 8, (LeasedSlices(0, 0),) * 9)),
        (Kind.NOTICE, 0, Notice("pause")),  # not from the creator
        (Kind.REVOCATION, 0, Revocation((bytes(32),))),
    ],
)
def test_what_no_honest_node_writes_is_refused(kind: Kind, index: int, payload: Payload) -> None:
    with pytest.raises(RemoteProtocolError):
        CHECKER.check(signed(1, kind, index, 5, payload))


SHOWN = ("Anna's PC", "Zoë", "한국 1", "ज़िं", "שלום", "w3oizdeK", "<b>[red]", "x" * 32)
NOT_SHOWN = (
    *("\x1b[2J", "two\nlines", "two\u2028lines", "\u202etxet", "\u2067txet"),  # what a terminal or a page obeys
    *("An\u200bna", "\u00a0Anna", " Anna"),  # another's name, and something that is not seen
    *('x" is gone; "Anna', "\u0301Anna", "e" + "\u0301" * 20, "x" * 33),  # out of its quotes, or of its line
    *(7, b"x", msgspec.Raw(b"\xa4\xff\xfe\xfd\xfc")),  # no text, or one that is not UTF-8
)


@pytest.mark.parametrize(("name", "shown"), [*zip(SHOWN, SHOWN, strict=True), *((name, "") for name in NOT_SHOWN)])
def test_a_name_that_could_pass_for_something_else_is_not_shown(name: object, shown: str) -> None:
    """Its entry stays valid: older releases pass it on, and are not to blame."""
    fields = [*msgspec.structs.astuple(Member(device="cpu"))[:-1], name]
    body = msgspec.msgpack.encode([Kind.MEMBER, 0, 5, fields])
    assert CHECKER.check(sign_body(1, body)).payload == Member(device="cpu", name=shown)


def test_an_unknown_kind_and_an_untyped_body_are_refused() -> None:
    for body in (
        [99, 0, 1, []],
        [8, 0, 1, []],
        [1, 0, 2**40, []],
        [1, 0, 1],
        [1, 0, 1, [], 5],
        {"kind": 1},
        "text",
        [1, 0, 1.5, []],
    ):
        with pytest.raises(RemoteProtocolError):
            CHECKER.check(sign_body(1, msgspec.msgpack.encode(body)))
    with pytest.raises(RemoteProtocolError):
        CHECKER.check(sign_body(1, b"\x91" * MAX_BODY_BYTES))  # nested too deep
    with pytest.raises(RemoteProtocolError):
        CHECKER.check(sign_body(1, member(1).body + b"\x00"))  # with trailing bytes


def test_a_signature_is_good_for_its_author_run_and_body_alone_and_keys_of_small_order_sign_nothing() -> None:
    item, other = member(1), member(2)
    CHECKER.check(item)
    for forged in (
        Signed(other.author, item.body, item.signature),
        Signed(item.author, member(1, device="gpu").body, item.signature),
        Signed(item.author, item.body, bytes(64)),
        signed(1, Kind.MEMBER, 0, 5, Member(), b"o" * 32),
    ):
        with pytest.raises(RemoteProtocolError, match="signature"):
            CHECKER.check(forged)
    constant = (1).to_bytes(32, "little") + bytes(32)
    for key in SMALL_ORDER_KEYS:
        with pytest.raises(RemoteProtocolError):
            CHECKER.check(Signed(key, member(1).body, constant))


def test_a_proof_is_two_stories_of_one_author() -> None:
    first, second = member(1, device="a"), member(1, device="b")
    a, b = sorted((first, second), key=lambda item: CHECKER.parse(item).id)
    CHECKER.check_proof(Proof(a, b))
    for no_proof in (
        Proof(b, a),
        Proof(a, a),
        Proof(a, member(2, device="b")),
        Proof(a, member(1, tick=7)),
        Proof(a, beat(1)),
        Proof(Signed(a.author, a.body, bytes(64)), b),
    ):
        with pytest.raises(RemoteProtocolError):
            CHECKER.check_proof(no_proof)


@given(st.integers(0, 3_000), st.integers(0, 40), st.integers(2_048, MAX_DELTA_BYTES))
@settings(max_examples=20)
def test_deltas_hold_everything_within_their_bound(num_entries: int, num_proofs: int, max_bytes: int) -> None:
    entries = [notice(1 + index % 5, index % 4) for index in range(num_entries)]
    proofs = [Proof(member(1, device="a"), member(1, device="b"))] * num_proofs
    deltas = deltas_of([*proofs, *entries], max_bytes)
    assert all(len(encode(delta)) <= max_bytes for delta in deltas)
    assert [item for delta in deltas for item in delta.entries] == entries
    assert [item for delta in deltas for item in delta.proofs] == proofs
    assert all(decode_delta(encode(delta)) == delta for delta in deltas)


def test_an_overlong_delta_is_not_even_parsed() -> None:
    with pytest.raises(RemoteProtocolError, match="bytes"):
        decode_delta(bytes(MAX_DELTA_BYTES + 1))


@given(st.integers(0, 10**6), st.sampled_from([member(1), beat(1), notice(1)]))
@settings(max_examples=200)
def test_a_flipped_bit_never_passes_for_another_entry(bit: int, item: Signed) -> None:
    forged = flipped(item, bit)
    if forged != item:
        with pytest.raises(RemoteProtocolError):
            CHECKER.check(forged)
