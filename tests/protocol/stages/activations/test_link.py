"""Messages and data over a link between two stages, and messages that cross on it."""

from __future__ import annotations

import math

import msgspec
import pytest

from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES
from farandole.protocol.run.manifest import Manifest, PipelineConfig, manifest_from_dict
from farandole.protocol.stages import activations as wire
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.messagepack import encode

from .sides import FORWARD, HELLO, SIZE, Side, bring_to, forward, give_back, lie, lying_data, pair, refuse, send_data


@pytest.mark.parametrize("piece", [1, 7, CHUNK_FRAME_BYTES, 2**20])
def test_there_and_back_however_the_stream_is_cut(piece: int) -> None:
    alice, bob = pair(1, size=300 if piece == 1 else SIZE)
    assert bob.hear(alice.say(FORWARD) + alice.rest(), piece) == [FORWARD, wire.DataReceived(0)]
    assert bob.memory == alice.data
    assert alice.hear(bob.say(wire.Gradient(0)) + bob.rest(), piece) == [wire.Gradient(0), wire.DataReceived(0)]
    assert alice.memory == bob.data
    assert bob.hear(alice.say(wire.Settled(0, is_kept=True)), piece) == [wire.Settled(0, is_kept=True)]
    assert alice.hear(bob.say(wire.Credits(2)), piece) == [wire.Credits(2)]
    assert alice.link.open == bob.link.open == {}


def test_a_gradient_may_be_smaller_than_its_activations_and_no_more_of_it_is_taken() -> None:
    alice, bob = pair(gradient_size=wire.DATA_BYTES)
    forward(alice, bob)
    give_back(alice, bob, 0)
    assert (len(bob.memory), len(alice.memory)) == (SIZE, wire.DATA_BYTES)
    assert alice.memory == bob.data
    assert bob.memory == alice.data
    forward(alice, bob)
    with pytest.raises(RemoteProtocolError):  # as much as the activations
        alice.hear(lie(wire.Gradient(1)) + lying_data(wire.DATA_BYTES, wire.DATA_BYTES) + lying_data(1, SIZE - 1))


def test_other_frames_come_between_data() -> None:
    alice, bob = pair()
    forward(alice, bob)
    forward(alice, bob)
    give_back(alice, bob, 0)
    frames = [alice.say(FORWARD), alice.next_data(10), alice.say(wire.Settled(0, is_kept=True)), alice.next_data()]
    frames += [alice.say(wire.Settled(1, is_kept=False)), alice.rest()]
    events = [event for data in frames for event in bob.hear(data)]
    assert events == [FORWARD, wire.Settled(0, is_kept=True), wire.Settled(1, is_kept=False), wire.DataReceived(2)]
    assert bob.memory == alice.data
    frames = [bob.say(wire.Gradient(2)), bob.next_data(), bob.say(wire.Credits(9)), bob.rest()]
    events = [event for data in frames for event in alice.hear(data)]
    assert events == [wire.Gradient(2), wire.Credits(9), wire.DataReceived(2)]
    assert alice.memory == bob.data


def test_the_longest_messages_fit_and_a_longer_control_frame_is_not_read() -> None:
    far = 2**53
    for message in (
        HELLO,
        FORWARD,
        wire.Dropped(far, "\U0001f600" * 128, is_untouched=True),
        wire.Settled(far, is_kept=True),
    ):
        assert len(lie(message)) <= wire.MAX_CONTROL_BYTES
    for side in pair():
        with pytest.raises(RemoteProtocolError, match=f"{wire.MAX_CONTROL_BYTES + 1} bytes"):
            side.hear(frame(b"\0" + b"\x91" * (wire.MAX_CONTROL_BYTES + 1), CHUNK_FRAME_BYTES))


def test_what_is_told_of_a_microbatchs_shape() -> None:
    model = {"num_layers": 2, "width": 32, "num_heads": 2, "hidden": 64, "context": 32, "vocabulary": 256}
    run = {"name": "a run", "inner": {"batch_size": 12}}

    def manifest(codec: str = "bf16", microbatch_size: int = 2, **changes: int) -> Manifest:
        pipeline = {"codec": codec, "microbatch_size": microbatch_size}
        return manifest_from_dict({**run, "model": model | changes, "pipeline": pipeline})

    same_run = manifest()
    same = wire.shape_hash(same_run)
    others = [manifest(width=64), manifest(context=33), manifest(microbatch_size=3), manifest(codec="int8")]
    others.append(msgspec.structs.replace(same_run, pipeline=PipelineConfig(2, "bf16", "int8")))
    assert len({same, *map(wire.shape_hash, others)}) == 6


