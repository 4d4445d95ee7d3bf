"""Messages and data over a link between two stages, and messages that cross on it."""

from __future__ import annotations

import pytest

from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES
from farandole.protocol.run.manifest import Manifest, manifest_from_dict
from farandole.protocol.stages.activations import (
    MAX_CONTROL_BYTES,
    MAX_QUESTION_BYTES,
    TICKET_BYTES,
    Answer,
    Credits,
    DataReceived,
    Dropped,
    Gradient,
    Question,
    Settled,
    Transit,
    decode_question,
    encode_question,
    shape_hash,
)
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import frame

from .sides import FORWARD, HELLO, SIZE, bring_to, forward, give_back, lie, pair


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


def test_data_that_never_come_leave_the_rest_of_the_link_as_it_is() -> None:
    mallory, bob = pair()
    forward(mallory, bob)
    assert bob.hear(mallory.say(FORWARD) + mallory.next_data()) == [FORWARD]
    assert bob.say(Dropped(1, "out of time", is_untouched=True))
    give_back(mallory, bob, 0)
    assert bob.hear(mallory.say(Settled(0, is_kept=True))) == [Settled(0, is_kept=True)]
    assert bob.link.open == {}
    assert bob.hear(mallory.rest()) == [], "what comes after all goes nowhere"


# The question whether a microbatch is kept, and its answer


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
