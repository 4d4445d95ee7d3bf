"""A pairing machine that a test drives, and functions that bring it to a given state."""

from __future__ import annotations

import random

import msgspec

from farandole.protocol.rounds.pairing import PROPOSE_UNTIL, Pairing
from farandole.protocol.rounds.pairing_events import (
    Event,
    MessageReceived,
    Output,
    PeersChanged,
    RoundStarted,
    SendMessage,
)
from farandole.protocol.rounds.pairing_messages import Agree, Message, Propose, decode_message, encode_message
from farandole.protocol.run.rules import RoundConfig
from farandole.protocol.wire.timers import SetTimer, TimerFired

ALICE, BOB, CAROL, DAVE, MALLORY = b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 32, b"m" * 32
LOW, MIDDLE, HIGH = bytes(16), b"\x80" + bytes(15), b"\xff" * 16
BOXED = RoundConfig(inner_steps=0, round_seconds=40.0, exchange_seconds=30.0)
SEVERAL = msgspec.structs.replace(BOXED, partners=2)
STEPS = RoundConfig(inner_steps=50, round_seconds=0.0, exchange_seconds=30.0)


class Node:
    """A pairing machine whose outputs a test reads."""

    def __init__(
        self, own: bytes, config: RoundConfig = BOXED, peers: frozenset[bytes] = frozenset(), num_fragments: int = 1
    ) -> None:
        self.machine = Pairing(own, config, random.Random(own), num_fragments)
        self.outputs: list[Output] = []
        self.handle(PeersChanged(peers), 0.0)

    def handle(self, event: Event, now: float) -> list[Output]:
        self.outputs = [output for output in self.machine.handle(event, now) if not isinstance(output, SetTimer)]
        return self.outputs

    def hear(self, peer: bytes, message: Message, now: float) -> list[Output]:
        return self.handle(MessageReceived(peer, encode_message(message)), now)

    @property
    def sent(self) -> list[tuple[bytes, Message]]:
        return [(out.peer, decode_message(out.payload)) for out in self.outputs if isinstance(out, SendMessage)]

    def propose(self, now: float) -> tuple[bytes, Propose]:
        """Let time pass until the node proposes."""
        self.handle(TimerFired(), now)
        return only_proposal(self)


def started(own: bytes = ALICE, config: RoundConfig = BOXED, *peers: bytes) -> Node:
    node = Node(own, config, frozenset(peers or (BOB, CAROL)))
    node.handle(RoundStarted(7), 0.0)
    return node


def matched(config: RoundConfig = BOXED, *, seconds_left: float | None = None) -> tuple[Node, bytes]:
    """Return Alice, whose proposal Bob has accepted, and the session."""
    alice = started(ALICE, config, BOB)
    if config is STEPS:
        peer, proposal = only_proposal(alice)
    else:
        peer, proposal = alice.propose(PROPOSE_UNTIL * 40.0)
    assert peer == BOB
    alice.hear(BOB, Agree(proposal.session, seconds_left), 30.0)
    assert alice.machine.partner == BOB
    return alice, proposal.session


def only_proposal(node: Node) -> tuple[bytes, Propose]:
    ((peer, message),) = node.sent
    assert isinstance(message, Propose)
    return peer, message
