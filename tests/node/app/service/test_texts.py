"""Files for the service managers, parsed as these parse them."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from farandole.node.app.commands.control import LEAVE_TIMEOUT
from farandole.node.app.service import STOP_SECONDS, Launchd, Service, ServiceError, Systemd

COMMAND = ["/opt/py thon/bin/python", "-m", "farandole.node", "join", "farandole1abc"]


def of_home(home: str) -> Service:
    return Service("farandole", [*COMMAND, "--home", home], Path(home))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["home", "my home", "100% \"mine\" 'too'", "a$HOME;b", "back\\slash"])
def test_systemd_understands_the_unit_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    home.mkdir()
    program = tmp_path / "py thon"
    program.symlink_to("/bin/true")
    service = Service("farandole", [str(program), "--home", str(home)], home)
    unit = tmp_path / "farandole.service"
    unit.write_text(Systemd().text(service))
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


def test_a_unit_restarts_within_limits_leaves_in_good_order() -> None:
    lines = Systemd().text(of_home("/home/alice/my%node")).splitlines()
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


def test_a_property_list_restarts_what_failed_and_keeps_every_argument_whole() -> None:
    content = plistlib.loads(Launchd().text(of_home("/Users/alice/my <node> & more")).encode())
    assert content["Label"] == "org.farandole.farandole"
    assert content["ProgramArguments"] == [*COMMAND, "--home", "/Users/alice/my <node> & more"]
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    assert content["ExitTimeOut"] == 260
    assert content["StandardErrorPath"] == "/Users/alice/my <node> & more/service.log"
    assert content["StandardOutPath"] == "/dev/null", "nobody bounds that file"


def test_a_service_s_name_is_no_path() -> None:
    for name in ("../farandole", "a b", "", "x" * 65):
        with pytest.raises(ServiceError, match="no name for a service"):
            Service(name, COMMAND, Path("/home/alice"))
