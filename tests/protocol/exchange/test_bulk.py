from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.exchange.bulk import (
    GREETING_BYTES,
    MAX_OFFERED,
    MAX_PROPOSAL_BYTES,
    Proposal,
    Secrets,
    Side,
    agree,
    decode_proposal,
    dialable,
    greeting,
    is_greeting,
)
from farandole.protocol.mesh.dialling import MAX_IP_CHARS, MIN_PORT, Address
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.messagepack import encode

PROPOSAL = Proposal(session=b"s" * 16, token=b"t" * 32, key=b"k" * 32, addresses=[("192.0.2.1", 4001)])
# Montgomery's u of the points of order 1, 2, 4 and 8 (RFC 7748, 6.1; https://cr.yp.to/ecdh.html#validate), in all
# encodings of 255 bits.
SMALL_ORDER = [
    number.to_bytes(32, "little")
    for number in (
        0,
        1,
        2**255 - 20,
        2**255 - 19,
        2**255 - 18,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    )
]
PUBLIC, PRIVATE = ("8.8.8.8", 5000), ("192.168.1.7", 5000)


def test_the_longest_proposal_fits_its_frame() -> None:
    longest = msgspec.structs.replace(PROPOSAL, addresses=[("f" * MAX_IP_CHARS, 65_535)] * MAX_OFFERED)
    assert len(encode(longest)) <= MAX_PROPOSAL_BYTES
    assert decode_proposal(encode(longest)) == longest


@pytest.mark.parametrize(
    "lie",
    [
        {"version": 1},
        {"version": 2},
        {"version": 4},
        {"session": b"s" * 15},
        {"token": b"t" * 33},
        {"key": b""},
        {"key": b"k" * 31},
        {"key": b"k" * 33},
        {"addresses": [PUBLIC] * (MAX_OFFERED + 1)},
        {"addresses": [("8.8.8.8", MIN_PORT - 1)]},
        {"addresses": [("8.8.8.8", 65_536)]},
        {"addresses": [("x" * (MAX_IP_CHARS + 1), 5000)]},
    ],
)
def test_what_is_out_of_bounds_is_refused(lie: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_proposal(encode(msgspec.structs.replace(PROPOSAL, **lie)))


KEYS = [X25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2, 3)]
ALICE, BOB = (
    Side(bytes([number]) * 32, msgspec.structs.replace(PROPOSAL, key=key.public_key().public_bytes_raw()))
    for number, key in enumerate(KEYS[:2])
)


BINDING = b"r" * 32, b"h" * 32
OTHER_BINDINGS = (b"x" * 32, BINDING[1]), (BINDING[0], b"x" * 32)


def alices(
    asker: Side = ALICE, answerer: Side = BOB, key: X25519PrivateKey = KEYS[0], binding: tuple[bytes, bytes] = BINDING
) -> Secrets:
    return agree(key, asker, answerer, binding, is_asker=True)


@pytest.mark.parametrize("liar", [ALICE, BOB])
@pytest.mark.parametrize("field", ["session", "token", "key", "author"])
def test_who_believes_otherwise_has_other_secrets(field: str, liar: Side) -> None:
    if field == "author":
        other = liar._replace(author=b"m" * 32)
    else:
        lie = KEYS[2].public_key().public_bytes_raw() if field == "key" else bytes(len(getattr(PROPOSAL, field)))
        other = liar._replace(proposal=msgspec.structs.replace(liar.proposal, **{field: lie}))
    if field == "session":  # both have the asker's session, or there is no negotiation
        asker, answerer = (side._replace(proposal=other.proposal) for side in (ALICE, BOB))
    else:
        asker, answerer = (other if side is liar else side for side in (ALICE, BOB))
    assert not set(alices(asker, answerer)) & set(alices())


@pytest.mark.parametrize("other", [{"key": KEYS[2]}, *({"binding": binding} for binding in OTHER_BINDINGS)])
def test_another_private_key_run_or_connection_brings_other_secrets(other: dict[str, Any]) -> None:
    assert not set(alices(**other)) & set(alices())


def test_who_hears_himself_has_other_secrets() -> None:
    asking = agree(KEYS[0], ALICE, ALICE, BINDING, is_asker=True)
    answering = agree(KEYS[0], ALICE, ALICE, BINDING, is_asker=False)
    assert asking.sealing != asking.opening
    assert (asking.sealing, asking.opening) == (answering.opening, answering.sealing)


@pytest.mark.parametrize("key", SMALL_ORDER)
@pytest.mark.parametrize("is_asker", [True, False])
def test_a_key_of_small_order_is_refused(key: bytes, is_asker: bool) -> None:
    theirs = BOB._replace(proposal=msgspec.structs.replace(BOB.proposal, key=key))
    with pytest.raises(RemoteProtocolError):
        agree(KEYS[0], ALICE, theirs, BINDING, is_asker)


def test_a_greeting_needs_the_session_and_the_token() -> None:
    good = greeting(b"s" * 16, b"t" * 32)
    assert len(good) == GREETING_BYTES
    assert is_greeting(good, b"s" * 16, b"t" * 32)
    assert not is_greeting(good, b"s" * 16, b"u" * 32)
    assert not is_greeting(good, b"x" * 16, b"t" * 32)
    assert not is_greeting(b"", b"s" * 16, b"t" * 32)


INSIDE = (
    "127.0.0.1 192.168.1.7 10.0.0.1 172.16.5.5 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 "
    "::1 :: fe80::1 fe80::1%eth0 fd00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:192.168.1.7 localhost"
)


@pytest.mark.parametrize("inside", [*INSIDE.split(), ""])
def test_no_peers_word_leads_into_our_own_network(inside: str) -> None:
    assert dialable([(inside, 5000)], []) == []
    assert (inside, 5000) not in dialable([(inside, 5000)], ["8.8.8.8"])


def test_neighbours_may_be_dialled() -> None:
    assert dialable([PRIVATE], ["192.168.1.200"]) == [("192.168.1.200", 5000), PRIVATE]
    assert dialable([("127.0.0.1", 5000)], ["127.0.0.1"]) == [("127.0.0.1", 5000)]
    assert dialable([("fd00::7", 5000)], ["fd00::1"]) == [("fd00::1", 5000), ("fd00::7", 5000)]
    assert PRIVATE not in dialable([PRIVATE], ["192.168.2.200"])
    assert PRIVATE not in dialable([PRIVATE], ["fd00::1"])


def test_where_the_peer_was_seen_comes_first_with_each_port_that_it_offers() -> None:
    assert dialable([PUBLIC, ("9.9.9.9", 6000)], ["1.1.1.1"])[:2] == [("1.1.1.1", 5000), ("1.1.1.1", 6000)]


@given(
    st.lists(st.tuples(st.ip_addresses().map(str) | st.text(max_size=10), st.integers(0, 65_535)), max_size=12),
    st.lists(st.ip_addresses().map(str) | st.text(max_size=10), max_size=4),
)
def test_whatever_is_offered_the_targets_are_few_and_on_high_ports(offered: list[Address], in_use: list[str]) -> None:
    targets = dialable(offered, in_use)
    assert len(targets) <= MAX_OFFERED
    assert len(set(targets)) == len(targets)
    assert {port for _, port in targets} <= {port for _, port in offered if port >= MIN_PORT}
