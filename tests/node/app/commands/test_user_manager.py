"""A node under a real systemd, which serves one user in its own namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farandole.node.base.exits import Exit

from ....patience import PATIENCE

SYSTEMD = Path("/lib/systemd/systemd")
WORLD = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && mkdir -p -m 700 /run/user/0 &&
/lib/systemd/systemd --user --log-target=console &
wait
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("nsenter") is None,
    reason="needs root, systemd, unshare and nsenter",
)


class World:
    """The place where systemd runs, and where commands see it."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path, environment: dict[str, str]) -> None:
        self.process = process
        self.home = home
        self._environment = environment

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", "--target", self.first(), "--mount", "--pid", *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def first(self) -> str:
        """Return the first process of the namespaces, by its number outside; empty if there is none yet."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().strip()

    def farandole(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "farandole.node", *arguments)

    def systemctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", "--user", *arguments)

    def main_process(self) -> str:
        return self.systemctl("show", "--property=MainPID", "--value", "farandole").stdout.strip()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds: systemd sends no notice here."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def is_up(self) -> bool:
        return self.farandole("status", "--json").returncode == Exit.OK


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    home = tmp_path / "my home"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")},
        "XDG_RUNTIME_DIR": "/run/user/0",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "FARANDOLE_HOME": str(home),
    }
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", WORLD]
    with (tmp_path / "systemd.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        world = World(process, home, environment)
        world.wait_for(lambda: world.is_over() or bool(world.first()))
        world.wait_for(lambda: world.is_over() or world.systemctl("is-system-running").returncode == 0)
        if world.is_over():
            pytest.skip("systemd does not run in namespaces here: " + (tmp_path / "systemd.log").read_text())
        yield world
    finally:
        process.kill()
        process.wait()


def test_a_node_is_installed_restarted_and_removed(world: World, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("name = 'demo'\nmodel = 'tiny'\n[rounds]\ninner_steps = 5\n")
    assert world.farandole("run", "create", str(run_file)).returncode == Exit.OK
    config = "listen = ['/ip4/127.0.0.1/tcp/0']\nslow = 4\nmdns = false\nupnp = false\n"
    (world.home / "config.toml").write_text(config)

    installed = world.farandole("service", "install", str(run_file.with_suffix(".manifest")))
    assert installed.returncode == Exit.OK, installed.stderr
    assert "enable-linger" in installed.stdout
    world.wait_for(world.is_up)
    peer_id = json.loads(world.farandole("status", "--json").stdout)["peer_id"]

    killed = world.main_process()
    world.systemctl("kill", "--signal=KILL", "--kill-who=main", "farandole")
    world.wait_for(lambda: world.main_process() not in (killed, "0"))
    world.wait_for(world.is_up)
    assert json.loads(world.farandole("status", "--json").stdout)["peer_id"] == peer_id

    # An error that no restart can fix is left alone.
    (world.home / "config.toml").write_text("sloww = 4\n")
    world.systemctl("restart", "farandole")
    world.wait_for(lambda: world.systemctl("is-failed", "farandole").returncode == 0)
    assert world.systemctl("show", "--property=NRestarts", "--value", "farandole").stdout == "0\n"
    assert "left" in (world.home / "log").read_text()

    # Once mended, it starts with the options that it was installed with.
    (world.home / "config.toml").write_text(config)
    world.systemctl("reset-failed", "farandole")
    world.systemctl("start", "farandole")
    world.wait_for(world.is_up)
    assert json.loads(world.farandole("status", "--json").stdout)["peer_id"] == peer_id

    assert world.farandole("service", "uninstall").returncode == Exit.OK
    assert "not be found" in world.systemctl("status", "farandole").stderr
    again = world.farandole("service", "uninstall")
    assert (again.returncode, "no service farandole" in again.stderr) == (Exit.BAD_INPUT, True)
