"""Alice's stage comes before Bob's: she opens the link and sends activations, he sends their gradients back."""

from __future__ import annotations

import contextlib
import math
import random
import struct
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farandole.protocol.activations import (
    DATA_BYTES,
    DOWNSTREAM,
    MAX_CONTROL_BYTES,
    MAX_CREDITS,
    MAX_OPEN,
    MAX_QUESTION_BYTES,
    MAX_SECONDS_LEFT,
    TICKET_BYTES,
    TRANSITIONS,
    UPSTREAM,
    Answer,
    Control,
    Credits,
    DataReceived,
    Dropped,
    Event,
    Forward,
    Gradient,
    Hello,
    Link,
    Question,
    Settled,
    Step,
    Welcome,
    decode_question,
    encode_question,
    shape_hash,
)
from farandole.protocol.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.exchange import CHUNK_FRAME_BYTES
from farandole.protocol.framing import frame
from farandole.protocol.manifest import Manifest, manifest_from_dict

SIZE = 2 * DATA_BYTES + 100  # three frames
HELLO = Hello(run_id=b"r" * 32, stage=3, shape=b"s" * 32)
FORWARD = Forward(ticket=b"t" * TICKET_BYTES, origin=b"o" * 32, round=7, seconds_left=12.5)
GUARD = b"\xa5" * 64


class Side:
    """One end of a link, with data to send and memory for what comes, between two guards."""

    def __init__(self, is_upstream: bool, size: int = SIZE) -> None:
        self.link = Link(is_upstream, HELLO, size)
        self.data = memoryview(random.Random(is_upstream).randbytes(size))
        self.num_sent = 0
        self._memory = bytearray(GUARD + bytes(size) + GUARD)
        self.size = size

    @property
    def memory(self) -> memoryview:
        return memoryview(self._memory)[len(GUARD) : -len(GUARD)]

    @property
    def is_guarded(self) -> bool:
        return self._memory.startswith(GUARD) and self._memory.endswith(GUARD)

    def say(self, message: Control) -> bytes:
        if isinstance(message, Forward | Gradient):
            self.num_sent = 0
        return self.link.send(message)

    def next_data(self, size: int = DATA_BYTES) -> bytes:
        data = self.data[self.num_sent : self.num_sent + size]
        self.num_sent += len(data)
        return self.link.send_data(data)

    def rest(self) -> bytes:
        """Frames with all data that are still to be sent."""
        frames = b""
        while self.link.is_sending:
            frames += self.next_data()
        return frames

    def hear(self, data: bytes, piece: int = 2**20, place: bool = True) -> list[Event]:
        """The events; what comes goes into memory, or nowhere."""
        events: list[Event] = []
        for start in range(0, len(data), piece):
            self.link.receive_data(data[start : start + piece])
            while (event := self.link.next_event()) is not None:
                events.append(event)
                if self.link.awaits_place:
                    self.link.place(self.memory if place else None)
        return events


def pair(credits: int = 4, size: int = SIZE) -> tuple[Side, Side]:
    """Both have greeted."""
    alice, bob = Side(UPSTREAM, size), Side(DOWNSTREAM, size)
    assert bob.hear(alice.say(HELLO)) == [HELLO]
    assert alice.hear(bob.say(Welcome(credits))) == [Welcome(credits)]
    assert alice.link.is_open
    assert bob.link.is_open
    return alice, bob


def lie(message: Control) -> bytes:
    """The bytes of a message, whether it may be sent or not."""
    return frame(b"\0" + msgspec.msgpack.encode(message), MAX_CONTROL_BYTES)


def lying_data(size: int) -> bytes:
    return frame(b"\1" + bytes(size), CHUNK_FRAME_BYTES)


def forward(alice: Side, bob: Side) -> None:
    index = alice.link.num_forwarded
    assert bob.hear(alice.say(FORWARD) + alice.rest()) == [FORWARD, DataReceived(index)]


def give_back(alice: Side, bob: Side, index: int) -> None:
    assert alice.hear(bob.say(Gradient(index)) + bob.rest()) == [Gradient(index), DataReceived(index)]


def bring_to(alice: Side, bob: Side, step: Step) -> None:
    """Microbatch 0 to this step, at both ends."""
    if step is Step.FORWARD:
        bob.hear(alice.say(FORWARD) + alice.next_data())
    else:
        forward(alice, bob)
    if step is Step.BACK:
        alice.hear(bob.say(Gradient(0)) + bob.next_data())
    elif step is Step.RETURNED:
        give_back(alice, bob, 0)
    assert alice.link.open == bob.link.open == {0: step}


# Stories