def test_a_gradient_that_is_dropped_on_its_way_is_none_and_what_still_goes_forward_may_be_given_up() -> None:
    """Bob's round ends before his line has sent the whole gradient: its memory then goes to another microbatch."""
    alice, bob = pair()
    bring_to(alice, bob, wire.Transit.BACK)
    dropped = wire.Dropped(0, "the round is over", is_untouched=False)
    assert bob.link.may_drop(0)
    assert alice.hear(bob.say(dropped)) == [dropped]
    before = bytes(alice.memory)
    assert alice.hear(bob.rest()) == []
    assert alice.memory == before
    assert alice.link.open == bob.link.open == {}
    assert not bob.link.may_drop(0)
    forward(alice, bob)
    give_back(alice, bob, 1)
    assert not bob.link.may_drop(1)
    alice, bob = pair()
    bring_to(alice, bob, wire.Transit.FORWARD)
    given_up = wire.Settled(0, is_kept=False)
    assert bob.hear(alice.say(given_up) + alice.rest()) == [given_up]
    assert alice.link.open == bob.link.open == {}


def test_data_that_never_come_leave_the_rest_of_the_link_as_it_is() -> None:
    mallory, bob = pair()
    forward(mallory, bob)
    assert bob.hear(mallory.say(FORWARD) + mallory.next_data()) == [FORWARD]
    assert bob.say(wire.Dropped(1, "out of time", is_untouched=True))
    give_back(mallory, bob, 0)
    assert bob.hear(mallory.say(wire.Settled(0, is_kept=True))) == [wire.Settled(0, is_kept=True)]
    assert bob.link.open == {}
    assert bob.hear(mallory.rest()) == [], "what comes after all goes nowhere"


# The question whether a microbatch is kept, and its answer


@pytest.mark.parametrize("is_kept", [True, False, None])
def test_questions_and_answers_survive_the_wire(is_kept: bool | None) -> None:
    ticket = b"t" * wire.TICKET_BYTES
    for message in (wire.Question(ticket), wire.Answer(ticket, is_kept)):
        payload = encode(message)
        assert len(payload) <= wire.MAX_QUESTION_BYTES
        assert wire.decode_question(payload) == message
        for wrong in (payload[:-1], payload + b"\0", encode(wire.Question(ticket[1:]))):
            with pytest.raises(RemoteProtocolError):
                wire.decode_question(wrong)


# A microbatch moves through the steps of the table, and the greetings come first.


@pytest.mark.parametrize("step", wire.Transit)
@pytest.mark.parametrize(("who", "kind"), wire.TRANSITIONS)
def test_a_microbatch_goes_as_the_table_says(
    who: bool, kind: type[wire.Gradient | wire.Dropped | wire.Settled], step: wire.Transit
) -> None:
    messages: dict[type, wire.Control] = {
        wire.Gradient: wire.Gradient(0),
        wire.Dropped: wire.Dropped(0, "", is_untouched=False),
        wire.Settled: wire.Settled(0, is_kept=False),
    }
    alice, bob = pair()
    bring_to(alice, bob, step)
    sender, receiver = (alice, bob) if who is wire.UPSTREAM else (bob, alice)
    message, before = messages[kind], bytes(receiver.memory)
    if step in wire.TRANSITIONS[who, kind]:
        following = wire.TRANSITIONS[who, kind][step]
        expected = {} if following is None else {0: following}
        assert receiver.hear(sender.say(message)) == [message]
    else:
        expected = {0: step}
        refuse(sender, receiver, message)
    assert sender.link.open == receiver.link.open == expected
    assert receiver.memory == before


@pytest.mark.parametrize("step", wire.Transit)
def test_only_what_has_returned_is_kept(step: wire.Transit) -> None:
    alice, bob = pair()
    bring_to(alice, bob, step)
    kept = wire.Settled(0, is_kept=True)
    if step is wire.Transit.RETURNED:
        assert bob.hear(alice.say(kept)) == [kept]
        return
    refuse(alice, bob, kept)
    assert alice.link.open == bob.link.open == {0: step}


