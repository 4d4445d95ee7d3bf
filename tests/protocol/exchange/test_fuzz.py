"""Any bytes, and any order of the steps that both sides may take."""

from __future__ import annotations

import contextlib

from hypothesis import example, given, settings
from hypothesis import strategies as st

from farandole.protocol.exchange.exchange import Accepted, Commit
from farandole.protocol.exchange.pipe import BULK_FROM, MAX_ROUTES, Received, Reroute, Route, RouteStep
from farandole.protocol.wire.errors import LocalProtocolError

from .sides import CHANNEL, Side, move_over, share_offers, tell


def _transcript() -> bytes:
    """Return all bytes that an initiator sends in one good session, small."""
    alice, bob = Side(True, 200), Side(False, 200)
    offer = alice.exchange.send(alice.offer)
    bob.receive(offer)
    alice.receive(bob.exchange.send(bob.offer))
    contribution = alice.send(alice.sealed) + b"".join(map(alice.send, alice.chunks()))
    alice.receive(bob.send(bob.sealed) + b"".join(map(bob.send, bob.chunks())))
    bob.receive(contribution)
    alice.receive(bob.exchange.send(Accepted()))
    return offer + contribution + alice.exchange.send(Commit())


TRANSCRIPT = _transcript()


MOVES = [
    "alice moves",
    "bob moves",
    "alice seals",
    "bob seals",
    "route",
    "route to the stream",
    "answer",
    "decline",
    "reroute",
    "chunks",
]
# The second way breaks as well, after some bytes have moved, and is declined.
BREAKING_ONCE_MORE = [
    *(("route", 0), ("answer", 0), ("bob moves", 1), ("route", 0)),
    *(("bob moves", 2), ("alice seals", 0), ("decline", 0), ("chunks", 0)),
]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, BULK_FROM)), max_size=25))
@example(BREAKING_ONCE_MORE)
def test_however_ways_break_both_agree_and_nothing_counts_but_the_whole(moves: list[tuple[str, int]]) -> None:
    """Both take their steps in any order; a step that is not allowed is refused at the sender."""
    alice, bob = Side(True, BULK_FROM), Side(False, BULK_FROM)
    share_offers(alice, bob)
    is_asked = False  # by a Route without an answer: it reports its sender's bytes, so no more may move to that side
    for move, number in moves:
        asker, answerer = alice.exchange.pipe, bob.exchange.pipe
        with contextlib.suppress(LocalProtocolError):
            match move:
                case "alice moves" | "bob moves":
                    sender, receiver = (alice, bob) if move == "alice moves" else (bob, alice)
                    exchange = receiver.exchange
                    is_on = exchange.pipe.step in (RouteStep.CHANNEL, RouteStep.LOST, RouteStep.REPLACING)
                    if is_on and not exchange.is_whole and not (is_asked and receiver is alice):
                        # No honest side sends the last byte before the hash.
                        most = BULK_FROM - 1 if sender.exchange.pipe.outgoing.awaits_hash else BULK_FROM
                        move_over(sender, receiver, min(number, most))
                        exchange.pipe.check_whole()
                        tell(receiver, sender, Received())
                case "alice seals" | "bob seals":
                    sender, receiver = (alice, bob) if move == "alice seals" else (bob, alice)
                    tell(sender, receiver, sender.sealed)
                case "route" | "route to the stream":
                    tell(alice, bob, Route(CHANNEL if move == "route" else None, asker.num_received))
                    is_asked = True
                case "answer" | "decline":
                    channel = answerer.proposed if move == "answer" else None
                    tell(bob, alice, Route(channel, answerer.num_received))
                    is_asked = False
                case "reroute":
                    tell(bob, alice, Reroute())
                case "chunks":
                    for sender, receiver in ((alice, bob), (bob, alice)):
                        for chunk in sender.chunks():
                            tell(sender, receiver, chunk)
        assert (asker.channel, asker.num_routes) == (answerer.channel, answerer.num_routes)
        assert asker.num_routes <= MAX_ROUTES
        assert asker.step is answerer.step
        one, other = alice.exchange, bob.exchange
        assert (one.ours, one.theirs) == (other.theirs, other.ours)
        for ours, theirs in ((alice, bob), (bob, alice)):
            assert ours.exchange.pipe.outgoing.awaits_hash == theirs.exchange.pipe.incoming.awaits_hash
            assert 0 <= ours.exchange.pipe.num_sent <= BULK_FROM
            if ours.exchange.is_whole:
                assert ours.incoming == theirs.contribution