@pytest.mark.parametrize("piece", [1, 7, CHUNK_FRAME_BYTES, 2**20])
def test_there_and_back_however_the_stream_is_cut(piece: int) -> None:
    alice, bob = pair(1, size=300 if piece == 1 else SIZE)
    assert bob.hear(alice.say(FORWARD) + alice.rest(), piece) == [FORWARD, DataReceived(0)]
    assert bob.memory == alice.data
    assert alice.hear(bob.say(Gradient(0)) + bob.rest(), piece) == [Gradient(0), DataReceived(0)]
    assert alice.memory == bob.data
    assert bob.hear(alice.say(Settled(0, is_kept=True)), piece) == [Settled(0, is_kept=True)]
    assert alice.hear(bob.say(Credits(2)), piece) == [Credits(2)]
    assert alice.link.open == bob.link.open == {}
    assert (alice.is_guarded, bob.is_guarded) == (True, True)


def test_other_frames_come_between_data() -> None:
    alice, bob = pair()
    forward(alice, bob)
    forward(alice, bob)
    give_back(alice, bob, 0)
    frames = [alice.say(FORWARD), alice.next_data(10), alice.say(Settled(0, is_kept=True)), alice.next_data()]
    frames += [alice.say(Settled(1, is_kept=False)), alice.rest()]
    events = [event for data in frames for event in bob.hear(data)]
    assert events == [FORWARD, Settled(0, is_kept=True), Settled(1, is_kept=False), DataReceived(2)]
    assert bob.memory == alice.data
    frames = [bob.say(Gradient(2)), bob.next_data(), bob.say(Credits(9)), bob.rest()]
    events = [event for data in frames for event in alice.hear(data)]
    assert events == [Gradient(2), Credits(9), DataReceived(2)]
    assert alice.memory == bob.data


def test_data_move_both_ways_at_once() -> None:
    alice, bob = pair()
    forward(alice, bob)
    there, back = alice.say(FORWARD), bob.say(Gradient(0))
    assert bob.hear(there) + alice.hear(back) == [FORWARD, Gradient(0)]
    while alice.link.is_sending:
        there, back = alice.next_data(), bob.next_data()
        events = bob.hear(there) + alice.hear(back)
    assert events == [DataReceived(1), DataReceived(0)]
    assert bob.memory == alice.data
    assert alice.memory == bob.data


def test_gradients_come_in_any_order() -> None:
    alice, bob = pair()
    for _ in range(3):
        forward(alice, bob)
    for index in (1, 2, 0):
        give_back(alice, bob, index)
        assert bob.hear(alice.say(Settled(index, is_kept=True))) == [Settled(index, is_kept=True)]


def test_a_full_frame_of_data_fills_the_longest_frame() -> None:
    alice, _ = pair()
    alice.say(FORWARD)
    with pytest.raises(LocalProtocolError):
        alice.next_data(DATA_BYTES + 1)
    alice.num_sent = 0
    assert len(alice.next_data()) == CHUNK_FRAME_BYTES


