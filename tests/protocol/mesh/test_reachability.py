"""Verdicts on how a node can be reached, and the messages that lead to them."""

import pytest
from msgspec.msgpack import encode

from farandole.protocol.mesh.reachability import (
    MAX_MESSAGE_BYTES,
    MAX_PORTS,
    DialBackAnswer,
    ReachabilityKind,
    Request,
    Witness,
    classify,
    decode_answer,
    decode_clock,
    decode_request,
)
from farandole.protocol.wire.errors import RemoteProtocolError

FAR = ("9.9.9.1", "9.9.9.2", "9.9.9.3")
NEAR = "192.168.1.7"
HOME = "8.8.8.8"


def saw(witness: str, port: int, *reached: int, ip: str = HOME) -> Witness:
    return Witness(witness, DialBackAnswer(ip, port, True, reached))


def test_public_is_whom_most_can_dial_from_the_internet_if_any_is_there() -> None:
    verdict = classify([saw(FAR[0], 5, 4001), saw(FAR[1], 6, 4001), saw(FAR[2], 7)], [])
    assert (verdict.kind, verdict.addresses) == (ReachabilityKind.PUBLIC, ((HOME, 4001),))
    assert classify([saw(FAR[0], 5, 4001), saw(FAR[1], 6)], []).kind is not ReachabilityKind.PUBLIC
    assert classify([saw(NEAR, 5, 4001, ip="192.168.1.2")], []).kind is ReachabilityKind.PUBLIC
    assert classify([saw(NEAR, 5, 4001), saw(NEAR, 6, 4001), saw(FAR[0], 5)], []).kind is not ReachabilityKind.PUBLIC


def test_a_router_may_let_in_ipv6_and_not_ipv4_and_one_liar_does_not_pass_for_either() -> None:
    v4, v6 = [saw(FAR[0], 5), saw(FAR[1], 6)], [saw(f"2a05::{i}", 4001, 4001, ip="2a05:1::a") for i in (1, 2)]
    verdict = classify([*v4, *v6], [])
    assert (verdict.kind, verdict.addresses) == (ReachabilityKind.PUBLIC, (("2a05:1::a", 4001),))
    assert classify([v4[0], *v6, saw("2a05::3", 4001, ip="2a05:1::a")], []).kind is ReachabilityKind.PUBLIC
    closed = [saw(f"2a05::{i}", 4001, ip="2a05:1::a") for i in (3, 4)]
    assert classify([*v4, *closed, v6[0]], []).kind is not ReachabilityKind.PUBLIC
    liar = saw("2a05::1", 4001, 4001, ip="2a05:1::a")
    assert classify([liar, saw(FAR[0], 5), saw(FAR[1], 6)], []).kind is not ReachabilityKind.PUBLIC
    assert classify([liar, saw(FAR[0], 5)], []).kind is not ReachabilityKind.PUBLIC


def test_punchable_is_whose_port_looks_the_same_from_everywhere() -> None:
    dialled = [saw(FAR[0], 1), saw(FAR[1], 2)]
    same = classify(dialled, [saw(FAR[0], 4001), saw(FAR[1], 4001)])
    assert (same.kind, same.addresses) == (ReachabilityKind.PUNCHABLE, ((HOME, 4001),))
    assert classify(dialled, [saw(FAR[0], 4001), saw(FAR[1], 4002)]).kind is ReachabilityKind.RELAY_ONLY
    assert classify(dialled, [saw(FAR[0], 4001)]).kind is ReachabilityKind.PUNCHABLE
    assert classify(dialled, []).kind is ReachabilityKind.RELAY_ONLY


def test_who_has_not_dialled_says_nothing_of_it_and_without_an_answer_nothing_is_known() -> None:
    busy = Witness(FAR[0], DialBackAnswer(HOME, 5, False, ()))
    assert classify([busy, saw(FAR[1], 6, 4001)], []).kind is ReachabilityKind.PUBLIC
    assert classify([busy], []).kind is ReachabilityKind.UNKNOWN
    assert classify([], []).kind is ReachabilityKind.UNKNOWN


def test_messages_survive_the_wire_within_their_bound_and_no_system_service_is_knocked_at() -> None:
    request = Request((65_535,) * MAX_PORTS)
    answer = DialBackAnswer("2001:db8:1111:2222:3333:4444:5555:6666", 65_535, True, (65_535,))
    assert decode_request(encode(request)) == Request((65_535,))
    assert decode_answer(encode(answer), request) == answer
    assert max(len(encode(request)), len(encode(answer))) <= MAX_MESSAGE_BYTES
    assert decode_request(encode(Request((22, 443, 4001, 25)))) == Request((443, 4001))


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"\x91\x95\x01\x02\x03\x04\x05", b"\x91\x91\x00", b"\x90", b"\x91" * 200]
)
def test_what_is_no_request_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_request(payload)


@pytest.mark.parametrize("answer", [DialBackAnswer("nowhere", 1, True, ()), DialBackAnswer(HOME, 1, True, (4002,))])
def test_answers_must_be_to_the_question(answer: DialBackAnswer) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_answer(encode(answer), Request((4001,)))


def test_a_clock_that_is_out_of_range_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_clock(encode((-1,)))
