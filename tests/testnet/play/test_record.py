from __future__ import annotations

from typing import Any

import msgspec

from farandole.node.status.status import (
    REFUSED_HERE,
    REFUSED_THERE,
    ExchangeStatus,
    MemberStatus,
    NodeStatus,
    RunStatus,
)
from farandole.testnet.play.record import NodeRecord
from farandole.testnet.play.report import node_report

RUN = RunStatus("ab", "demo", 1, 0, 0, 0.0, None, None, None, "root")
PATHS = {"bob": "relayed", "carol": ""}  # carol is not connected


def status(**changes: Any) -> NodeStatus:
    fields: dict[str, Any] = dict.fromkeys(NodeStatus.__struct_fields__, 0) | {
        "phase": "training",
        "losses": [],
        "loss_first": None,
        "partners": {},
        "paths": {},
        "run": RUN,
        "members": [],
        "recent_exchanges": [],
        "resources": None,
        "pid": 1,
    }
    return NodeStatus(**{**fields, **changes})


def test_counters_of_several_lives_add_up_and_positions_do_not() -> None:
    record = NodeRecord(3, "alice")
    first = status(
        exchanges_ok=2, bytes_sent=5, partners={"bob": 2}, paths={"stream": 2}, round=2, tokens=200, loss_first=5.0
    )
    record.observe(msgspec.structs.replace(first, exchanges_ok=1), 0.5)
    record.observe(msgspec.structs.replace(first, losses=[(0, 5.0), (1, 4.5)]), 1.0)
    record.observe(
        status(
            pid=2, exchanges_ok=1, bytes_sent=3, partners={"bob": 1, "carol": 1}, round=3, tokens=300, loss_first=4.0
        ),
        2.0,
    )
    record.observe(
        status(
            pid=2,
            exchanges_ok=4,
            bytes_sent=9,
            partners={"carol": 4},
            paths={"bulk": 3, "stream": 1},
            round=4,
            losses=[(3, 4.0)],
        ),
        3.0,
    )
    report = node_report(record, is_alive=True)
    assert (report.exchanges_ok, report.bytes_sent) == (6, 14)
    assert report.partners == {"bob": 2, "carol": 4}
    assert report.paths == {"stream": 3, "bulk": 3}
    assert (report.rounds, report.restarts) == (4, 1)
    assert (report.loss_first, report.loss_last) == (5.0, 4.0)
    assert report.losses == [(0, 5.0), (1, 4.5), (3, 4.0)]
    assert report.state_root == "root"


def test_a_node_that_was_never_heard_of() -> None:
    report = node_report(NodeRecord(0, "alice"), is_alive=False)
    assert (report.rounds, report.tokens, report.loss_last, report.partners) == (0, 0, None, {})


def test_a_node_is_wedged_when_it_stands_still_too_long() -> None:
    record = NodeRecord(0, "alice")
    record.excuse(0.0)
    assert not record.check_progress(9.0, limit=10.0)
    record.observe(status(round=0, inner_steps=1), 9.0)
    record.observe(status(round=0, inner_steps=1), 18.0)
    assert not record.check_progress(18.5, limit=10.0)
    assert record.check_progress(19.5, limit=10.0)
    assert record.wedged
    assert not record.check_progress(20.0, limit=10.0), "told once"


def test_neither_a_finished_nor_an_excused_node_is_wedged() -> None:
    record = NodeRecord(0, "alice")
    record.observe(status(round=4, phase="training"), 0.0)
    record.excuse(50.0)
    assert not record.check_progress(55.0, limit=10.0)
    record.observe(status(round=4, phase="finished"), 56.0)
    assert not record.check_progress(1_000.0, limit=10.0)


def test_the_report_says_where_a_node_was_and_by_which_path_it_reached_whom() -> None:
    fields: dict[str, Any] = dict.fromkeys(MemberStatus.__struct_fields__, 0)
    bob, carol = (MemberStatus(**{**fields, "peer_id": name, "path": path}) for name, path in PATHS.items())
    record = NodeRecord(3, "alice")
    record.observe(status(members=[bob, carol]), 0.0)
    report = node_report(record, is_alive=True, home="symmetric")
    assert (report.home, report.links) == ("symmetric", {"bob": "relayed"})


def test_what_the_screening_did_to_exchanges_is_counted_once() -> None:
    verdicts = ["committed", f"failed: {REFUSED_HERE} too far", f"failed: {REFUSED_THERE} too far", "failed: the line"]
    exchanges = [ExchangeStatus(at, "bob", verdict, 0, 0, 0.0, float(at)) for at, verdict in enumerate(verdicts)]
    clipped = [
        ExchangeStatus(4 + at, "bob", "committed", 0, 0, 0.0, 4.0 + at, clip=clip) for at, clip in enumerate((0.0, 0.5))
    ]
    record = NodeRecord(3, "alice")
    for _ in range(2):
        record.observe(status(recent_exchanges=[*exchanges, *clipped]), 0.0)
    report = node_report(record, is_alive=True)
    assert (report.exchanges_clipped, report.exchanges_refused) == (2, 2)