@pytest.mark.parametrize("code", ["b", "h", "i"])
def test_data_and_memory_of_any_format(code: Literal["b", "h", "i"]) -> None:
    alice, bob = pair(size=80)
    count = 80 // struct.calcsize(code)
    data, memory = memoryview(bytes(range(80))).cast(code), memoryview(bytearray(80)).cast(code)
    bob.link.receive_data(alice.say(FORWARD))
    bob.link.next_event()
    bob.link.place(memory)
    for part in (data[: count // 2], data[count // 2 :]):
        bob.link.receive_data(alice.link.send_data(part))
        event = bob.link.next_event()
    assert event == DataReceived(0)
    assert memory.tobytes() == data.tobytes()


def test_the_longest_messages_fit() -> None:
    far = 2**53
    for message in (HELLO, FORWARD, Dropped(far, "\U0001f600" * 128, is_untouched=True), Settled(far, is_kept=True)):
        assert len(lie(message)) <= MAX_CONTROL_BYTES


def test_a_control_frame_that_is_too_long_is_not_read() -> None:
    for side in pair():
        with pytest.raises(RemoteProtocolError, match=f"{MAX_CONTROL_BYTES + 1} bytes"):
            side.hear(frame(b"\0" + b"\x91" * MAX_CONTROL_BYTES, CHUNK_FRAME_BYTES))


def test_what_is_told_of_a_microbatchs_shape() -> None:
    model = {"num_layers": 2, "width": 32, "num_heads": 2, "hidden": 64, "context": 32, "vocabulary": 256}
    run = {"name": "a run", "inner": {"batch_size": 12}}

    def manifest(codec: str = "bf16", microbatch_size: int = 2, **changes: int) -> Manifest:
        pipeline = {"codec": codec, "microbatch_size": microbatch_size}
        return manifest_from_dict({**run, "model": model | changes, "pipeline": pipeline})

    same = shape_hash(manifest())
    others = [manifest(width=64), manifest(context=33), manifest(microbatch_size=3), manifest(codec="int8")]
    assert len({same, *map(shape_hash, others)}) == 5


# Crossings: who has ended a microbatch ignores what else comes of it


def test_dropped_and_settled_cross() -> None:
    alice, bob = pair()
    forward(alice, bob)
    settled, dropped = alice.say(Settled(0, is_kept=False)), bob.say(Dropped(0, "out of time", is_untouched=True))
    assert alice.hear(dropped) == []
    assert bob.hear(settled) == []
    forward(alice, bob)
    assert alice.link.open == bob.link.open == {1: Step.THERE}


def test_a_gradient_and_settled_cross() -> None:
    alice, bob = pair()
    forward(alice, bob)
    settled, gradient = alice.say(Settled(0, is_kept=False)), bob.say(Gradient(0)) + bob.next_data()
    assert bob.hear(settled) == [Settled(0, is_kept=False)]
    assert alice.hear(gradient) == []
    assert bob.link.is_sending, "what was announced is sent to its end"
    assert alice.hear(bob.rest()) == []
    assert bytes(alice.memory) == bytes(SIZE), "nothing was applied"
    forward(alice, bob)
    give_back(alice, bob, 1)


@pytest.mark.parametrize("num_frames", [0, 1, 2])
def test_what_is_dropped_on_its_way_goes_nowhere_from_then_on(num_frames: int) -> None:
    alice, bob = pair()
    bob.hear(alice.say(FORWARD))
    for _ in range(num_frames):
        bob.hear(alice.next_data())
    before = bytes(bob.memory)
    dropped = bob.say(Dropped(0, "too late", is_untouched=True))
    assert alice.hear(dropped) == [Dropped(0, "too late", is_untouched=True)]
    assert alice.link.is_sending
    assert bob.hear(alice.rest()) == []
    assert bob.memory == before
    forward(alice, bob)


def test_a_refusal_needs_no_place() -> None:
    alice, bob = pair()
    bob.link.receive_data(alice.say(FORWARD) + alice.next_data())
    assert bob.link.next_event() == FORWARD
    assert bob.link.awaits_place
    with pytest.raises(LocalProtocolError):
        bob.link.next_event()
    assert alice.hear(bob.say(Dropped(0, "of another time", is_untouched=True)))
    assert not bob.link.awaits_place
    assert bob.link.next_event() is None
    assert bob.hear(alice.rest()) == []


def test_what_is_placed_nowhere_is_not_told_of() -> None:
    alice, bob = pair()
    assert bob.hear(alice.say(FORWARD) + alice.rest(), place=False) == [FORWARD]
    assert bob.link.open == {0: Step.THERE}
    assert alice.hear(bob.say(Dropped(0, "no slot is free", is_untouched=True)))


def test_settled_on_its_way_back_ends_it_at_both() -> None:
    alice, bob = pair()
    bring_to(alice, bob, Step.BACK)
    before = bytes(alice.memory)
    assert bob.hear(alice.say(Settled(0, is_kept=False))) == [Settled(0, is_kept=False)]
    assert alice.hear(bob.rest()) == []
    assert alice.memory == before
    assert alice.link.open == bob.link.open == {}


def test_a_gradient_that_is_dropped_on_its_way_is_none() -> None:
    """Bob's round is over before his line has taken the gradient: its memory is another's from then on."""
    alice, bob = pair()
    bring_to(alice, bob, Step.BACK)
    dropped = Dropped(0, "the round is over", is_untouched=False)
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


def test_the_memory_of_data_that_never_come_is_given_up() -> None:
    """Mallory announces data and sends them no more: the rest of the link goes on, and no memory waits for her."""
    mallory, bob = pair()
    forward(mallory, bob)
    bob.link.receive_data(mallory.say(FORWARD) + mallory.next_data())
    bob.link.next_event()
    memory = bytearray(SIZE)
    bob.link.place(memoryview(memory))
    assert bob.link.next_event() is None
    with pytest.raises(BufferError):
        memory.clear()
    assert bob.say(Dropped(1, "out of time", is_untouched=True))
    memory.clear()  # nothing refers to it
    give_back(mallory, bob, 0)
    assert bob.hear(mallory.say(Settled(0, is_kept=True))) == [Settled(0, is_kept=True)]
    assert bob.link.open == {}


def test_the_memory_of_what_has_come_is_given_up() -> None:
    alice, bob = pair(size=100)
    bob.link.receive_data(alice.say(FORWARD) + alice.rest())
    bob.link.next_event()
    memory = bytearray(100)
    bob.link.place(memoryview(memory))
    assert bob.link.next_event() == DataReceived(0)
    memory.clear()


# The table


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize(("who", "kind"), TRANSITIONS)
def test_a_microbatch_goes_as_the_table_says(who: bool, kind: type[Gradient | Dropped | Settled], step: Step) -> None:
    messages: dict[type, Control] = {
        Gradient: Gradient(0),
        Dropped: Dropped(0, "", is_untouched=False),
        Settled: Settled(0, is_kept=False),
    }
    alice, bob = pair()
    bring_to(alice, bob, step)
    sender, receiver = (alice, bob) if who is UPSTREAM else (bob, alice)
    message, before = messages[kind], bytes(receiver.memory)
    if step in TRANSITIONS[who, kind]:
        following = TRANSITIONS[who, kind][step]
        expected = {} if following is None else {0: following}
        assert receiver.hear(sender.say(message)) == [message]
    else:
        expected = {0: step}
        with pytest.raises(LocalProtocolError):
            sender.link.send(message)
        with pytest.raises(RemoteProtocolError):
            receiver.hear(lie(message))
    assert sender.link.open == receiver.link.open == expected
    assert receiver.memory == before


@pytest.mark.parametrize("step", Step)
def test_only_what_has_returned_is_kept(step: Step) -> None:
    alice, bob = pair()
    bring_to(alice, bob, step)
    kept = Settled(0, is_kept=True)
    if step is Step.RETURNED:
        assert bob.hear(alice.say(kept)) == [kept]
        return
    with pytest.raises(LocalProtocolError):
        alice.link.send(kept)
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(kept))
    assert alice.link.open == bob.link.open == {0: step}


def test_no_gradient_before_the_activations_nor_twice_and_no_drop_after_it() -> None:
    dropped = Dropped(0, "", is_untouched=False)
    for step, message in (
        (Step.FORWARD, Gradient(0)),
        (Step.BACK, Gradient(0)),
        (Step.RETURNED, Gradient(0)),
        (Step.RETURNED, dropped),
    ):
        alice, bob = pair()
        bring_to(alice, bob, step)
        with pytest.raises(LocalProtocolError):
            bob.link.send(message)
        with pytest.raises(RemoteProtocolError):
            alice.hear(lie(message))


def test_whatever_its_step_a_microbatch_can_be_ended_by_its_upstream_node() -> None:
    for step in Step:
        alice, bob = pair()
        bring_to(alice, bob, step)
        assert bob.hear(alice.say(Settled(0, is_kept=False))) == [Settled(0, is_kept=False)]
        assert alice.link.open == bob.link.open == {}


# Greetings


@pytest.mark.parametrize(
    ("field", "value"), [("run_id", b"R" * 32), ("stage", 4), ("shape", b"S" * 32), ("version", 2)]
)
def test_a_link_of_something_else_is_refused(field: str, value: object) -> None:
    other = msgspec.structs.replace(HELLO, **{field: value})
    alice, bob = Side(UPSTREAM), Side(DOWNSTREAM)
    with pytest.raises(LocalProtocolError, match=field.replace("_", " ")):
        alice.link.send(other)
    with pytest.raises(RemoteProtocolError, match=field.replace("_", " ")):
        bob.hear(lie(other))
    with pytest.raises(LocalProtocolError):
        bob.link.send(Welcome(1))
    assert not bob.link.is_open


def test_nobody_is_greeted_twice() -> None:
    alice, bob = pair()
    for sender, receiver, message in ((alice, bob, HELLO), (bob, alice, Welcome(4))):
        with pytest.raises(LocalProtocolError):
            sender.link.send(message)
        with pytest.raises(RemoteProtocolError):
            receiver.hear(lie(message))


def test_the_upstream_node_greets_first() -> None:
    alice, bob = Side(UPSTREAM), Side(DOWNSTREAM)
    with pytest.raises(LocalProtocolError):
        bob.link.send(Welcome(1))
    with pytest.raises(RemoteProtocolError):
        alice.hear(lie(Welcome(1)))
    assert (alice.link.is_open, alice.link.credits) == (False, 0)


def test_nobody_greets_as_the_other() -> None:
    alice, bob = Side(UPSTREAM), Side(DOWNSTREAM)
    with pytest.raises(LocalProtocolError):
        bob.link.send(HELLO)
    with pytest.raises(RemoteProtocolError):
        alice.hear(lie(HELLO))
    assert bob.hear(alice.say(HELLO)) == [HELLO]
    with pytest.raises(LocalProtocolError):
        alice.link.send(Welcome(1))
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(Welcome(1)))


