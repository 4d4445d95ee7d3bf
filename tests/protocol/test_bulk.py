from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.bulk import (
    GREETING_BYTES,
    MAX_CERTIFICATE_BYTES,
    MAX_IP_CHARS,
    MAX_OFFERED,
    MAX_PROPOSAL_BYTES,
    MIN_PORT,
    Address,
    Proposal,
    decode_proposal,
    dialable,
    encode_proposal,
    greeting,
    is_greeting,
)
from farandole.protocol.errors import RemoteProtocolError

PROPOSAL = Proposal(session=b"s" * 16, token=b"t" * 32, certificate=b"c" * 350, addresses=[("192.0.2.1", 4001)])
PUBLIC, PRIVATE = ("8.8.8.8", 5000), ("192.168.1.7", 5000)


def test_a_proposal_survives_the_wire() -> None:
    assert decode_proposal(encode_proposal(PROPOSAL)) == PROPOSAL


def test_the_longest_proposal_fits_its_frame() -> None:
    longest = msgspec.structs.replace(
        PROPOSAL, certificate=bytes(MAX_CERTIFICATE_BYTES), addresses=[("f" * MAX_IP_CHARS, 65_535)] * MAX_OFFERED
    )
    assert len(encode_proposal(longest)) <= MAX_PROPOSAL_BYTES
    assert decode_proposal(encode_proposal(longest)) == longest


@pytest.mark.parametrize(
    "lie",
    [
        {"version": 2},
        {"session": b"s" * 15},
        {"token": b"t" * 33},
        {"certificate": b""},
        {"certificate": bytes(MAX_CERTIFICATE_BYTES + 1)},
        {"addresses": [PUBLIC] * (MAX_OFFERED + 1)},
        {"addresses": [("8.8.8.8", MIN_PORT - 1)]},
        {"addresses": [("8.8.8.8", 65_536)]},
        {"addresses": [("x" * (MAX_IP_CHARS + 1), 5000)]},
    ],
)
def test_what_is_out_of_bounds_is_refused(lie: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_proposal(encode_proposal(msgspec.structs.replace(PROPOSAL, **lie)))


@given(st.binary(max_size=200))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_proposal(data)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_damaged_proposal_is_read_or_refused(flips: list[tuple[int, int]]) -> None:
    data = bytearray(encode_proposal(PROPOSAL))
    for position, value in flips:
        data[position % len(data)] = value
    try:
        decode_proposal(bytes(data))
    except RemoteProtocolError:
        return


def test_a_greeting_needs_the_session_and_the_token() -> None:
    good = greeting(b"s" * 16, b"t" * 32)
    assert len(good) == GREETING_BYTES
    assert is_greeting(good, b"s" * 16, b"t" * 32)
    assert not is_greeting(good, b"s" * 16, b"u" * 32)
    assert not is_greeting(good, b"x" * 16, b"t" * 32)
    assert not is_greeting(b"", b"s" * 16, b"t" * 32)


def test_the_internet_may_be_dialled() -> None:
    assert dialable([PUBLIC], []) == [PUBLIC]


@pytest.mark.parametrize(
    "inside",
    [
        "127.0.0.1",
        "192.168.1.7",
        "10.0.0.1",
        "172.16.5.5",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:192.168.1.7",
        "localhost",
        "",
    ],
)
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


def test_system_ports_are_not_dialled() -> None:
    assert dialable([("8.8.8.8", 22)], []) == []


@given(
    st.lists(st.tuples(st.ip_addresses().map(str) | st.text(max_size=10), st.integers(0, 65_535)), max_size=12),
    st.lists(st.ip_addresses().map(str) | st.text(max_size=10), max_size=4),
)
def test_whatever_is_offered_the_targets_are_few_and_on_high_ports(offered: list[Address], in_use: list[str]) -> None:
    targets = dialable(offered, in_use)
    assert len(targets) <= MAX_OFFERED
    assert len(set(targets)) == len(targets)
    assert {port for _, port in targets} <= {port for _, port in offered if port >= MIN_PORT}
