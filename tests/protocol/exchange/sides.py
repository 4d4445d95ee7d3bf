"""Alice initiates an exchange with Bob: both sides, and functions that bring them to a given step."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from blake3 import blake3

from farandole.protocol.exchange import exchange, pipe
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError
from farandole.protocol.wire.framing import frame

Said = exchange.Control | pipe.Control | memoryview
Heard = exchange.Control | pipe.Control | pipe.TransferReceived
HERE = pipe.TransferReceived(exchange.CONTRIBUTION)

SIZE = 2 * pipe.CHUNK_BYTES + 100


class Side:
    """One side of a session, with a contribution to send."""

    def __init__(self, is_initiator: bool, size: int = SIZE) -> None:
        self.contribution = random.Random(is_initiator).randbytes(size)
        self.incoming = bytearray(size)
        self.offer = exchange.Offer(
            run_id=b"r" * 32,
            session=b"s" * 16,
            stage=3,
            layout=b"l" * 32,
            codec="int8",
            size=size,
            round=4 + is_initiator,
            tokens=5,
            seconds_left=30.0,
        )
        self.sealed = pipe.Sealed(blake3(self.contribution).digest())
        self.exchange = exchange.Exchange(is_initiator, self.offer, memoryview(self.incoming))

    def chunks(self) -> Iterator[memoryview]:
        """Yield the chunks that have not been sent yet."""
        for offset in range(self.exchange.pipe.num_sent, len(self.contribution), pipe.CHUNK_BYTES):
            yield memoryview(self.contribution)[offset : offset + pipe.CHUNK_BYTES]

    def send(self, message: Said) -> bytes:
        if isinstance(message, memoryview):
            return self.exchange.pipe.send_chunk(message)
        if isinstance(message, pipe.Route | pipe.Reroute | pipe.Sealed | pipe.Received):
            return self.exchange.pipe.send(message)
        return self.exchange.send(message)

    def receive(self, data: bytes, piece: int = 2**20) -> list[Heard]:
        events: list[Heard] = []
        for start in range(0, len(data), piece):
            self.exchange.pipe.receive_data(data[start : start + piece])
            while (event := self.exchange.pipe.next_event()) is not None:
                events.append(self.exchange.receive(event) if isinstance(event, bytes) else event)
        return events


def tell(sender: Side, receiver: Side, *messages: Said, piece: int = 2**20) -> list[Heard]:
    return receiver.receive(b"".join(sender.send(message) for message in messages), piece)


def lie(message: exchange.Control | pipe.Control) -> bytes:
    """Return the frame of a message, whether it may be sent or not."""
    kind = pipe.CONTROL_KIND if isinstance(message, pipe.Route | pipe.Reroute | pipe.Sealed | pipe.Received) else 0
    return frame(bytes((kind,)) + msgspec.msgpack.encode(message), exchange.MAX_CONTROL_BYTES)


def refuse(sender: Side, receiver: Side, message: exchange.Control | pipe.Control) -> None:
    """Check that a message may neither be sent by one side, nor be received by the other."""
    with pytest.raises(LocalProtocolError):
        sender.send(message)
    with pytest.raises(RemoteProtocolError):
        receiver.receive(lie(message))


def share_offers(alice: Side, bob: Side, piece: int = 2**20) -> None:
    assert tell(alice, bob, alice.offer, piece=piece) == [alice.offer]
    assert tell(bob, alice, bob.offer, piece=piece) == [bob.offer]


def share(alice: Side, bob: Side, piece: int = 2**20) -> None:
    """Run both sides up to their verdicts."""
    share_offers(alice, bob, piece)
    for sender, receiver in ((alice, bob), (bob, alice)):
        *chunks, last = sender.chunks()
        assert tell(sender, receiver, *chunks, sender.sealed, last, piece=piece) == [sender.sealed, HERE]
        assert receiver.incoming == sender.contribution


CHANNEL = b"c" * 16


def open_way(alice: Side, bob: Side, channel: bytes | None = CHANNEL) -> None:
    """Send the initiator's Route and its answer."""
    for side, other in ((alice, bob), (bob, alice)):
        route = pipe.Route(channel, side.exchange.pipe.num_received)
        assert tell(side, other, route) == [route]
    assert alice.exchange.pipe.channel == bob.exchange.pipe.channel == channel


def incoming_of(receiver: Side) -> pipe.Transfer:
    return receiver.exchange.pipe.incoming.open[0]


def move_over(sender: Side, receiver: Side, end: int = pipe.BULK_FROM) -> None:
    """Move bytes over the channel, up to the offset ``end``."""
    incoming = incoming_of(receiver)
    incoming.write(memoryview(sender.contribution)[incoming.position : end])


def assert_can_commit(alice: Side, bob: Side) -> None:
    assert tell(bob, alice, exchange.Accepted()) == [exchange.Accepted()]
    assert bob.exchange.is_in_doubt
    assert tell(alice, bob, exchange.Commit()) == [exchange.Commit()]
    assert tell(bob, alice, exchange.Committed()) == [exchange.Committed()]
    assert alice.incoming == bob.contribution
    assert bob.incoming == alice.contribution
