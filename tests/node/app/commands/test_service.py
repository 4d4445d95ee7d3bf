"""The unit that `farandole service` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.node.app.commands.control import LEAVE_TIMEOUT
from farandole.node.app.commands.service import STOP_SECONDS, unit_text
from farandole.node.base.exits import Exit
from farandole.protocol.run.invite import Invite, encode_invite

from .conftest import Run

INVITE = encode_invite(Invite(bytes(32), ()))


def started(out: str) -> list[str]:
    """Return the arguments that a unit starts, after the interpreter."""
    (line,) = (line for line in out.splitlines() if line.startswith("ExecStart="))
    return line.split()[3:]


def test_a_unit_has_all_that_join_or_relay_need(run: Run, home: Path, tmp_path: Path) -> None:
    code, out, _ = run("service", INVITE)
    assert code == Exit.OK
    assert started(out) == ["join", INVITE, "--home", str(home)]
    assert not home.exists()
    other = tmp_path / "other.toml"
    other.write_text("slow = 2\n")
    assert started(run("service", "--config", other)[1]) == ["join", "--home", str(home), "--config", str(other)]
    out = run("service", "--as-relay", INVITE, INVITE)[1]
    assert started(out) == ["relay", INVITE, INVITE, "--home", str(home)]


def test_paths_are_absolute_as_a_service_begins_elsewhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("name = 'demo'\nmodel = 'tiny'\n")
    assert run("run", "create", "run.toml")[0] == Exit.OK
    out = run("service", "run.manifest", "--home", "here")[1]
    assert started(out) == ["join", str(tmp_path / "run.manifest"), "--home", str(tmp_path / "here")]


def test_macos_is_told_where_to_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    code, _, err = run("service", INVITE)
    assert (code, "docs/install.md#macos" in err) == (Exit.BAD_INPUT, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["farandole1abcdefgh"], "damaged"),
        ([INVITE, INVITE], "one run"),
    ],
)
def test_what_cannot_be_is_said(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run("service", *arguments)
    assert (code, message in err) == (Exit.BAD_INPUT, True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["home", "my home", "100% \"mine\" 'too'", "a$HOME;b", "back\\slash"])
def test_systemd_understands_the_unit_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    program = tmp_path / "py thon"
    program.symlink_to("/bin/true")
    unit = tmp_path / "farandole.service"
    unit.write_text(unit_text([str(program), "--home", str(home)], home))
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_a_unit_restarts_within_limits_and_leaves_in_good_order() -> None:
    home = Path("/home/alice/my%node")
    command = ["/opt/py thon/bin/python", "-m", "farandole.node", "join", "farandole1abc", "--home", str(home)]
    lines = unit_text(command, home).splitlines()
    for line in (
        "Restart=on-failure",
        "StartLimitBurst=5",
        "StartLimitIntervalSec=900",
        "RestartPreventExitStatus=2 3 7",
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        "TimeoutStopSec=260",
        "OOMPolicy=continue",
        'ExecStart="/opt/py thon/bin/python" -m farandole.node join farandole1abc --home /home/alice/my%%node',
    ):
        assert line in lines


def test_a_manager_waits_longer_than_a_node_takes_to_leave() -> None:
    assert STOP_SECONDS > LEAVE_TIMEOUT
