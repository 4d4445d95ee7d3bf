from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from farandole.node.status.journal import DISK, MAX_EVENTS, MAX_WARNINGS, WARNING_SECONDS, Journal
from farandole.node.status.round_log import RoundRecord
from farandole.node.status.status import NOT_BEGUN, REFUSED_HERE, NodeStatus
from farandole.protocol.run.roster import Roster
from farandole.protocol.state.entries import Delta, Kind, Member
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.identity import peer_id_of, short_name

from ...protocol.authors import CREATOR, NOW, RUN_ID, author_of, signed, tick_at
from ...protocol.run.test_invitations import BEN, MALLORY, admit, invitation, sponsored
from ..statuses import STATUS, ended, round_end


def test_a_month_of_strangers_is_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.node.status.journal.MAX_PARTNERS", 2)
    journal = Journal(lambda text: None)
    for peer in (b"a", b"a", b"b", b"c", b"d"):
        journal.record_exchange(ended(0, peer * 32))
    assert journal.history.partners == {peer_id_of(b"a" * 32): 2, peer_id_of(b"d" * 32): 1}
    assert journal.history.exchanges_ok == 5


def test_what_happened_is_kept_in_words_and_is_bounded() -> None:
    said: list[str] = []
    journal = Journal(said.append, clock=lambda: 1.0)
    journal.say("hello")
    journal.note("only for who looks")
    journal.warn("the disk is full")
    assert said == ["hello", "warning: the disk is full"]
    assert [(event.text, event.is_warning) for event in journal.events] == [
        ("hello", False),
        ("only for who looks", False),
        ("the disk is full", True),
    ]

    for index in range(2 * MAX_EVENTS):
        journal.note(str(index))
    assert len(journal.events) == MAX_EVENTS
    assert journal.events[-1].text == str(2 * MAX_EVENTS - 1)


def test_a_warning_has_its_time_and_ends_when_its_cause_does() -> None:
    now, said = [0.0], list[str]()
    journal = Journal(said.append, clock=lambda: now[0])
    journal.warn("the disk is full, 3 MB are free", f"{DISK}store")
    journal.warn("port 1 is taken")
    now[0] = 5.0
    journal.warn("the disk is full, 2 MB are free", f"{DISK}store")
    assert said == ["warning: the disk is full, 3 MB are free", "warning: port 1 is taken"]
    assert [(event.at, event.text) for event in journal.standing] == [
        (0.0, "port 1 is taken"),
        (5.0, "the disk is full, 2 MB are free"),
    ]
    assert journal.disk == "the disk is full, 2 MB are free"
    journal.over(f"{DISK}store")
    assert (journal.warnings, journal.disk) == (["port 1 is taken"], "")
    journal.warn("the disk is full, 2 MB are free", f"{DISK}store")
    assert len(said) == 3, "it is full again"
    for number in range(2 * MAX_WARNINGS):
        journal.blame(bytes([number]) * 32, "flooded")
    assert journal.disk, "it is not pushed out by peers that are named"
    assert len(journal.warnings) == MAX_WARNINGS
    now[0] = WARNING_SECONDS + 6.0
    assert journal.warnings == ["the disk is full, 2 MB are free"], "nothing has ended it"


def test_a_peer_is_named_once_for_what_it_does_and_with_who_invited_it() -> None:
    said: list[str] = []
    journal = Journal(said.append)
    eve, bob = author_of(MALLORY), author_of(BEN)
    of_bob, members = admit(invitation(quota=1), BEN), Roster(RUN_ID, CREATOR)
    for admission in (of_bob, admit(sponsored(of_bob, BEN, range(1)), MALLORY)):
        members.admit(admission)
    journal.run = RunState(RUN_ID, CREATOR, roster=members)
    tick, names = tick_at(Kind.MEMBER), ((MALLORY, "Eve"), (BEN, "Bob"))
    told = (signed(number, Kind.MEMBER, 0, tick, Member(name=name)) for number, name in names)
    journal.run.merge(Delta(tuple(told)), NOW)
    journal.finish_round(round_end(1, ended(1, eve)))
    assert f'; averaged with {short_name(eve)} "Eve", ' in said[-1]

    def meet(number: int, failure: str = "", clip: float = 1.0) -> None:
        for peer in (eve, bob):  # of three meetings with Bob, two are good
            ended_well = peer == bob and number % 3
            exchange = ended(number, peer, "" if ended_well else failure)
            journal.record_exchange(dataclasses.replace(exchange, clip=1.0 if ended_well else clip))

    for failure, clip in ((f"{REFUSED_HERE} far", 1.0), (NOT_BEGUN, 1.0), ("", 0.2)):
        for number in range(9):
            meet(number, failure, clip)
    journal.blame(eve, "flooded")
    journal.blame(eve, "flooded")
    invited = f' (invited by {short_name(bob)} "Bob")'
    assert [text for text in said if text.startswith("warning")] == [
        f'warning: {short_name(eve)} "Eve" {words}{invited}'
        for words in (
            "sent contributions that were refused",
            "agreed to exchanges and did not come",
            "sent contributions that counted in part, or not at all",
            "flooded this node, which keeps it out for a while",
        )
    ]
    assert list(journal.remarks) == [peer_id_of(eve)]
    assert journal.remarks[peer_id_of(eve)].endswith(f", flooded this node, which keeps it out for a while{invited}")


def test_why_an_exchange_failed_is_told_once() -> None:
    journal = Journal(lambda text: None)
    bob = b"b" * 32
    journal.record_exchange(ended(1, bob, "refused: the norm is off"))  # the refusing node has warned of it
    journal.record_exchange(ended(2, bob, "the partner aborted: refused: the norm is off"))
    journal.record_exchange(ended(3, bob, "the partner died"))
    name = short_name(bob)
    assert [event.text for event in journal.events] == [
        f"{name} refused this node's contribution: the norm is off",
        f"the exchange of round 3 with {name} failed: the partner died",
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_in_no_curve_and_in_no_round(loss: float) -> None:
    """JSON cannot hold it: a reader of the status would find null in place of a number."""
    rounds: list[RoundRecord] = []
    journal = Journal(lambda text: None, keep_round=rounds.append)
    for number in (3.0, loss, 2.0):
        journal.history.add_loss(7, number)
        journal.record_validation(7, number)
        journal.finish_round(round_end(7, loss=number))
    assert list(journal.history.losses) == list(journal.history.validation) == [(7, 3.0), (7, 2.0)]
    assert [record.loss for record in rounds] == [3.0, None, 2.0]
    assert "held-out text" in journal.warnings[-1]

    journal.update(loss=loss)
    status = msgspec.structs.replace(STATUS, loss=journal.state.loss, losses=list(journal.history.losses))
    assert msgspec.json.decode(msgspec.json.encode(status), type=NodeStatus).loss is None
