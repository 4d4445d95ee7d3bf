"""The benchmark of homes in trouble: its output; as a soak test, all of it in the NAT lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testnet.bench.nat_recovery import Recovery, RecoveryBench, report_of
from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.lab import open_lab
from farandole.testnet.natlab.namespace import NamespaceError, require


def test_what_does_not_hold_is_said() -> None:
    rows = [
        Recovery("the relay dies", "both have another", 4.04, 30.0),
        Recovery("the relay dies", "all exchange again", 61.0, 60.0),
        Recovery("the relay dies", "exchanges that came to nothing", 2, 1, unit=""),
        Recovery("a router reboots", "its home exchanges again", None, 60.0),
    ]
    report = report_of({"command": "x", "date": "y"}, rows)
    assert report.misses == [
        "the relay dies: all exchange again: 61 s, not within 60 s",
        "the relay dies: exchanges that came to nothing: 2, not within 1",
        "a router reboots: its home exchanges again: never, not within 60 s",
    ]
    assert "| the relay dies | both have another | 4.0 s | 30 s |" in report.markdown()
    assert "| the relay dies | exchanges that came to nothing | 2 | 1 |" in report.markdown()


@pytest.mark.soak
async def test_homes_in_trouble_are_back_in_time(tmp_path: Path) -> None:
    try:
        require("nft", "miniupnpd")
    except NamespaceError as error:
        pytest.skip(str(error))
    with open_leash() as leash, open_lab(leash) as lab:
        rows = await RecoveryBench(lab, tmp_path).measure()
    assert [miss for row in rows for miss in row.misses()] == []
