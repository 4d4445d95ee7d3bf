"""What messages are on the wire, and which of them no honest peer sends."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.rounds.pairing_messages import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGES,
    Agree,
    Begin,
    Busy,
    Decline,
    Message,
    Propose,
    Ready,
    Withdraw,
    decode_message,
    encode_message,
)
from farandole.protocol.wire.errors import RemoteProtocolError

from .nodes import BOB, CAROL, HIGH, LOW, MALLORY, MIDDLE, matched, started


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e9])
def test_durations_are_finite_and_bounded(seconds: float) -> None:
    for message in (Propose(LOW, seconds), Agree(LOW, seconds), Busy(LOW, seconds)):
        with pytest.raises(RemoteProtocolError):
            decode_message(encode_message(message))


SESSIONS = st.sampled_from([LOW, MIDDLE, HIGH])
SECONDS = st.one_of(st.none(), st.floats(0, 100))
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Propose, SESSIONS, SECONDS),
    st.builds(Agree, SESSIONS, SECONDS),
    st.builds(Decline, SESSIONS, st.sampled_from(["matched", "away"])),
    st.builds(Busy, SESSIONS, st.floats(0, 100)),
    st.builds(Withdraw, SESSIONS),
    st.builds(Ready, SESSIONS),
    st.builds(Begin, SESSIONS),
)


def test_messages_are_on_the_wire_what_other_nodes_read() -> None:
    vectors: dict[Message, list[object]] = {
        Propose(LOW, 2.5): [1, LOW, 2.5],
        Agree(LOW, None): [2, LOW, None],
        Decline(LOW, "away"): [3, LOW, "away"],
        Busy(LOW, 2.5): [4, LOW, 2.5],
        Withdraw(LOW): [5, LOW],
        Ready(LOW): [6, LOW],
        Begin(LOW): [7, LOW],
    }
    assert {message: msgspec.msgpack.decode(encode_message(message)) for message in vectors} == vectors


@given(MESSAGES)
def test_messages_survive_the_wire_and_are_small(message: Message) -> None:
    payload = encode_message(message)
    assert len(payload) <= MAX_MESSAGE_BYTES
    assert decode_message(payload) == message


@given(MESSAGES, st.lists(st.one_of(st.none(), st.integers(-1, 5), st.binary(max_size=4)), min_size=1, max_size=4))
def test_what_a_later_release_appends_is_skipped_within_the_same_bound(message: Message, more: list[object]) -> None:
    fields = msgspec.msgpack.decode(encode_message(message))
    later = msgspec.msgpack.encode([*fields, *more])
    assert decode_message(later) == message
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode_message(msgspec.msgpack.encode([*fields, *more, bytes(MAX_MESSAGE_BYTES)]))
    with pytest.raises(RemoteProtocolError):
        decode_message(msgspec.msgpack.encode([8, *fields[1:]]))


def test_a_flood_is_cut_off() -> None:
    alice = started()
    for _ in range(MAX_MESSAGES):
        alice.hear(BOB, Withdraw(LOW), 1.0)
    with pytest.raises(RemoteProtocolError, match="more than"):
        alice.hear(BOB, Withdraw(LOW), 1.0)
    assert alice.hear(CAROL, Withdraw(LOW), 1.0) == []
    assert alice.hear(BOB, Withdraw(LOW), 2.1) == []


def test_a_session_of_two_others_is_none_of_ones_business() -> None:
    alice, session = matched()
    for message in (Withdraw(session), Ready(session), Agree(session, 1.0), Begin(session)):
        with pytest.raises(RemoteProtocolError):
            alice.hear(MALLORY, message, 31.0)
    assert alice.machine.partner == BOB


def test_nobody_begins_an_exchange_before_we_are_ready() -> None:
    alice = started()
    alice.hear(BOB, Propose(MIDDLE, 40.0), 1.0)
    with pytest.raises(RemoteProtocolError):
        alice.hear(BOB, Begin(MIDDLE), 2.0)
