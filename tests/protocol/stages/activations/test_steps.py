"""A microbatch moves through the steps of the table, and the greetings come first."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.stages.activations import (
    DOWNSTREAM,
    TRANSITIONS,
    UPSTREAM,
    Control,
    Credits,
    Dropped,
    Gradient,
    Settled,
    Transit,
    Welcome,
)
from farandole.protocol.wire.errors import LocalProtocolError, RemoteProtocolError

from .sides import FORWARD, HELLO, Side, bring_to, lie, lying_data, pair, refuse, send_data


@pytest.mark.parametrize("step", Transit)
@pytest.mark.parametrize(("who", "kind"), TRANSITIONS)
def test_a_microbatch_goes_as_the_table_says(
    who: bool, kind: type[Gradient | Dropped | Settled], step: Transit
) -> None:
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
        refuse(sender, receiver, message)
    assert sender.link.open == receiver.link.open == expected
    assert receiver.memory == before


@pytest.mark.parametrize("step", Transit)
def test_only_what_has_returned_is_kept(step: Transit) -> None:
    alice, bob = pair()
    bring_to(alice, bob, step)
    kept = Settled(0, is_kept=True)
    if step is Transit.RETURNED:
        assert bob.hear(alice.say(kept)) == [kept]
        return
    refuse(alice, bob, kept)
    assert alice.link.open == bob.link.open == {0: step}


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


def test_greetings_come_once_in_their_order_and_each_from_its_side() -> None:
    alice, bob = Side(UPSTREAM), Side(DOWNSTREAM)
    refuse(bob, alice, Welcome(1))  # before the Hello
    refuse(bob, alice, HELLO)
    assert (alice.link.is_open, alice.link.credits) == (False, 0)
    alice = Side(UPSTREAM)
    assert bob.hear(alice.say(HELLO)) == [HELLO]
    refuse(alice, bob, HELLO)
    bob = Side(DOWNSTREAM)
    bob.hear(lie(HELLO))
    refuse(alice, bob, Welcome(1))
    alice, bob = pair()
    refuse(alice, bob, HELLO)
    refuse(bob, alice, Welcome(4))


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
            refuse(side, side, message)
            assert (side.link.credits, side.link.num_forwarded, side.link.open) == (0, 0, {})


def test_no_data_before_they_are_announced() -> None:
    for side in (Side(UPSTREAM), Side(DOWNSTREAM), *pair()):
        with pytest.raises(LocalProtocolError):
            send_data(side.link, memoryview(b"data"))
        with pytest.raises(RemoteProtocolError):
            side.hear(lying_data(4))
