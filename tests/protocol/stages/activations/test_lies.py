"""A peer that lies, or breaks the rules, is detected."""

from __future__ import annotations

import math

import msgspec
import pytest

from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES
from farandole.protocol.stages.activations import (
    DATA_BYTES,
    DOWNSTREAM,
    MAX_CONTROL_BYTES,
    MAX_CREDITS,
    MAX_OPEN,
    MAX_SECONDS_LEFT,
    TICKET_BYTES,
    UPSTREAM,
    Control,
    Credits,
    DataReceived,
    Dropped,
    Gradient,
    Settled,
    Transit,
    Welcome,
)
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import frame

from .sides import FORWARD, HELLO, SIZE, Side, forward, give_back, lie, lying_data, pair, refuse, send_data

PIECES = [(0, DATA_BYTES), (DATA_BYTES, DATA_BYTES), (2 * DATA_BYTES, 100)]


@pytest.mark.parametrize(
    ("message", "who"),
    [
        (HELLO, UPSTREAM),
        (Welcome(1), DOWNSTREAM),
        (Credits(9), DOWNSTREAM),
        (FORWARD, UPSTREAM),
        (Gradient(0), DOWNSTREAM),
        (Dropped(0, "", is_untouched=True), DOWNSTREAM),
        (Settled(0, is_kept=False), UPSTREAM),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_message_has_its_side(message: Control, who: bool) -> None:
    alice, bob = pair()
    forward(alice, bob)
    wrong, receiver = (bob, alice) if who is UPSTREAM else (alice, bob)
    refuse(wrong, receiver, message)
    assert alice.link.open == bob.link.open == {0: Transit.THERE}


@pytest.mark.parametrize("index", [1, 2, 2**53])
def test_nobody_speaks_of_what_was_not_forwarded(index: int) -> None:
    alice, bob = pair()
    forward(alice, bob)
    for sender, receiver, message in (
        (bob, alice, Gradient(index)),
        (bob, alice, Dropped(index, "", is_untouched=True)),
        (alice, bob, Settled(index, is_kept=False)),
    ):
        refuse(sender, receiver, message)


def test_we_do_not_speak_of_what_has_ended() -> None:
    alice, bob = pair()
    forward(alice, bob)
    alice.say(Settled(0, is_kept=False))
    with pytest.raises(LocalProtocolError):
        alice.link.send(Settled(0, is_kept=False))
    bob.say(Dropped(0, "", is_untouched=True))
    for message in (Dropped(0, "", is_untouched=True), Gradient(0)):
        with pytest.raises(LocalProtocolError):
            bob.link.send(message)


def test_no_more_is_forwarded_than_there_are_credits() -> None:
    alice, bob = pair(credits=1)
    forward(alice, bob)
    bob.say(Credits(2))  # in transit: Alice has not received it
    with pytest.raises(LocalProtocolError):
        alice.link.send(FORWARD)
    bob.hear(lie(FORWARD) + b"".join(lying_data(size, SIZE + at) for at, size in PIECES))
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(FORWARD))
    assert bob.link.num_forwarded == 2


def test_credits_are_not_taken_back_and_have_a_bound() -> None:
    alice, bob = pair(credits=3)
    forward(alice, bob)
    assert alice.hear(bob.say(Credits(3)) + bob.say(Credits(1 + MAX_CREDITS)))
    for total in (0, 3, MAX_CREDITS, 2 + MAX_CREDITS, 2**53):
        refuse(bob, alice, Credits(total))
    assert alice.link.credits == bob.link.credits == 1 + MAX_CREDITS
    greeted = Side(DOWNSTREAM)
    greeted.hear(lie(HELLO))
    with pytest.raises(LocalProtocolError):
        greeted.link.send(Welcome(MAX_CREDITS + 1))
    assert not greeted.link.is_open


def test_who_ends_no_microbatch_may_not_forward_for_ever() -> None:
    """Mallory takes the gradients, and never says how the microbatches ended."""
    mallory, bob = pair(credits=1, size=10)
    for index in range(MAX_OPEN):
        forward(mallory, bob)
        give_back(mallory, bob, index)
        assert mallory.hear(bob.say(Credits(index + 2)))
    refuse(mallory, bob, FORWARD)
    assert len(bob.link.open) == MAX_OPEN


@pytest.mark.parametrize("size", [0, 1, 101])
def test_data_are_as_many_as_the_run_says(size: int) -> None:
    """The last hundred bytes of a microbatch are due."""
    alice, bob = pair()
    assert bob.hear(alice.say(FORWARD) + alice.next_data() + alice.next_data()) == [FORWARD]
    for wrong in (0, 101):
        with pytest.raises(LocalProtocolError):
            send_data(alice.link, memoryview(bytes(wrong)))
    if size == 1:
        assert bob.hear(lying_data(1, 2 * DATA_BYTES)) == []
        assert bob.hear(lying_data(99, 2 * DATA_BYTES + 1)) == [DataReceived(0)]
        size = 1  # more than what remains
    with pytest.raises(RemoteProtocolError):
        bob.hear(lying_data(size, bob.link.pipe.num_received))


def test_data_of_one_microbatch_at_a_time() -> None:
    alice, bob = pair()
    forward(alice, bob)
    forward(alice, bob)
    alice.hear(bob.say(Gradient(0)) + bob.next_data())
    bob.hear(alice.say(FORWARD) + alice.next_data())
    for sender, receiver, message in ((alice, bob, FORWARD), (bob, alice, Gradient(1))):
        refuse(sender, receiver, message)
    assert alice.link.open == bob.link.open == {0: Transit.BACK, 1: Transit.THERE, 2: Transit.FORWARD}


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff", (CHUNK_FRAME_BYTES - 3).to_bytes(4, "big")])
def test_a_lying_length_is_refused_before_anything_follows_it(header: bytes) -> None:
    for side in pair():
        with pytest.raises(RemoteProtocolError):
            side.hear(header)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0",
        b"\2",
        b"\xff" * 9,
        b"\0\xc1",
        b"\0" + b"\x91" * 600,  # nested
        b"\0" + bytes(MAX_CONTROL_BYTES),
        b"\0" + msgspec.msgpack.encode([8, 0]),
        b"\0" + msgspec.msgpack.encode({"type": 3, "total": 5}),
        b"\0" + msgspec.msgpack.encode([3, 5, 5]),
        b"\0" + msgspec.msgpack.encode([3, -1]),
        b"\0" + msgspec.msgpack.encode([3, 2**53 + 1]),
        b"\0" + msgspec.msgpack.encode([3, "5"]),
        b"\0" + msgspec.msgpack.encode([3, 5]) + b"\0",
        b"\0" + msgspec.msgpack.encode([6, 0, "r" * 129, True]),
        b"\0" + b"\x94\x06\x00\xa1\xff\xc3",  # a reason that is not text
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    alice, bob = pair()
    forward(alice, bob)
    for side in (alice, bob):
        with pytest.raises(RemoteProtocolError):
            side.hear(frame(payload, DATA_BYTES))
        assert side.link.open == {0: Transit.THERE}
        assert side.link.credits == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds_left": math.nan},
        {"seconds_left": math.inf},
        {"seconds_left": -0.1},
        {"seconds_left": MAX_SECONDS_LEFT + 1.0},
        {"ticket": b"t" * (TICKET_BYTES - 1)},
        {"origin": b"o" * 33},
        {"round": -1},
        {"round": 2**31},
    ],
    ids=str,
)
def test_a_forward_out_of_bounds_is_refused(fields: dict[str, object]) -> None:
    _, bob = pair()
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(msgspec.structs.replace(FORWARD, **fields)))
    assert bob.link.num_forwarded == 0