def test_hello_twice_before_the_answer() -> None:
    alice, bob = Side(UPSTREAM), Side(DOWNSTREAM)
    assert bob.hear(alice.say(HELLO)) == [HELLO]
    with pytest.raises(LocalProtocolError):
        alice.link.send(HELLO)
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(HELLO))


@pytest.mark.parametrize(
    "message",
    [Credits(1), FORWARD, Gradient(0), Dropped(0, "", is_untouched=True), Settled(0, is_kept=False)],
    ids=lambda message: type(message).__name__,
)
def test_nothing_is_said_before_the_greetings(message: Control) -> None:
    for is_upstream in (UPSTREAM, DOWNSTREAM):
        for is_greeted in (False, True):
            side = Side(is_upstream)
            if is_greeted:
                side.say(HELLO) if is_upstream else side.hear(lie(HELLO))
            with pytest.raises(LocalProtocolError):
                side.link.send(message)
            with pytest.raises(RemoteProtocolError):
                side.hear(lie(message))
            assert (side.link.credits, side.link.num_forwarded, side.link.open) == (0, 0, {})


def test_no_data_before_they_are_announced() -> None:
    for side in (Side(UPSTREAM), Side(DOWNSTREAM), *pair()):
        with pytest.raises(LocalProtocolError):
            side.link.send_data(memoryview(b"data"))
        with pytest.raises(RemoteProtocolError):
            side.hear(lying_data(4))


