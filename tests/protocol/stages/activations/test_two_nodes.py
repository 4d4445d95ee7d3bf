"""Two honest nodes, whose frames arrive with delay."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farandole.protocol.stages import activations as wire

from .sides import FORWARD, HELLO, send_data

LINK_SIZE = 12
NUM_SLOTS = 3


def activations(index: int) -> bytes:
    return bytes((index % 256, 0)) * (LINK_SIZE // 2)


def gradient(index: int) -> bytes:
    return bytes((index % 256, 1)) * (LINK_SIZE // 2)


class End:
    """A node's end of the link: sent bytes stay in ``wire`` until the other end takes them out."""

    def __init__(self, is_upstream: bool) -> None:
        self.link = wire.Link(is_upstream, HELLO, LINK_SIZE)
        self.wire = bytearray()
        """Bytes sent and not yet received."""
        self.outgoing = b""
        self.received: set[int] = set()
        self.ended: dict[int, bool] = {}
        """Microbatch -> whether it is kept."""

    def say(self, message: wire.Control, data: bytes = b"") -> None:
        self.wire += self.link.send(message)
        self.outgoing = data or self.outgoing

    def send_data(self, size: int) -> None:
        size = min(size, len(self.outgoing))
        self.wire += send_data(self.link, memoryview(self.outgoing)[:size])
        self.outgoing = self.outgoing[size:]

    def end(self, index: int, is_kept: bool) -> None:
        assert index not in self.ended, "a microbatch ends once"
        self.ended[index] = is_kept

    def in_step(self, *steps: wire.Transit) -> list[int]:
        return [index for index, step in self.link.open.items() if step in steps]


# Mostly all bytes, so that microbatches get far.
_PIECES = st.one_of(st.none(), st.none(), st.integers(1, 120))
_DATA_SIZES = st.one_of(st.just(LINK_SIZE), st.integers(1, LINK_SIZE))
_CHOICES = st.sampled_from(["take"] * 8 + ["drop"])
_DROPPABLE = (wire.Transit.FORWARD, wire.Transit.THERE, wire.Transit.BACK)
_PATIENCE = st.integers(0, 5)


class TwoNodes(RuleBasedStateMachine):
    """Each node takes any step that it may at any time; neither refuses anything that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.alice, self.bob = End(wire.UPSTREAM), End(wire.DOWNSTREAM)

    @initialize()
    def they_greet(self) -> None:
        self.alice.say(HELLO)
        self.arrive(self.alice, self.bob)
        self.bob.say(wire.Welcome(NUM_SLOTS))
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

    def hear(self, end: End, event: wire.Event, choice: str) -> None:
        match event:
            case wire.Forward() if choice == "drop":
                self.give_up(end, end.link.num_forwarded - 1)
            case wire.Gradient(index) if choice == "drop":
                self.give_up(end, index)
            case wire.DataReceived(index):
                assert index not in end.received
                assert index in end.link.open
                assert end.link.landed == (gradient if end is self.alice else activations)(index)
                end.received.add(index)
            case wire.Dropped(index):
                end.end(index, is_kept=False)
            case wire.Settled(index, is_kept):
                end.end(index, is_kept)
            case _:
                pass

    def give_up(self, end: End, index: int) -> None:
        end.say(
            wire.Settled(index, is_kept=False)
            if end is self.alice
            else wire.Dropped(index, "given up", is_untouched=True)
        )
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

    @precondition(lambda self: not self.bob.outgoing and set(self.bob.in_step(wire.Transit.THERE)) & self.bob.received)
    @rule(data=st.data())
    def bob_gives_back(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(set(self.bob.in_step(wire.Transit.THERE)) & self.bob.received)))
        self.bob.say(wire.Gradient(index), gradient(index))

    @precondition(lambda self: self.bob.in_step(*_DROPPABLE))
    @rule(data=st.data(), patience=_PATIENCE)
    def bob_drops(self, data: st.DataObject, patience: int) -> None:
        if not patience:
            self.give_up(self.bob, data.draw(st.sampled_from(self.bob.in_step(*_DROPPABLE))))

    @precondition(lambda self: self.alice.link.open)
    @rule(data=st.data(), patience=_PATIENCE)
    def alice_gives_up(self, data: st.DataObject, patience: int) -> None:
        if not patience:
            self.give_up(self.alice, data.draw(st.sampled_from(self.alice.in_step(*wire.Transit))))

    @precondition(lambda self: set(self.alice.in_step(wire.Transit.RETURNED)) & self.alice.received)
    @rule(data=st.data())
    def alice_keeps(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(set(self.alice.in_step(wire.Transit.RETURNED)) & self.alice.received)))
        self.alice.say(wire.Settled(index, is_kept=True))
        self.alice.end(index, is_kept=True)

    @rule()
    def bob_gives_credits(self) -> None:
        self.bob.say(wire.Credits(NUM_SLOTS + len(self.bob.ended)))

    @invariant()
    def nobody_has_more_open_than_slots_were_promised(self) -> None:
        alice, bob = self.alice, self.bob
        assert bob.link.num_forwarded <= alice.link.num_forwarded <= alice.link.credits <= bob.link.credits
        for end in (alice, bob):
            assert len(end.link.open) <= NUM_SLOTS
            assert set(end.link.open).isdisjoint(end.ended)
            assert end.link.num_forwarded == len(end.link.open) + len(end.ended)
            assert end.link.is_sending is bool(end.outgoing)

    def teardown(self) -> None:
        """Alice ends all microbatches, and everything arrives: both ends agree."""
        alice, bob = self.alice, self.bob
        for _ in range(2):
            for index in alice.in_step(*wire.Transit):
                self.give_up(alice, index)
            for end in (alice, bob):
                if end.outgoing:
                    end.send_data(LINK_SIZE)
            self.arrive(alice, bob)
            self.arrive(bob, alice)
        for end in (alice, bob):
            assert end.link.open == {}
            assert not end.wire
            assert not end.link.is_sending
        assert alice.link.num_forwarded == bob.link.num_forwarded
        assert alice.link.credits == bob.link.credits
        assert alice.ended == bob.ended, "each is kept at both or at none"
        assert {index for index, is_kept in alice.ended.items() if is_kept} <= alice.received & bob.received


TestTwoNodes = TwoNodes.TestCase
TestTwoNodes.settings = settings(max_examples=100, stateful_step_count=200)
