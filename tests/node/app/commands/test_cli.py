from __future__ import annotations

import contextlib
import json
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from farandole.node import cli
from farandole.node.base.config.file import SETTINGS, keep_limits, read_limits
from farandole.node.base.config.setting import PANELS
from farandole.node.base.control import ControlError, serve_control
from farandole.node.base.errors import Exit
from farandole.node.base.identity import locked
from farandole.node.base.settings import NodeSettings
from farandole.node.control_methods import change_quiet_hours, kept
from farandole.node.loop.rest_service import Rest, RestService
from farandole.node.state.store import MANIFEST_FACT, open_store
from farandole.node.status.journal import Journal
from farandole.protocol.run.invite import Invite, decode_invite, encode_invite
from farandole.protocol.run.manifest import decode_manifest
from farandole.protocol.run.own_model import ADAPTERS

from ....patience import PATIENCE
from ...conftest import Cli
from ...statuses import ALICE, BOB, STATUS

ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{ALICE}"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("name = 'demo'\nmodel = 'tiny'\n[rounds]\ninner_steps = 5\n")
    return path


class FakeNode:
    """Serves the control API from another thread, as the daemon does from another process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._stop: Callable[[], object] = lambda: None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=partial(trio.run, self._serve))

    async def _serve(self) -> None:
        async def status(params: dict[str, Any]) -> object:
            return STATUS

        async def leave(params: dict[str, Any]) -> object:
            token.run_sync_soon(stop.set)
            return None

        token, stop = trio.lowlevel.current_trio_token(), trio.Event()
        self._stop = partial(token.run_sync_soon, stop.set)

        async def invite(params: dict[str, Any]) -> object:
            return ""  # its run is open to all

        async def dashboard(params: dict[str, Any]) -> object:
            return {"url": "http://127.0.0.1:8710/", "token": "secret"}

        handlers = {"status": status, "leave": leave, "invite": invite, "network_key": invite, "dashboard": dashboard}
        with locked(self.home / "lock"):
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, self.home / "control.sock", handlers)
                self._is_up.set()
                await stop.wait()
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            await trio.sleep(0.1)  # like a daemon that has closed its socket and not ended yet

    def __enter__(self) -> FakeNode:
        self._thread.start()
        assert self._is_up.wait(PATIENCE)
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._stop()
        self._thread.join(PATIENCE)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    with FakeNode(tmp_path / "home") as node:
        yield node


def test_the_id_stays_the_same(cli: Cli) -> None:
    code, first, _ = cli("id")
    assert code == Exit.OK
    assert first.startswith("12D3KooW")
    assert json.loads(cli("id", "--json")[1])["peer_id"] == first.strip()


def test_a_run_from_file_to_manifest_to_invite(cli: Cli, run_file: Path) -> None:
    code, out, _ = cli("run", "create", run_file, "--json")
    assert code == Exit.OK
    created = json.loads(out)
    manifest, signed = decode_manifest(run_file.with_suffix(".manifest").read_bytes())
    assert manifest.name == "demo"
    assert signed.run_id.hex() == created["run_id"]

    shown = json.loads(cli("run", "show", created["manifest"], "--json")[1])
    assert shown["creator"] == cli("id")[1].strip()
    assert shown["manifest"]["rounds"]["inner_steps"] == 5
    assert "inner_steps = 5" in cli("run", "show", created["manifest"])[1]
    invite = encode_invite(Invite(signed.run_id, (ADDRESS,)))
    assert json.loads(cli("run", "show", invite, "--json")[1])["addresses"] == [ADDRESS]
    assert ADDRESS in cli("run", "show", invite)[1]


def test_a_manifest_is_not_replaced_by_accident_and_names_the_data_directory_that_signed_it(
    cli: Cli, run_file: Path, tmp_path: Path
) -> None:
    code, out, _ = cli("run", "create", run_file)
    assert code == Exit.OK
    assert "--home" not in out
    before = run_file.with_suffix(".manifest").read_bytes()
    code, _, err = cli("run", "create", run_file)
    assert (code, "--force" in err) == (Exit.BAD_INPUT, True)
    assert run_file.with_suffix(".manifest").read_bytes() == before
    assert f" --home {tmp_path}/other" in cli("run", "create", run_file, "--force", "--home", tmp_path / "other")[1]


async def test_who_signs_in_a_directory_of_another_run_is_warned(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    assert "belongs to run" not in cli("run", "create", run_file)[2]
    (tmp_path / "home").mkdir(exist_ok=True)
    async with open_store(NodeSettings(home=tmp_path / "home").store) as store:
        await store.put_fact(MANIFEST_FACT, run_file.with_suffix(".manifest").read_bytes())
    other = tmp_path / "other.toml"
    other.write_text(run_file.read_text())
    assert "belongs to run" in cli("run", "create", other)[2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status"], Exit.NO_NODE, "farandole join INVITE"),
        (["leave"], Exit.NO_NODE, "no node runs in"),
        (["run", "create", "missing.toml"], Exit.BAD_INPUT, "cannot read missing.toml"),
        (["run", "show", "missing.manifest"], Exit.BAD_INPUT, "No such file"),
        (["run", "show", "farandole1abcdefgh"], Exit.BAD_INPUT, "damaged"),
        (["join", "missing.manifest"], Exit.BAD_INPUT, "is no invite, and no manifest"),
        (["join", "<“farandole1abcdefgh”>"], Exit.BAD_INPUT, "damaged"),
        (["join", ""], Exit.BAD_INPUT, "which run?"),
        (["relay", ""], Exit.BAD_INPUT, "which run?"),
        (["join", "run.toml"], Exit.BAD_INPUT, "run.toml is a run file, not a manifest: sign it first"),
        (["join", "--slow", "0.5"], Exit.USAGE, "slow"),
        (["status", "--watch"], Exit.BAD_INPUT, "--json"),  # there is no terminal
        (["join", "--stage", "-1"], Exit.USAGE, "stage"),
        (["join", "--download-mbit", "inf"], Exit.USAGE, "finite"),
        (["join", "--upload-mbit", "0.1"], Exit.USAGE, "at least 0.5"),
        (["join", "--announce", "/ip4/192.168.1.10/tcp/4001"], Exit.USAGE, "public addresses"),
        (["config", "show", "--quiet-hours", "25:00-26:00"], Exit.USAGE, "22:00-07:30"),
        (["limit"], Exit.USAGE, "--upload-mbit"),
    ],
)
def test_errors_have_a_code_and_say_what_to_do(cli: Cli, arguments: list[str], code: Exit, message: str) -> None:
    got, _, err = cli(*arguments)
    assert got == code
    assert message in err
    assert "Traceback" not in err


def test_an_invite_may_be_longer_than_a_file_name(cli: Cli) -> None:
    invite = encode_invite(Invite(bytes(32), tuple(ADDRESS.replace("4001", f"400{number}") for number in range(8))))
    assert len(invite) > 255
    assert cli("run", "show", invite)[0] == Exit.OK
    assert cli("join", invite, "--max-rounds", "0")[0] == Exit.USAGE


def test_status_peers_page_and_invite_of_a_running_node(cli: Cli, node: FakeNode) -> None:
    code, out, _ = cli("status")
    assert code == Exit.OK
    assert "inner steps of round 7" in out
    assert json.loads(cli("status", "--json")[1]) == json.loads(msgspec.json.encode(STATUS))
    assert [line.split()[0] for line in cli("peers")[1].splitlines() if "this node" in line] == [ALICE[-8:]]
    assert [member["peer_id"] for member in json.loads(cli("peers", "--json")[1])][:2] == [ALICE, BOB]
    assert cli("dashboard")[:2] == (Exit.OK, "http://127.0.0.1:8710/#secret\n")
    assert json.loads(cli("dashboard", "--json")[1])["token"] == "secret"
    invite = decode_invite(cli("run", "invite")[1])
    assert invite.run_id.hex() == STATUS.run.run_id
    # Loopback addresses are useless to others, and so are members that are gone.
    assert invite.addresses == (f"/ip4/192.168.1.5/tcp/4001/p2p/{ALICE}", f"/ip4/192.168.1.6/tcp/4002/p2p/{BOB}")


def test_leave_waits_until_the_node_is_gone(cli: Cli, node: FakeNode) -> None:
    code, out, _ = cli("leave")
    assert (code, out.splitlines()[-1]) == (Exit.OK, "left")
    with locked(node.home / "lock"):
        assert cli("status")[0] == Exit.NO_NODE


# Modules that take longer than the tenth of a second in which help must appear.
HEAVY = ("torch", "libp2p", "numpy", "trio", "cryptography", "transformers", "zeroconf", "asyncio")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("status", ("torch", "libp2p")),
        ("run plan tiny", ("torch", "libp2p")),
        ("--help", HEAVY),
        ("join --help", (*HEAVY, "msgspec", "tomllib")),
        ("testnet run --help", HEAVY),
        ("config show", HEAVY),
    ],
)
def test_commands_start_without_what_they_do_not_need(line: str, names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("slow = 2")
    script = (
        "import atexit, sys; from farandole.node.cli import main; "
        f"atexit.register(lambda: print([m for m in {names} if m in sys.modules], file=sys.stderr)); main(sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *line.split()],
        env={"FARANDOLE_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stderr.splitlines()[-1] == "[]"


def test_a_defect_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "whole_app", lambda: lambda args: broken())
    with pytest.raises(ZeroDivisionError) as raised:
        cli.main(["status"])
    (note,) = raised.value.__notes__
    assert "defect of farandole" in note


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
