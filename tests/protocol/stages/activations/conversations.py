"""A good conversation over a link, and a node that hears any other: `tests/fuzz` exposes it to mutated ones."""

from __future__ import annotations

import contextlib

from farandole.protocol.exchange.pipe import CHUNK_FRAME_BYTES
from farandole.protocol.stages import activations as wire
from farandole.protocol.wire.errors import RemoteProtocolError

from .sides import FORWARD, HELLO, Side, next_event


def _transcripts(size: int) -> tuple[list[bytes], list[bytes]]:
    """Return the frames of one good conversation, Alice's and Bob's."""
    alice, bob = Side(wire.UPSTREAM, size), Side(wire.DOWNSTREAM, size)
    frames: dict[Side, list[bytes]] = {alice: [], bob: []}

    def tell(sender: Side, receiver: Side, data: bytes) -> None:
        frames[sender].append(data)
        receiver.hear(data)

    def tell_data(sender: Side, receiver: Side) -> None:
        while sender.link.is_sending:
            tell(sender, receiver, sender.next_data(size // 2))

    tell(alice, bob, alice.say(HELLO))
    tell(bob, alice, bob.say(wire.Welcome(3)))
    for _ in range(3):
        tell(alice, bob, alice.say(FORWARD))
        tell_data(alice, bob)
    tell(bob, alice, bob.say(wire.Dropped(1, "no slot is free", is_untouched=True)))
    for index in (0, 2):
        tell(bob, alice, bob.say(wire.Gradient(index)))
        tell_data(bob, alice)
        tell(alice, bob, alice.say(wire.Settled(index, is_kept=index == 0)))
    tell(bob, alice, bob.say(wire.Credits(6)))
    return frames[alice], frames[bob]


FUZZ_SIZE = 40
TRANSCRIPTS = dict(zip((wire.UPSTREAM, wire.DOWNSTREAM), _transcripts(FUZZ_SIZE), strict=True))


def react(side: Side, event: wire.Event) -> None:
    """React at once, as an honest node would."""
    match event:
        case wire.Hello():
            side.say(wire.Welcome(3))
        case wire.Welcome() | wire.Credits():
            while side.link.num_forwarded < min(side.link.credits, 3):
                side.say(FORWARD)
                side.rest()
        case wire.DataReceived(index) if side.link.is_upstream:
            side.say(wire.Settled(index, is_kept=True))
        case wire.DataReceived(index):
            side.say(wire.Gradient(index))
            side.rest()


def expose(side: Side, stream: bytes, piece: int) -> None:
    """Let an honest node receive this until it closes the stream, and check what it has taken."""
    events: list[wire.Event] = []
    if side.link.is_upstream:
        side.say(HELLO)
    with contextlib.suppress(RemoteProtocolError):
        for start in range(0, len(stream), piece):
            side.link.pipe.receive_data(stream[start : start + piece])
            while (event := next_event(side.link)) is not None:
                events.append(event)
                react(side, event)
    assert len(side.link.landed) in (0, FUZZ_SIZE)
    assert len(side.link.open) <= side.link.num_forwarded <= side.link.credits <= 2 * wire.MAX_CREDITS
    assert len(side.link.pipe.head) <= CHUNK_FRAME_BYTES + piece
    ended = [event.index for event in events if isinstance(event, wire.Dropped | wire.Settled)]
    received = [event.index for event in events if isinstance(event, wire.DataReceived)]
    assert len(set(ended)) == len(ended), "a microbatch ends once"
    assert len(set(received)) == len(received), "and its data come once"
    kept = [event.index for event in events if isinstance(event, wire.Settled) and event.is_kept]
    assert set(kept) <= set(received)
