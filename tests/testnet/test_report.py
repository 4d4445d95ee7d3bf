from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farandole.testnet.link_table import link_table
from farandole.testnet.report import Merged, NodeReport, Report, make_report
from farandole.testnet.scenario import Scenario, parse_scenario

ROUNDS = 4
GOOD = NodeReport(
    index=0,
    peer_id="alice",
    rounds=ROUNDS,
    exchanges_ok=4,
    exchanges_alone=0,
    exchanges_failed=0,
    partners={"bob": 2, "carol": 2},
    bytes_sent=10,
    bytes_received=10,
    inner_steps=80,
    tokens=1_000,
    loss_first=5.0,
    loss_last=2.0,
    losses=[(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)],
    died=False,
    wedged=False,
    restarts=0,
    exchanges_since_restart=4,
    is_alive=True,
    state_root="root",
)
MERGED = Merged(loss_start=5.5, loss=2.1, spread=0.02)


def scenario(**settings: Any) -> Scenario:
    return parse_scenario(
        {
            "run": {"name": "a", "model": "tiny"},
            "nodes": 3,
            "rounds": ROUNDS,
            "min_partners": 2,
            "max_loss_merged": 2.6,
            **settings,
        }
    )


def judge(nodes: list[NodeReport], merged: Merged | None = MERGED, **settings: Any) -> Report:
    return make_report(scenario(**settings), bytes(32), nodes, merged, seconds=10.0, events=[])


def node(index: int, **changes: Any) -> NodeReport:
    return msgspec.structs.replace(GOOD, index=index, **changes)


def test_each_end_of_a_link_says_how_it_reaches_the_other() -> None:
    near = node(0, home="open", links={"bob": "punched"})
    far = node(1, home="symmetric", peer_id="bob", links={"alice": "relayed"})
    table = link_table([near, far, node(2, peer_id="carol")])
    assert table.header == ["link to node", "0", "1", "2"]
    assert table.rows == [["0 open", "", "punched", "-"], ["1 symmetric", "relayed", "", "-"], ["2 ", "-", "-", ""]]


def test_good_nodes_pass() -> None:
    report = judge([node(0), node(1, loss_first=3.0), node(2)])
    assert (report.verdict, report.reasons) == ("pass", [])
    assert (report.tokens, report.tokens_per_second) == (3_000, 300.0)
    assert report.loss_first == pytest.approx(13 / 3)
    assert (report.loss_start, report.loss_merged, report.spread) == (5.5, 2.1, 0.02)
    assert report.state_equal


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"died": True, "is_alive": False}, "node 1 died"),
        ({"is_alive": False}, "node 1 was not there at the end"),
        ({"wedged": True}, "node 1 was wedged"),
        ({"restarts": 1, "exchanges_since_restart": 0}, "node 1 exchanged with nobody after"),
        ({"losses": []}, "node 1 never trained"),
        ({"rounds": 3}, "node 1 reached round 3 of 4"),
        ({"partners": {"bob": 9}}, "node 1 exchanged with 1 partners, fewer than 2"),
        ({"state_root": "other"}, "the run state is not equal"),
        ({"state_root": ""}, "the run state is not equal"),
    ],
)
def test_one_bad_node_fails_the_run(changes: dict[str, Any], reason: str) -> None:
    report = judge([node(0), node(1, **changes), node(2)])
    assert report.verdict == "fail"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith(reason)


def test_a_node_that_was_killed_on_purpose_owes_nothing() -> None:
    gone = node(1, is_alive=False, is_doomed=True, rounds=1, partners={}, state_root="")
    assert judge([node(0), gone, node(2)]).verdict == "pass"


def test_a_late_joiner_must_begin_with_a_peers_weights() -> None:
    fault = [{"kind": "join", "nodes": [1], "at_round": 2}]
    assert judge([node(0), node(1, losses=[(2, 3.0), (3, 2.0)])], fault=fault).reasons == []
    [reason] = judge([node(0), node(1)], fault=fault).reasons
    assert reason == "node 1 joined late and began in round 0: it got no weights from a peer"


def test_the_merged_loss_must_be_below_its_bound() -> None:
    assert judge([GOOD], Merged(5.5, 2.6, 0.1)).reasons == ["the merged model's loss is 2.600, not below 2.6"]
    assert judge([GOOD], Merged(5.5, float("nan"), 0.1)).verdict == "fail"
    assert judge([GOOD], None).reasons == ["there is no merged model: no replica left a checkpoint"]


def test_every_node_in_every_round_and_slow_ones_with_fewer_steps() -> None:
    settings: dict[str, Any] = {"every_round": True, "slow": [1.0, 8.0]}
    assert judge([node(0), node(1, inner_steps=11)], **settings).reasons == []
    missing = node(1, inner_steps=11, losses=[(1, 4.0), (3, 2.0)])
    assert judge([node(0), missing], **settings).reasons == ["node 1 took no part in rounds [2]"]
    [reason] = judge([node(0), node(1)], **settings).reasons
    assert reason == "node 1 took as many inner steps (80) as the faster node 0"


def test_problems_outside_the_nodes_come_first() -> None:
    report = make_report(scenario(), bytes(32), [GOOD], MERGED, seconds=1, events=["e"], problems=["interrupted"])
    assert (report.verdict, report.reasons, report.events) == ("fail", ["interrupted"], ["e"])
