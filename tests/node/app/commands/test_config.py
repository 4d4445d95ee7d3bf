from __future__ import annotations

import json
import re
import resource
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.config.file import SETTINGS, keep_limits, read_limits
from farandole.node.base.config.setting import PANELS
from farandole.node.base.control import ControlError
from farandole.node.base.exits import Exit
from farandole.node.base.settings import NodeSettings
from farandole.node.control_methods import change_quiet_hours, kept
from farandole.node.loop.rest_service import Rest, RestService
from farandole.node.state.store import open_store
from farandole.node.status.journal import Journal
from farandole.protocol.run.own_model import ADAPTERS

from ...conftest import Cli


def shown(cli: Cli, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = cli("config", "show", "--json", *arguments)
    assert code == Exit.OK, err
    settings: dict[str, Any] = json.loads(out)["settings"]
    return settings


@pytest.fixture
def file(home: Path) -> Path:
    home.mkdir()
    return home / "config.toml"


def test_a_flag_goes_before_a_variable_before_what_is_kept_before_the_file_before_the_default(
    cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [shown(cli)["slow"]]
    file.write_text("slow = 2")
    told.append(shown(cli)["slow"])
    keep_limits(file.parent, {"slow": 2.5})
    told += [shown(cli)["slow"], shown(cli, "--config", file)["slow"]]
    monkeypatch.setenv("FARANDOLE_SLOW", "3")
    told.append(shown(cli)["slow"])
    told.append(shown(cli, "--slow", "4")["slow"])
    assert told == [
        {"value": 1.0, "source": "default"},
        {"value": 2.0, "source": "file"},
        *[{"value": 2.5, "source": "farandole limit"}] * 2,
        {"value": 3.0, "source": "environment"},
        {"value": 4.0, "source": "flag"},
    ]


def test_several_values_in_one_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_LISTEN", "/ip4/1.2.3.4/tcp/1 /ip4/1.2.3.4/tcp/2")
    monkeypatch.setenv("FARANDOLE_QUIET_HOURS", "Sat-Sun 09:00-18:00 22:00 - 07:30 Mon 8:00-9:00")
    settings = shown(cli)
    assert settings["listen"]["value"] == ["/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/2"]
    assert settings["quiet_hours"]["value"] == ["Sat-Sun 09:00-18:00", "22:00 - 07:30", "Mon 8:00-9:00"]


def test_another_file_may_be_named(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.toml"
    file.write_text("threads = 2")
    other.write_text("threads = 3")
    assert shown(cli)["threads"]["value"] == 2
    assert shown(cli, "--config", other)["threads"]["value"] == 3
    monkeypatch.setenv("FARANDOLE_CONFIG", str(other))
    assert shown(cli)["threads"]["value"] == 3
    # The home that a flag names has its own settings file.
    monkeypatch.delenv("FARANDOLE_CONFIG")
    assert shown(cli, "--home", tmp_path)["threads"]["source"] == "default"
    assert cli("config", "show", "--config", tmp_path / "none.toml")[0] == Exit.BAD_INPUT


def test_what_a_base_implies_is_shown(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    settings = shown(cli, "--base", tmp_path)
    assert settings["tokenizer"] == {"value": str(tmp_path / "tokenizer.json"), "source": "--base"}
    assert settings["allow_model"] == {"value": [f"{ADAPTERS}={tmp_path}"], "source": "--base"}


def test_a_file_is_made_checked_and_not_replaced_by_accident(cli: Cli, home: Path) -> None:
    assert cli("config", "init")[0] == Exit.OK
    assert {told["source"] for told in shown(cli).values()} == {"default"}
    (home / "config.toml").write_text("slow = 2")
    code, _, err = cli("config", "init")
    assert (code, "--force" in err) == (Exit.BAD_INPUT, True)
    assert shown(cli)["slow"]["source"] == "file"
    assert cli("config", "init", "--force")[0] == Exit.OK
    assert "slow = 1.0" in (home / "config.toml").read_text()


def test_no_command_begins_with_a_wrong_file(cli: Cli, file: Path) -> None:
    file.write_text('sloww = 2\nthreads = 0\nquiet_hours = ["Sat-Sun"]')
    for command in (["join"], ["relay"], ["doctor"], ["config", "show"]):
        code, _, err = cli(*command)
        assert code == Exit.BAD_INPUT
        assert "did you mean slow?" in err
        assert "threads: expected a whole number of threads, at least 1, got 0" in err
        assert "quiet_hours: expected hours as 22:00-07:30" in err


def test_a_wrong_variable_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("0", "at least 1"), ("two", "a valid integer")):
        monkeypatch.setenv("FARANDOLE_THREADS", value)
        code, _, err = cli("join")
        assert (code, "FARANDOLE_THREADS" in err, expected in err) == (Exit.USAGE, True, True)


def test_each_setting_is_in_the_panel_of_its_definition(cli: Cli) -> None:
    _, *parts = re.split(r"^╭─ (.+?) ─+╮$", cli("join", "--help")[1], flags=re.MULTILINE)
    panels = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(panels) == ["Arguments", "Options", *PANELS]
    for setting in SETTINGS:
        if setting.flag and not setting.is_hidden:
            flag = setting.flag.split("/")[0]
            assert [title for title, text in panels.items() if f"│ {flag} " in text] == [setting.panel], flag
    assert all(f"│ {flag} " in panels["Options"] for flag in ("--home", "--config", "--help"))


async def test_a_disk_that_takes_no_more_costs_no_limit_that_was_kept(tmp_path: Path) -> None:
    keep_limits(tmp_path, {"upload_mbit": 2, "quiet_hours": ("22:00-07:30",)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # writes beyond this size fail, as on a full disk
    try:
        settings = NodeSettings(home=tmp_path)
        told = await kept(settings, Journal(lambda text: None), "upload at most 5 Mbit/s", {"upload_mbit": 5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told.startswith("upload at most 5 Mbit/s; until this node ends, since this cannot be kept: ")
    assert read_limits(tmp_path) == {"upload_mbit": 2, "quiet_hours": ["22:00-07:30"]}
    assert [path.name for path in tmp_path.iterdir()] == ["limits.toml"]


async def test_quiet_hours_are_set_all_or_none(tmp_path: Path) -> None:
    rest = Rest()
    async with open_store(tmp_path / "store.sqlite") as store:
        keeper = RestService(rest, store, ["22:00-07:30"], lambda: datetime(2026, 11, 23, 12), Journal(print))
        for wrong in ({}, {"hours": 22}, {"hours": "09:00-10:00, at night"}):
            with pytest.raises(ControlError):
                change_quiet_hours(keeper, wrong)
        assert rest.quiet_hours == ("22:00-07:30",)
        said = change_quiet_hours(keeper, {"hours": "Sat-Sun 09:00-18:00,  11:00-13:00"})
        assert said == "quiet hours Sat-Sun 09:00-18:00, 11:00-13:00"
        assert rest.is_on
        change_quiet_hours(keeper, {"hours": " "})
        assert not rest.is_on
