"""`farandole limit` without a node; tests.node.test_daemon changes a running node's caps."""

from __future__ import annotations

import resource
from datetime import datetime
from pathlib import Path

import pytest

from farandole.node.base.bandwidth import Shaping
from farandole.node.base.config.file import keep_limits, read_limits
from farandole.node.base.control import ControlError
from farandole.node.base.exits import Exit
from farandole.node.base.figures import BYTES_PER_MBIT
from farandole.node.control_methods import change_quiet_hours, kept, set_caps
from farandole.node.loop.rest_service import Rest, RestService
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal

from .conftest import Run


def test_it_takes_a_cap_and_a_running_node(run: Run, home: Path) -> None:
    code, _, told = run("limit")
    assert code == Exit.USAGE
    assert "--upload-mbit" in told
    code, _, told = run("limit", "--upload-mbit", "2")
    assert code == Exit.NO_NODE
    assert str(home) in told


async def test_a_disk_that_takes_no_more_costs_no_limit_that_was_kept(tmp_path: Path) -> None:
    keep_limits(tmp_path, {"upload_mbit": 2, "quiet_hours": ("22:00-07:30",)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # writes beyond this size fail, as on a full disk
    try:
        told = await kept(tmp_path, Journal(say=lambda text: None), "upload at most 5 Mbit/s", {"upload_mbit": 5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told.startswith("upload at most 5 Mbit/s; until this node ends, since this cannot be kept: ")
    assert read_limits(tmp_path) == {"upload_mbit": 2, "quiet_hours": ["22:00-07:30"]}
    assert [path.name for path in tmp_path.iterdir()] == ["limits.toml"]


async def test_quiet_hours_are_set_all_or_none(tmp_path: Path) -> None:
    rest = Rest()
    async with open_store(tmp_path / "store.sqlite") as store:
        keeper = RestService(rest, store, ["22:00-07:30"], lambda: datetime(2026, 11, 23, 12), lambda text: None)
        for wrong in ({}, {"hours": 22}, {"hours": "09:00-10:00, at night"}):
            with pytest.raises(ControlError):
                change_quiet_hours(keeper, wrong)
        assert rest.quiet_hours == ("22:00-07:30",)
        said = change_quiet_hours(keeper, {"hours": "Sat-Sun 09:00-18:00,  11:00-13:00"})
        assert said == "quiet hours Sat-Sun 09:00-18:00, 11:00-13:00"
        assert rest.is_on
        change_quiet_hours(keeper, {"hours": " "})
        assert not rest.is_on


def test_a_cap_that_is_not_named_stays_and_all_or_none_are_set() -> None:
    shaping = Shaping.of_mbit(5.0, 0.0)
    assert set_caps(shaping, {"download_mbit": 20}) == "upload at most 5 Mbit/s, download at most 20 Mbit/s"
    with pytest.raises(ControlError):
        set_caps(shaping, {"upload_mbit": 1.0, "download_mbit": 0.2})
    assert (shaping.up.rate, shaping.down.rate) == (5 * BYTES_PER_MBIT, 20 * BYTES_PER_MBIT)
    assert "download without a cap" in set_caps(shaping, {"download_mbit": 0})
