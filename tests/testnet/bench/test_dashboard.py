"""The dashboard's benchmark, small: a daemon, members of its run, and a browser."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.testnet.bench import dashboard
from farandole.testnet.bench.dashboard import measure

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: on Debian, apt install chromium")
def test_a_page_about_many_members_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "SETTLE_SECONDS", 0.0)
    figures = measure(tmp_path, 100, 6.0, lambda text: None)  # a new member every five seconds

    members, overview, with_page, without = figures.rows
    for row in (members, overview):
        assert row.number >= 1
        assert row.worst_ms is not None
        assert row.worst_ms > 0
    assert with_page.share is not None
    assert with_page.share > 0
    assert without.share is not None
    assert figures.overview_bytes > 1_000
    assert figures.members_bytes > 100 * 100

    figures.rows = [replace(members, worst_ms=500.0), replace(with_page, share=0.5), replace(without, share=0.5)]
    report = figures.report({"command": "x", "date": "y"})
    assert report.misses == [
        "the page, told of members: a refresh took 500 ms",
        "the daemon, with the page open: 50.0% of a core",
    ]
    assert "max 100 ms" in report.markdown()
