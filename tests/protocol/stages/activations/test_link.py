"""Messages and data over a link between two stages, and messages that cross on it."""

from __future__ import annotations

import struct
from typing import Literal

import pytest

from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES
from farandole.protocol.run.manifest import Manifest, manifest_from_dict
from farandole.protocol.stages.activations import (
    DATA_BYTES,
    MAX_CONTROL_BYTES,
    Credits,
    DataReceived,
    Dropped,
    Gradient,
    Settled,
    Transit,
    shape_hash,
)
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import frame

from .sides import FORWARD, HELLO, SIZE, bring_to, forward, give_back, lie, pair, send_data


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
        bob.link.receive_data(send_data(alice.link, part))
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
            side.hear(frame(b"\0" + b"\x91" * (MAX_CONTROL_BYTES + 1), CHUNK_FRAME_BYTES))


def test_what_is_told_of_a_microbatchs_shape() -> None:
    model = {"num_layers": 2, "width": 32, "num_heads": 2, "hidden": 64, "context": 32, "vocabulary": 256}
    run = {"name": "a run", "inner": {"batch_size": 12}}

    def manifest(codec: str = "bf16", microbatch_size: int = 2, **changes: int) -> Manifest:
        pipeline = {"codec": codec, "microbatch_size": microbatch_size}
        return manifest_from_dict({**run, "model": model | changes, "pipeline": pipeline})

    same = shape_hash(manifest())
    others = [manifest(width=64), manifest(context=33), manifest(microbatch_size=3), manifest(codec="int8")]
    assert len({same, *map(shape_hash, others)}) == 5


def test_dropped_and_settled_cross() -> None:
    alice, bob = pair()
    forward(alice, bob)
    settled, dropped = alice.say(Settled(0, is_kept=False)), bob.say(Dropped(0, "out of time", is_untouched=True))
    assert alice.hear(dropped) == []
    assert bob.hear(settled) == []
    forward(alice, bob)
    assert alice.link.open == bob.link.open == {1: Transit.THERE}


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
    assert bob.link.open == {0: Transit.THERE}
    assert alice.hear(bob.say(Dropped(0, "no slot is free", is_untouched=True)))


def test_settled_on_its_way_back_ends_it_at_both() -> None:
    alice, bob = pair()
    bring_to(alice, bob, Transit.BACK)
    before = bytes(alice.memory)
    assert bob.hear(alice.say(Settled(0, is_kept=False))) == [Settled(0, is_kept=False)]
    assert alice.hear(bob.rest()) == []
    assert alice.memory == before
    assert alice.link.open == bob.link.open == {}


def test_a_gradient_that_is_dropped_on_its_way_is_none() -> None:
    """Bob's round ends before his line has sent the whole gradient: its memory then goes to another microbatch."""
    alice, bob = pair()
    bring_to(alice, bob, Transit.BACK)
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
    """Mallory announces data and does not send them: the rest of the link goes on, and no memory stays reserved."""
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
    memory.clear()  # no reference to it is left
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