@pytest.mark.parametrize(
    ("field", "value"), [("run_id", b"R" * 32), ("stage", 4), ("shape", b"S" * 32), ("version", 2)]
)
def test_a_link_of_something_else_is_refused(field: str, value: object) -> None:
    other = msgspec.structs.replace(HELLO, **{field: value})
    alice, bob = Side(wire.UPSTREAM), Side(wire.DOWNSTREAM)
    with pytest.raises(LocalProtocolError, match=field.replace("_", " ")):
        alice.link.send(other)
    with pytest.raises(RemoteProtocolError, match=field.replace("_", " ")):
        bob.hear(lie(other))
    with pytest.raises(LocalProtocolError):
        bob.link.send(wire.Welcome(1))
    assert not bob.link.is_open


def test_greetings_come_once_in_their_order_and_each_from_its_side() -> None:
    alice, bob = Side(wire.UPSTREAM), Side(wire.DOWNSTREAM)
    refuse(bob, alice, wire.Welcome(1))  # before the Hello
    refuse(bob, alice, HELLO)
    assert (alice.link.is_open, alice.link.credits) == (False, 0)
    alice = Side(wire.UPSTREAM)
    assert bob.hear(alice.say(HELLO)) == [HELLO]
    refuse(alice, bob, HELLO)
    bob = Side(wire.DOWNSTREAM)
    bob.hear(lie(HELLO))
    refuse(alice, bob, wire.Welcome(1))
    alice, bob = pair()
    refuse(alice, bob, HELLO)
    refuse(bob, alice, wire.Welcome(4))


SIDES = [
    (HELLO, wire.UPSTREAM),
    (wire.Welcome(1), wire.DOWNSTREAM),
    (wire.Credits(9), wire.DOWNSTREAM),
    (FORWARD, wire.UPSTREAM),
    (wire.Gradient(0), wire.DOWNSTREAM),
    (wire.Dropped(0, "", is_untouched=True), wire.DOWNSTREAM),
    (wire.Settled(0, is_kept=False), wire.UPSTREAM),
]
"""Each message, and the side that may send it; the greetings come first."""


@pytest.mark.parametrize("message", [message for message, _ in SIDES[2:]], ids=lambda message: type(message).__name__)
def test_nothing_is_said_before_the_greetings(message: wire.Control) -> None:
    for is_upstream in (wire.UPSTREAM, wire.DOWNSTREAM):
        for is_greeted in (False, True):
            side = Side(is_upstream)
            if is_greeted:
                side.say(HELLO) if is_upstream else side.hear(lie(HELLO))
            refuse(side, side, message)
            assert (side.link.credits, side.link.num_forwarded, side.link.open) == (0, 0, {})


def test_no_data_before_they_are_announced() -> None:
    for side in (Side(wire.UPSTREAM), Side(wire.DOWNSTREAM), *pair()):
        with pytest.raises(LocalProtocolError):
            send_data(side.link, memoryview(b"data"))
        with pytest.raises(RemoteProtocolError):
            side.hear(lying_data(4))


# A peer that lies, or breaks the rules, is detected.


PIECES = [(0, wire.DATA_BYTES), (wire.DATA_BYTES, wire.DATA_BYTES), (2 * wire.DATA_BYTES, 100)]


@pytest.mark.parametrize(("message", "who"), SIDES, ids=lambda value: type(value).__name__)
def test_each_message_has_its_side(message: wire.Control, who: bool) -> None:
    alice, bob = pair()
    forward(alice, bob)
    wrong, receiver = (bob, alice) if who is wire.UPSTREAM else (alice, bob)
    refuse(wrong, receiver, message)
    assert alice.link.open == bob.link.open == {0: wire.Transit.THERE}


@pytest.mark.parametrize("index", [1, 2, 2**53])
def test_nobody_speaks_of_what_was_not_forwarded(index: int) -> None:
    alice, bob = pair()
    forward(alice, bob)
    for sender, receiver, message in (
        (bob, alice, wire.Gradient(index)),
        (bob, alice, wire.Dropped(index, "", is_untouched=True)),
        (alice, bob, wire.Settled(index, is_kept=False)),
    ):
        refuse(sender, receiver, message)


