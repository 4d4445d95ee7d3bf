"""Pipes that move several transfers, one after the other, over channels that break."""

from __future__ import annotations

import random

import pytest

from farandole.protocol.exchange import pipe
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

CHANNEL = b"c" * 16
MAX_MESSAGE_BYTES = 100


class End:
    """One end; transfers are announced by messages with their sizes."""

    def __init__(self, is_opener: bool, *, is_large: bool = True) -> None:
        self.pipe = pipe.Pipe(is_opener, max_message_bytes=MAX_MESSAGE_BYTES, is_large=is_large)
        self.pipe.begin()
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self._memory: list[bytearray] = []

    def announce(self, data: bytes) -> bytes:
        self.pipe.offer(len(self.sent), len(data))
        self.sent.append(data)
        return self.pipe.send_message(len(data).to_bytes(4, "big"))

    def hear(self, data: bytes) -> list[pipe.Event]:
        events: list[pipe.Event] = []
        self.pipe.receive_data(data)
        while (event := self.pipe.next_event()) is not None:
            events.append(event)
            match event:
                case bytes() as payload:
                    self._memory.append(bytearray(int.from_bytes(payload, "big")))
                    self.pipe.expect(len(self._memory) - 1, memoryview(self._memory[-1]))
                case pipe.TransferReceived(name):
                    self.received.append(bytes(self._memory[name]))
        return events

    @property
    def rest(self) -> bytes:
        """Return the bytes that are still to be sent."""
        return b"".join(self.sent)[self.pipe.num_sent :]

    def chunks(self) -> bytes:
        frames = b""
        while rest := self.rest:
            size = min(pipe.CHUNK_BYTES, self.pipe.outgoing.head_end - self.pipe.num_sent)
            frames += self.pipe.send_chunk(memoryview(rest)[:size])
        return frames

    def take(self, data: bytes) -> bytes:
        """Take bytes from the channel; return the frames that report complete transfers."""
        frames = b""
        while data:
            head = self.pipe.incoming.open[0]
            piece, data = data[: len(head.rest)], data[len(head.rest) :]
            head.write(memoryview(piece))
            if not head.rest:
                self.pipe.check_whole()
                frames += self.pipe.send(pipe.Received())
                self.received.append(bytes(self._memory[head.name]))
        return frames


def agree(alice: End, bob: End, channel: bytes | None = CHANNEL) -> None:
    for sender, receiver in ((alice, bob), (bob, alice)):
        receiver.hear(sender.pipe.send(pipe.Route(channel, sender.pipe.num_received)))
    assert alice.pipe.channel == bob.pipe.channel == channel


@pytest.mark.parametrize("seed", range(20))
def test_nothing_moves_twice_and_nothing_is_lost_however_channels_break(seed: int) -> None:
    """Both directions at once, with several transfers in progress when each channel breaks."""
    rng = random.Random(seed)
    alice, bob = End(True), End(False)
    num_moved = 0
    for route in range(pipe.MAX_ROUTES):
        agree(alice, bob, None if route == pipe.MAX_ROUTES - 1 else CHANNEL)
        for sender, receiver in ((alice, bob), (bob, alice)):
            if route == pipe.MAX_ROUTES - 1:
                receiver.hear(sender.chunks())
                receiver.hear(sender.announce(rng.randbytes(50)) + sender.chunks())
                continue
            wire = sender.rest
            sender.pipe.num_sent += len(wire)
            for _ in range(rng.randrange(1, 4)):
                if len(sender.pipe.outgoing.open) < pipe.MAX_OPEN:
                    data = rng.randbytes(rng.randrange(1, 1_000))
                    receiver.hear(sender.announce(data))
                    sender.pipe.num_sent += len(data)
                    wire += data
            arrived = wire[: rng.randrange(len(wire))]
            num_moved += len(arrived)
            sender.hear(receiver.take(arrived))
        if not alice.pipe.incoming.open and bob.pipe.incoming.open:
            alice.hear(bob.pipe.send(pipe.Reroute()))
    assert (bob.received, alice.received) == (alice.sent, bob.sent)
    assert alice.pipe.outgoing.settled == alice.pipe.outgoing.end == sum(map(len, alice.sent))


@pytest.mark.parametrize(("is_large", "most"), [(True, pipe.MAX_OPEN), (False, 1)])
def test_so_many_transfers_may_be_on_their_way_and_one_on_the_stream(is_large: bool, most: int) -> None:
    alice, bob = End(True, is_large=is_large), End(False, is_large=is_large)
    if is_large:
        agree(alice, bob)
    for _ in range(most):
        bob.hear(alice.announce(b"x"))
        alice.pipe.num_sent += is_large
    assert not alice.pipe.can_offer
    with pytest.raises(LocalProtocolError):
        alice.announce(b"x")
    with pytest.raises(RemoteProtocolError):
        bob.hear(alice.pipe.send_message((1).to_bytes(4, "big")))


@pytest.mark.parametrize("message", [pipe.Sealed(bytes(32)), pipe.Received(), pipe.Reroute(), pipe.Route(None, 0)])
@pytest.mark.parametrize("step", [pipe.RouteStep.IDLE, pipe.RouteStep.STREAM])
def test_what_the_table_does_not_have_is_refused_at_both_ends(
    step: pipe.RouteStep, message: pipe.Sealed | pipe.Received | pipe.Reroute | pipe.Route
) -> None:
    alice, bob, liar = End(True), End(False), End(True)
    for end in (alice, bob):
        end.pipe.step = step
    with pytest.raises(LocalProtocolError):
        alice.pipe.send(message)
    match message:  # what a liar at this step would send
        case pipe.Route():
            said = liar.pipe.send(message)
        case _:
            said = (6).to_bytes(4, "big") + b"\2" + b"\x90" * 5
    with pytest.raises(RemoteProtocolError):
        bob.hear(said)