# A peer that lies


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
    with pytest.raises(LocalProtocolError):
        wrong.link.send(message)
    with pytest.raises(RemoteProtocolError):
        receiver.hear(lie(message))
    assert alice.link.open == bob.link.open == {0: Step.THERE}


@pytest.mark.parametrize("index", [1, 2, 2**53])
def test_nobody_speaks_of_what_was_not_forwarded(index: int) -> None:
    alice, bob = pair()
    forward(alice, bob)
    for sender, receiver, message in (
        (bob, alice, Gradient(index)),
        (bob, alice, Dropped(index, "", is_untouched=True)),
        (alice, bob, Settled(index, is_kept=False)),
    ):
        with pytest.raises(LocalProtocolError):
            sender.link.send(message)
        with pytest.raises(RemoteProtocolError):
            receiver.hear(lie(message))


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
    bob.say(Credits(2))  # on its way: Alice does not know of it
    with pytest.raises(LocalProtocolError):
        alice.link.send(FORWARD)
    bob.hear(lie(FORWARD) + lying_data(DATA_BYTES) * 2 + lying_data(100))
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(FORWARD))
    assert bob.link.num_forwarded == 2


def test_credits_are_not_taken_back_and_have_a_bound() -> None:
    alice, bob = pair(credits=3)
    forward(alice, bob)
    assert alice.hear(bob.say(Credits(3)) + bob.say(Credits(1 + MAX_CREDITS)))
    for total in (0, 3, MAX_CREDITS, 2 + MAX_CREDITS, 2**53):
        with pytest.raises(LocalProtocolError):
            bob.link.send(Credits(total))
        with pytest.raises(RemoteProtocolError):
            alice.hear(lie(Credits(total)))
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
    with pytest.raises(LocalProtocolError):
        mallory.link.send(FORWARD)
    with pytest.raises(RemoteProtocolError):
        bob.hear(lie(FORWARD))
    assert len(bob.link.open) == MAX_OPEN


@pytest.mark.parametrize("size", [0, 1, 101])
def test_data_are_as_many_as_the_run_says(size: int) -> None:
    """The last hundred bytes of a microbatch are due."""
    alice, bob = pair()
    assert bob.hear(alice.say(FORWARD) + alice.next_data() + alice.next_data()) == [FORWARD]
    for wrong in (0, 101):
        with pytest.raises(LocalProtocolError):
            alice.link.send_data(memoryview(bytes(wrong)))
    if size == 1:
        assert bob.hear(lying_data(1)) == []
        assert bob.hear(lying_data(99)) == [DataReceived(0)]
        size = 1  # more than is left
    with pytest.raises(RemoteProtocolError):
        bob.hear(lying_data(size))
    assert bob.is_guarded


def test_data_of_one_microbatch_at_a_time() -> None:
    alice, bob = pair()
    forward(alice, bob)
    forward(alice, bob)
    alice.hear(bob.say(Gradient(0)) + bob.next_data())
    bob.hear(alice.say(FORWARD) + alice.next_data())
    for sender, receiver, message in ((alice, bob, FORWARD), (bob, alice, Gradient(1))):
        with pytest.raises(LocalProtocolError):
            sender.link.send(message)
        with pytest.raises(RemoteProtocolError):
            receiver.hear(lie(message))
    assert alice.link.open == bob.link.open == {0: Step.BACK, 1: Step.THERE, 2: Step.FORWARD}


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff", (DATA_BYTES + 2).to_bytes(4, "big")])
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
        b"\0" + b"\x94\x06\x00\xa1\xff\xc3",  # a reason that is no text
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    alice, bob = pair()
    forward(alice, bob)
    for side in (alice, bob):
        with pytest.raises(RemoteProtocolError):
            side.hear(frame(payload, DATA_BYTES))
        assert side.link.open == {0: Step.THERE}
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


def test_a_place_is_due_once_and_must_be_writable_and_large_enough() -> None:
    alice, bob = pair()
    with pytest.raises(LocalProtocolError):
        bob.link.place(bob.memory)
    bob.link.receive_data(alice.say(FORWARD))
    assert bob.link.next_event() == FORWARD
    for memory in (memoryview(bytearray(SIZE - 1)), memoryview(bytes(SIZE))):
        with pytest.raises(LocalProtocolError):
            bob.link.place(memory)
    assert bob.link.awaits_place
    bob.link.place(bob.memory)
    with pytest.raises(LocalProtocolError):
        bob.link.place(bob.memory)


# Fuzzing


