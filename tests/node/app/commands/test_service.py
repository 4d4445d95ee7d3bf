"""Units that `farandole service install` would write; tests/node/app/service has systemd run them."""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.node.base.exits import Exit
from farandole.protocol.run.invite import Invite, encode_invite

Run = Callable[..., tuple[int, str, str]]
INVITE = encode_invite(Invite(bytes(32), ()))


def started(out: str) -> list[str]:
    """Return the arguments that a unit starts, after the interpreter."""
    (line,) = (line for line in out.splitlines() if line.startswith("ExecStart="))
    return line.split()[3:]


def test_a_unit_has_all_that_join_needs_and_is_not_written(run: Run, home: Path) -> None:
    code, out, err = run("service", "install", INVITE, "--print")
    assert code == Exit.OK
    assert started(out) == ["join", INVITE, "--home", str(home)]
    assert not home.exists()
    assert err.endswith("systemd/user/farandole.service\n")


def test_a_settings_file_elsewhere_is_named(run: Run, home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("slow = 2\n")
    out = run("service", "install", "--print", "--config", other)[1]
    assert started(out) == ["join", "--home", str(home), "--config", str(other)]


def test_paths_are_absolute_as_a_service_begins_elsewhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("name = 'demo'\nmodel = 'tiny'\n")
    assert run("run", "create", "run.toml")[0] == Exit.OK
    out = run("service", "install", "run.manifest", "--home", "here", "--print")[1]
    assert started(out) == ["join", str(tmp_path / "run.manifest"), "--home", str(tmp_path / "here")]


def test_a_relay_takes_several_runs(run: Run, home: Path) -> None:
    out = run("service", "install", "--as-relay", INVITE, INVITE, "--name", "relay", "--print")[1]
    assert started(out) == ["relay", INVITE, INVITE, "--home", str(home)]


def test_macos_gets_a_property_list(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    code, out, err = run("service", "install", INVITE, "--print")
    assert code == Exit.OK
    assert plistlib.loads(out.encode())["ProgramArguments"][3:] == ["join", INVITE, "--home", str(home)]
    assert err.endswith("Library/LaunchAgents/org.farandole.farandole.plist\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["install", "farandole1abcdefgh", "--print"], "damaged"),
        (["install", INVITE, INVITE, "--print"], "one run"),
        (["install", INVITE, "--name", "../x", "--print"], "no name for a service"),
        (["install"], "which run?"),
        (["install", "--as-relay"], "which run?"),
        (["uninstall", "--name", "never-installed"], "there is no service never-installed"),
    ],
)
def test_what_cannot_be_is_said(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run("service", *arguments)
    assert (code, message in err) == (Exit.BAD_INPUT, True)


def test_a_service_that_cannot_start_is_not_left_behind(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no systemctl
    code, _, err = run("service", "install", INVITE)
    assert (code, "systemctl" in err) == (Exit.BAD_INPUT, True)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".service"]


def test_a_settings_file_may_name_the_run(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path))
    home.mkdir()
    (home / "config.toml").write_text(f'invite = "{INVITE}"\n')
    assert "systemctl" in run("service", "install")[2]


def test_a_service_of_another_folder_is_not_replaced(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path))
    unit = tmp_path / "config/systemd/user/farandole.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("the service of another folder")
    code, _, err = run("service", "install", INVITE)
    assert (code, "give this one another --name" in err) == (Exit.BAD_INPUT, True)
    assert unit.read_text() == "the service of another folder"
