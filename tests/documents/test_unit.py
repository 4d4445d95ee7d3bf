"""The unit of systemd that docs/volunteer.md shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from farandole.node.app.commands.control import LEAVE_TIMEOUT
from farandole.node.base.exits import Exit

PAGE = Path(__file__).parents[2] / "docs" / "volunteer.md"


@pytest.fixture
def unit() -> str:
    found = re.search(r"^```ini\n(\[Unit\]\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_it(unit: str, tmp_path: Path) -> None:
    path = tmp_path / "farandole.service"
    path.write_text(unit.replace("%h/.local/bin/farandole", "/bin/true"))
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_it_restarts_within_limits_and_leaves_in_good_order(unit: str) -> None:
    values = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    final = (Exit.USAGE, Exit.BAD_INPUT, Exit.TRAINER_FAILED)
    assert values["RestartPreventExitStatus"] == " ".join(str(code.value) for code in final)
    assert (values["Restart"], values["KillMode"], values["OOMPolicy"]) == ("on-failure", "mixed", "continue")
    assert int(values["StartLimitBurst"]) * int(values["RestartSec"]) < int(values["StartLimitIntervalSec"])
    assert int(values["TimeoutStopSec"]) > LEAVE_TIMEOUT