def _transcripts(size: int) -> tuple[list[bytes], list[bytes]]:
    """The frames of one good conversation, Alice's and Bob's."""
    alice, bob = Side(UPSTREAM, size), Side(DOWNSTREAM, size)
    frames: dict[Side, list[bytes]] = {alice: [], bob: []}

    def tell(sender: Side, receiver: Side, data: bytes) -> None:
        frames[sender].append(data)
        receiver.hear(data)

    def tell_data(sender: Side, receiver: Side) -> None:
        while sender.link.is_sending:
            tell(sender, receiver, sender.next_data(size // 2))

    tell(alice, bob, alice.say(HELLO))
    tell(bob, alice, bob.say(Welcome(3)))
    for _ in range(3):
        tell(alice, bob, alice.say(FORWARD))
        tell_data(alice, bob)
    tell(bob, alice, bob.say(Dropped(1, "no slot is free", is_untouched=True)))
    for index in (0, 2):
        tell(bob, alice, bob.say(Gradient(index)))
        tell_data(bob, alice)
        tell(alice, bob, alice.say(Settled(index, is_kept=index == 0)))
    tell(bob, alice, bob.say(Credits(6)))
    return frames[alice], frames[bob]


FUZZ_SIZE = 40
TRANSCRIPTS = dict(zip((UPSTREAM, DOWNSTREAM), _transcripts(FUZZ_SIZE), strict=True))


def react(side: Side, event: Event) -> None:
    """As an honest node would, at once."""
    match event:
        case Hello():
            side.say(Welcome(3))
        case Welcome() | Credits():
            while side.link.num_forwarded < min(side.link.credits, 3):
                side.say(FORWARD)
                side.rest()
        case DataReceived(index) if side.link.is_upstream:
            side.say(Settled(index, is_kept=True))
        case DataReceived(index):
            side.say(Gradient(index))
            side.rest()


def expose(side: Side, stream: bytes, piece: int) -> list[Event]:
    """Let an honest node hear this; the events until it closes the stream."""
    events: list[Event] = []
    if side.link.is_upstream:
        side.say(HELLO)
    with contextlib.suppress(RemoteProtocolError):
        for start in range(0, len(stream), piece):
            side.link.receive_data(stream[start : start + piece])
            while (event := side.link.next_event()) is not None:
                events.append(event)
                if side.link.awaits_place:
                    side.link.place(side.memory)
                react(side, event)
    assert side.is_guarded
    assert len(side.link.open) <= side.link.num_forwarded <= side.link.credits <= 2 * MAX_CREDITS
    assert side.link._parser.buffered <= CHUNK_FRAME_BYTES + piece
    ended = [event.index for event in events if isinstance(event, Dropped | Settled)]
    received = [event.index for event in events if isinstance(event, DataReceived)]
    assert len(set(ended)) == len(ended), "a microbatch ends once"
    assert len(set(received)) == len(received), "and its data come once"
    return events


@pytest.mark.parametrize("who", [UPSTREAM, DOWNSTREAM])
def test_the_conversation_that_is_mutated_is_a_good_one(who: bool) -> None:
    events = expose(Side(not who, FUZZ_SIZE), b"".join(TRANSCRIPTS[who]), 7)
    assert sum(isinstance(event, DataReceived) for event in events) == (3 if who is UPSTREAM else 2)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([UPSTREAM, DOWNSTREAM]),
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=4),
    st.integers(0, 500),
    st.binary(max_size=64),
    st.integers(1, 500),
)
def test_mutated_bytes_raise_remote_protocol_errors_alone(
    who: bool, flips: list[tuple[int, int]], cut: int, extra: bytes, piece: int
) -> None:
    stream = bytearray(b"".join(TRANSCRIPTS[who]))
    for position, value in flips:
        stream[position % len(stream)] = value
    stream[cut:cut] = extra
    expose(Side(not who, FUZZ_SIZE), bytes(stream), piece)


_INDICES = st.integers(0, 5)
_MESSAGES: st.SearchStrategy[Control] = st.one_of(
    st.just(HELLO),
    st.just(FORWARD),
    st.builds(Welcome, st.integers(0, MAX_CREDITS)),
    st.builds(Credits, st.integers(0, 8)),
    st.builds(Gradient, _INDICES),
    st.builds(Dropped, _INDICES, st.text(max_size=8), st.booleans()),
    st.builds(Settled, _INDICES, st.booleans()),
)
_FRAMES = st.one_of(_MESSAGES.map(lie), st.integers(0, FUZZ_SIZE + 1).map(lying_data))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([UPSTREAM, DOWNSTREAM]),
    st.lists(
        st.tuples(st.sampled_from(["leave out", "twice", "swap", "insert"]), st.integers(0, 50), _FRAMES), max_size=5
    ),
    st.integers(1, 500),
)
def test_mutated_conversations_keep_only_what_has_come(
    who: bool, mutations: list[tuple[str, int, bytes]], piece: int
) -> None:
    """Frames are whole, but left out, doubled, swapped or another's."""
    frames = list(TRANSCRIPTS[who])
    for mutation, number, other in mutations:
        at = number % len(frames)
        match mutation:
            case "leave out" if len(frames) > 1:
                del frames[at]
            case "twice":
                frames.insert(at, frames[at])
            case "swap":
                frames[at - 1], frames[at] = frames[at], frames[at - 1]
            case "insert":
                frames.insert(at, other)
    side = Side(not who, FUZZ_SIZE)
    events = expose(side, b"".join(frames), piece)
    kept = [event.index for event in events if isinstance(event, Settled) and event.is_kept]
    assert set(kept) <= {event.index for event in events if isinstance(event, DataReceived)}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([UPSTREAM, DOWNSTREAM]), st.lists(_FRAMES, max_size=30), st.integers(1, 500))
