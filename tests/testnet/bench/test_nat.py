"""The benchmark of homes: real hosts in the NAT lab; all pairs as a soak test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.testnet.bench.nat import ALL_PAIRS, Pair, PairResult, measure_pair, publish
from farandole.testnet.bench.process import BenchError
from farandole.testnet.bench.report import open_bench

# Both must send at once; only by relay; two NATs in a row, one that admits all; a home with hardly any way out.
CHARACTERISTIC = (
    ("port-restricted", "port-restricted"),
    ("symmetric", "port-restricted"),
    ("carrier", "full-cone"),
    ("https-only", "firewall"),
)


def test_what_does_not_hold_is_said(tmp_path: Path) -> None:
    good = PairResult("firewall", "carrier", "punched", "punched", 12.0, 12.2, "bulk", 0.4)
    late = PairResult("firewall", "carrier", "punched", "relayed", 31.0, None, "relayed stream", 5.4)
    none = PairResult("open", "open", "direct", failure="no exchange")
    with open_bench("nat", tmp_path) as bench, pytest.raises(BenchError):
        publish(bench, [good, late, none])
    document = json.loads((tmp_path / "nat.json").read_text())
    assert document["misses"] == [
        "firewall / carrier: connected only after 31 s",
        "firewall / carrier: relayed, where plain sockets get through",
        "open / open: not connected",
        "open / open: no exchange",
    ]
    assert [claim["ours"] for claim in document["claims"]] == ["1", "31.0", "1", "2"]
    assert document["tables"][0]["rows"][1] == "firewall / carrier | punched | punched | 12.0 | 12.2 | bulk | 0.4"


def check(pairs: tuple[Pair, ...], folder: Path) -> None:
    for pair in pairs:
        row = measure_pair(pair, folder)
        assert row.failure == "", row.name
        assert (row.path == "relayed") == (row.theory == "relayed"), row.name
        assert (row.way == "relayed stream") == (row.theory == "relayed"), row.name


@pytest.mark.usefixtures("full_networks")
def test_homes_that_no_plain_socket_connects_exchange_by_relay(tmp_path: Path) -> None:
    check(CHARACTERISTIC[1:2], tmp_path / "play")


@pytest.mark.soak
@pytest.mark.usefixtures("full_networks")
def test_all_pairs_connect_and_exchange(tmp_path: Path) -> None:
    check(ALL_PAIRS, tmp_path / "play")
