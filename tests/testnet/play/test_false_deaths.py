from __future__ import annotations

import msgspec

from farandole.testnet.play.false_deaths import GRACE, false_deaths
from farandole.testnet.play.record import NodeRecord

from ...node.statuses import STATUS

ALICE, BOB = "12D3KooWalice", "12D3KooWbob"


def record(index: int, peer_id: str, live: list[str], since: float) -> NodeRecord:
    made = NodeRecord(index, peer_id)
    made.ledger.enter("starting", since)
    made.ledger.enter("working", since + 1.0)
    members = [msgspec.structs.replace(STATUS.members[0], peer_id=peer, is_live=True) for peer in live]
    made.observe(msgspec.structs.replace(STATUS, members=members), GRACE + 10.0)
    return made


def test_who_is_there_and_not_seen_was_taken_for_dead() -> None:
    alice, bob = record(0, ALICE, [ALICE], 0.0), record(1, BOB, [ALICE, BOB], 0.0)
    assert list(false_deaths([alice, bob])) == [(1, 0)]
    assert list(false_deaths([record(0, ALICE, [ALICE, BOB], 0.0), bob])) == []


def test_who_was_just_started_or_is_gone_is_not_expected() -> None:
    alice, young = record(0, ALICE, [ALICE], 0.0), record(1, BOB, [BOB], 15.0)
    assert list(false_deaths([alice, young])) == [], "it may not have been heard of, nor have heard"
    gone = record(1, BOB, [ALICE, BOB], 0.0)
    gone.ledger.enter("absent", 12.0)
    assert list(false_deaths([alice, gone])) == []