def test_arbitrary_conversations_raise_remote_protocol_errors_alone(who: bool, frames: list[bytes], piece: int) -> None:
    greeting = lie(HELLO if who is UPSTREAM else Welcome(3))
    expose(Side(not who, FUZZ_SIZE), greeting + b"".join(frames), piece)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_raise_remote_protocol_errors_alone(data: bytes, is_framed: bool) -> None:
    stream = frame(b"\0" + data, MAX_CONTROL_BYTES) if is_framed else data
    for side in (Side(UPSTREAM, FUZZ_SIZE), Side(DOWNSTREAM, FUZZ_SIZE)):
        expose(side, stream, 100)
    for side in pair(size=FUZZ_SIZE):
        with contextlib.suppress(RemoteProtocolError):
            side.hear(stream)
        assert side.is_guarded


@pytest.mark.parametrize("is_kept", [True, False, None])
def test_questions_and_answers_survive_the_wire(is_kept: bool | None) -> None:
    ticket = b"t" * TICKET_BYTES
    for message in (Question(ticket), Answer(ticket, is_kept)):
        payload = encode_question(message)
        assert len(payload) <= MAX_QUESTION_BYTES
        assert decode_question(payload) == message
        for wrong in (payload[:-1], payload + b"\0", encode_question(Question(ticket[1:]))):
            with pytest.raises(RemoteProtocolError):
                decode_question(wrong)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=MAX_QUESTION_BYTES), st.sampled_from([b"", b"\x92\x01", b"\x93\x02", b"\x92\x01\xc4\x10"]))