def test_we_do_not_speak_of_what_has_ended() -> None:
    alice, bob = pair()
    forward(alice, bob)
    alice.say(wire.Settled(0, is_kept=False))
    with pytest.raises(LocalProtocolError):
        alice.link.send(wire.Settled(0, is_kept=False))
    bob.say(wire.Dropped(0, "", is_untouched=True))
    for message in (wire.Dropped(0, "", is_untouched=True), wire.Gradient(0)):
        with pytest.raises(LocalProtocolError):
            bob.link.send(message)


def test_no_more_is_forwarded_than_there_are_credits() -> None:
    alice, bob = pair(credits=1)
    forward(alice, bob)
    bob.say(wire.Credits(2))  # in transit: Alice has not received it
    with pytest.raises(LocalProtocolError):
        alice.link.send(FORWARD)
    bob.hear(lie(FORWARD) + b"".join(lying_data(size, SIZE + at) for at, size in PIECES))
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(FORWARD))
    assert bob.link.num_forwarded == 2


def test_credits_are_not_taken_back_and_have_a_bound() -> None:
    alice, bob = pair(credits=3)
    forward(alice, bob)
    assert alice.hear(bob.say(wire.Credits(3)) + bob.say(wire.Credits(1 + wire.MAX_CREDITS)))
    for total in (0, 3, wire.MAX_CREDITS, 2 + wire.MAX_CREDITS, 2**53):
        refuse(bob, alice, wire.Credits(total))
    assert alice.link.credits == bob.link.credits == 1 + wire.MAX_CREDITS
    greeted = Side(wire.DOWNSTREAM)
    greeted.hear(lie(HELLO))
    with pytest.raises(LocalProtocolError):
        greeted.link.send(wire.Welcome(wire.MAX_CREDITS + 1))
    assert not greeted.link.is_open


def test_who_ends_no_microbatch_may_not_forward_for_ever() -> None:
    """Mallory takes the gradients, and never says how the microbatches ended."""
    mallory, bob = pair(credits=1, size=10)
    for index in range(wire.MAX_OPEN):
        forward(mallory, bob)
        give_back(mallory, bob, index)
        assert mallory.hear(bob.say(wire.Credits(index + 2)))
    refuse(mallory, bob, FORWARD)
    assert len(bob.link.open) == wire.MAX_OPEN


@pytest.mark.parametrize("size", [0, 1, 101])
def test_data_are_as_many_as_the_run_says(size: int) -> None:
    """The last hundred bytes of a microbatch are due."""
    alice, bob = pair()
    assert bob.hear(alice.say(FORWARD) + alice.next_data() + alice.next_data()) == [FORWARD]
    for wrong in (0, 101):
        with pytest.raises(LocalProtocolError):
            send_data(alice.link, memoryview(bytes(wrong)))
    if size == 1:
        assert bob.hear(lying_data(1, 2 * wire.DATA_BYTES)) == []
        assert bob.hear(lying_data(99, 2 * wire.DATA_BYTES + 1)) == [wire.DataReceived(0)]
        size = 1  # more than what remains
    with pytest.raises(RemoteProtocolError):
        bob.hear(lying_data(size, bob.link.pipe.num_received))


def test_data_of_one_microbatch_at_a_time() -> None:
    alice, bob = pair()
    forward(alice, bob)
    forward(alice, bob)
    alice.hear(bob.say(wire.Gradient(0)) + bob.next_data())
    bob.hear(alice.say(FORWARD) + alice.next_data())
    for sender, receiver, message in ((alice, bob, FORWARD), (bob, alice, wire.Gradient(1))):
        refuse(sender, receiver, message)
    assert alice.link.open == bob.link.open == {0: wire.Transit.BACK, 1: wire.Transit.THERE, 2: wire.Transit.FORWARD}


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
        b"\0" + bytes(wire.MAX_CONTROL_BYTES),
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
            side.hear(frame(payload, wire.DATA_BYTES))
        assert side.link.open == {0: wire.Transit.THERE}
        assert side.link.credits == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds_left": math.nan},
        {"seconds_left": math.inf},
        {"seconds_left": -0.1},
        {"seconds_left": wire.MAX_SECONDS_LEFT + 1.0},
        {"ticket": b"t" * (wire.TICKET_BYTES - 1)},
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
