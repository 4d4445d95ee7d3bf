"""Two ends of a link: Alice's stage comes before Bob's, so she sends activations, and he sends their gradients back."""

from __future__ import annotations

import random

import msgspec
import pytest

from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES, TransferReceived
from farandole.protocol.stages import activations as wire
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import frame

SIZE = 2 * wire.DATA_BYTES + 100  # three frames
HELLO = wire.Hello(run_id=b"r" * 32, stage=3, shape=b"s" * 32)
FORWARD = wire.Forward(ticket=b"t" * wire.TICKET_BYTES, origin=b"o" * 32, round=7, seconds_left=12.5)


class Side:
    """One end of a link, with data to send, and the data that were received last."""

    def __init__(self, is_upstream: bool, size: int = SIZE, gradient_size: int = 0) -> None:
        self.link = wire.Link(is_upstream, HELLO, (size, gradient_size or size))
        self.data = memoryview(random.Random(is_upstream).randbytes(self.link.size))
        self.num_sent = 0
        self.memory = b""
        self.size = size

    def say(self, message: wire.Control) -> bytes:
        if isinstance(message, wire.Forward | wire.Gradient):
            self.num_sent = 0
        return self.link.send(message)

    def next_data(self, size: int = wire.DATA_BYTES) -> bytes:
        data = self.data[self.num_sent : self.num_sent + size]
        self.num_sent += len(data)
        return send_data(self.link, data)

    def rest(self) -> bytes:
        """Return frames with all data that are still to be sent."""
        frames = b""
        while self.link.is_sending:
            frames += self.next_data()
        return frames

    def hear(self, data: bytes, piece: int = 2**20) -> list[wire.Event]:
        """Receive bytes and return the events; data go into memory."""
        events: list[wire.Event] = []
        for start in range(0, len(data), piece):
            self.link.pipe.receive_data(data[start : start + piece])
            while (event := next_event(self.link)) is not None:
                events.append(event)
                if isinstance(event, wire.DataReceived):
                    self.memory = bytes(self.link.landed)
        return events


def next_event(link: wire.Link) -> wire.Event | None:
    """Return the next event of a link; None until more data comes."""
    while (event := link.pipe.next_event()) is not None:
        heard: wire.Event | None = None
        if isinstance(event, bytes):
            heard = link.hear(event)
        elif isinstance(event, TransferReceived):
            heard = link.receive(event.name)
        if heard is not None:
            return heard
    return None


def pair(credits: int = 4, size: int = SIZE, gradient_size: int = 0) -> tuple[Side, Side]:
    """Return Alice and Bob after both have greeted."""
    alice, bob = Side(wire.UPSTREAM, size, gradient_size), Side(wire.DOWNSTREAM, size, gradient_size)
    assert bob.hear(alice.say(HELLO)) == [HELLO]
    assert alice.hear(bob.say(wire.Welcome(credits))) == [wire.Welcome(credits)]
    assert alice.link.is_open
    assert bob.link.is_open
    return alice, bob


def lie(message: wire.Control) -> bytes:
    """Return the bytes of a message, whether it may be sent or not."""
    return frame(b"\0" + msgspec.msgpack.encode(message), wire.MAX_CONTROL_BYTES)


def refuse(sender: Side, receiver: Side, message: wire.Control) -> None:
    """Check that a message may neither be sent by one end, nor be received by the other."""
    with pytest.raises(LocalProtocolError):
        sender.link.send(message)
    with pytest.raises(RemoteProtocolError):
        receiver.hear(lie(message))


def lying_data(size: int, offset: int = 0) -> bytes:
    return frame(b"\1" + offset.to_bytes(8, "big") + bytes(size), CHUNK_FRAME_BYTES)


def send_data(link: wire.Link, data: memoryview) -> bytes:
    """Return the next data of the announced transfer, as a frame or as raw bytes."""
    return link.pipe.send_chunk(data.cast("B"))


def forward(alice: Side, bob: Side) -> None:
    index = alice.link.num_forwarded
    assert bob.hear(alice.say(FORWARD) + alice.rest()) == [FORWARD, wire.DataReceived(index)]


def give_back(alice: Side, bob: Side, index: int) -> None:
    assert alice.hear(bob.say(wire.Gradient(index)) + bob.rest()) == [wire.Gradient(index), wire.DataReceived(index)]


def bring_to(alice: Side, bob: Side, step: wire.Transit) -> None:
    """Bring microbatch 0 to this step, at both ends."""
    if step is wire.Transit.FORWARD:
        bob.hear(alice.say(FORWARD) + alice.next_data())
    else:
        forward(alice, bob)
    if step is wire.Transit.BACK:
        alice.hear(bob.say(wire.Gradient(0)) + bob.next_data())
    elif step is wire.Transit.RETURNED:
        give_back(alice, bob, 0)
    assert alice.link.open == bob.link.open == {0: step}