def test_arbitrary_bytes_are_no_question(data: bytes, head: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(decode_question(head + data), Question | Answer)


# Two honest nodes, whose frames take their time

LINK_SIZE = 12
NUM_SLOTS = 3


def activations(index: int) -> bytes:
    return bytes((index % 256, 0)) * (LINK_SIZE // 2)


def gradient(index: int) -> bytes:
    return bytes((index % 256, 1)) * (LINK_SIZE // 2)


class End:
    """A node's end of the link: what it sends is in the wire until the other takes it out."""

    def __init__(self, is_upstream: bool) -> None:
        self.link = Link(is_upstream, HELLO, LINK_SIZE)
        self.wire = bytearray()
        """What has been sent and not yet been heard."""
        self.outgoing = b""
        self.memory: dict[int, bytearray] = {}
        """Of the microbatches of which something comes."""
        self.received: set[int] = set()
        self.gone: set[int] = set()
        """Placed nowhere."""
        self.ended: dict[int, bool] = {}
        """Whether they are kept."""

    def say(self, message: Control, data: bytes = b"") -> None:
        self.wire += self.link.send(message)
        self.outgoing = data or self.outgoing

    def send_data(self, size: int) -> None:
        size = min(size, len(self.outgoing))
        self.wire += self.link.send_data(memoryview(self.outgoing)[:size])
        self.outgoing = self.outgoing[size:]

    def end(self, index: int, is_kept: bool) -> None:
        """Its memory serves another from now on."""
        assert index not in self.ended, "a microbatch ends once"
        self.ended[index] = is_kept
        memory = self.memory.pop(index, None)
        if memory is not None:
            memory.clear()  # refused with BufferError if anything still referred to it

    def in_step(self, *steps: Step) -> list[int]:
        return [index for index, step in self.link.open.items() if step in steps]


# Mostly all, so that microbatches get far.
_PIECES = st.one_of(st.none(), st.none(), st.integers(1, 120))
_DATA_SIZES = st.one_of(st.just(LINK_SIZE), st.integers(1, LINK_SIZE))
_CHOICES = st.sampled_from(["take"] * 8 + ["leave", "drop"])
_DROPPABLE = (Step.FORWARD, Step.THERE, Step.BACK)
_PATIENCE = st.integers(0, 5)


class TwoNodes(RuleBasedStateMachine):
    """Each does what it may, whenever; nothing that either hears may be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.alice, self.bob = End(UPSTREAM), End(DOWNSTREAM)

    @initialize()
    def they_greet(self) -> None:
        self.alice.say(HELLO)
        self.arrive(self.alice, self.bob)
        self.bob.say(Welcome(NUM_SLOTS))
        self.arrive(self.bob, self.alice)

    @precondition(lambda self: self.alice.wire)
    @rule(size=_PIECES, choice=_CHOICES)
    def bob_hears(self, size: int | None, choice: str) -> None:
        self.arrive(self.alice, self.bob, size, choice)

    @precondition(lambda self: self.bob.wire)
    @rule(size=_PIECES, choice=_CHOICES)
    def alice_hears(self, size: int | None, choice: str) -> None:
        self.arrive(self.bob, self.alice, size, choice)

    def arrive(self, sender: End, receiver: End, size: int | None = None, choice: str = "take") -> None:
        data = bytes(sender.wire[:size])
        del sender.wire[:size]
        receiver.link.receive_data(data)
        while (event := receiver.link.next_event()) is not None:
            self.hear(receiver, event, choice)

    def hear(self, end: End, event: Event, choice: str) -> None:
        match event:
            case Forward():
                self.place(end, end.link.num_forwarded - 1, choice)
            case Gradient(index):
                self.place(end, index, choice)
            case DataReceived(index):
                assert index not in end.received | end.gone
                assert index in end.link.open
                assert end.memory[index] == (gradient if end is self.alice else activations)(index)
                end.received.add(index)
                del end.memory[index]
            case Dropped(index):
                end.end(index, is_kept=False)
            case Settled(index, is_kept):
                end.end(index, is_kept)
            case Hello() | Welcome() | Credits():
                pass

    def place(self, end: End, index: int, choice: str) -> None:
        assert end.link.awaits_place
        if choice == "drop":
            self.give_up(end, index)
        elif choice == "leave":
            end.gone.add(index)
            end.link.place(None)
        else:
            memory = end.memory[index] = bytearray(LINK_SIZE)
            end.link.place(memoryview(memory))
        assert not end.link.awaits_place

    def give_up(self, end: End, index: int) -> None:
        end.say(Settled(index, is_kept=False) if end is self.alice else Dropped(index, "given up", is_untouched=True))
        end.end(index, is_kept=False)

    @precondition(lambda self: self.alice.link.num_forwarded < self.alice.link.credits and not self.alice.outgoing)
    @rule()
    def alice_forwards(self) -> None:
        self.alice.say(FORWARD, activations(self.alice.link.num_forwarded))

    @precondition(lambda self: self.alice.outgoing)
    @rule(size=_DATA_SIZES)
    def alice_sends_data(self, size: int) -> None:
        self.alice.send_data(size)

    @precondition(lambda self: self.bob.outgoing)
    @rule(size=_DATA_SIZES)
    def bob_sends_data(self, size: int) -> None:
        self.bob.send_data(size)

    @precondition(lambda self: not self.bob.outgoing and set(self.bob.in_step(Step.THERE)) & self.bob.received)
    @rule(data=st.data())
    def bob_gives_back(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(set(self.bob.in_step(Step.THERE)) & self.bob.received)))
        self.bob.say(Gradient(index), gradient(index))

    @precondition(lambda self: self.bob.in_step(*_DROPPABLE))
    @rule(data=st.data(), patience=_PATIENCE)
    def bob_drops(self, data: st.DataObject, patience: int) -> None:
        if not patience:
            self.give_up(self.bob, data.draw(st.sampled_from(self.bob.in_step(*_DROPPABLE))))

    @precondition(lambda self: self.alice.link.open)
    @rule(data=st.data(), patience=_PATIENCE)
    def alice_gives_up(self, data: st.DataObject, patience: int) -> None:
        if not patience:
            self.give_up(self.alice, data.draw(st.sampled_from(self.alice.in_step(*Step))))

    @precondition(lambda self: set(self.alice.in_step(Step.RETURNED)) & self.alice.received)
    @rule(data=st.data())
    def alice_keeps(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(set(self.alice.in_step(Step.RETURNED)) & self.alice.received)))
        self.alice.say(Settled(index, is_kept=True))
        self.alice.end(index, is_kept=True)

    @rule()
    def bob_gives_credits(self) -> None:
        self.bob.say(Credits(NUM_SLOTS + len(self.bob.ended)))

    @invariant()
    def nobody_has_more_open_than_slots_were_promised(self) -> None:
        alice, bob = self.alice, self.bob
        assert bob.link.num_forwarded <= alice.link.num_forwarded <= alice.link.credits <= bob.link.credits
        for end in (alice, bob):
            assert len(end.link.open) <= NUM_SLOTS
            assert len(end.memory) <= NUM_SLOTS
            assert set(end.link.open).isdisjoint(end.ended)
            assert end.link.num_forwarded == len(end.link.open) + len(end.ended)
            assert end.link.is_sending is bool(end.outgoing)

    def teardown(self) -> None:
        """Alice ends all, and everything arrives: both know the same."""
        alice, bob = self.alice, self.bob
        for _ in range(2):
            for index in alice.in_step(*Step):
                self.give_up(alice, index)
            for end in (alice, bob):
                if end.outgoing:
                    end.send_data(LINK_SIZE)
            self.arrive(alice, bob)
            self.arrive(bob, alice)
        for end in (alice, bob):
            assert end.link.open == {}
            assert end.memory == {}
            assert not end.wire
            assert not end.link.is_sending
            assert not end.link.awaits_place
        assert alice.link.num_forwarded == bob.link.num_forwarded
        assert alice.link.credits == bob.link.credits
        assert alice.ended == bob.ended, "each is kept at both or at none"
        assert {index for index, is_kept in alice.ended.items() if is_kept} <= alice.received & bob.received


TestTwoNodes = TwoNodes.TestCase
TestTwoNodes.settings = settings(max_examples=100, stateful_step_count=200, deadline=None)
