"""The site of the pages, and the unit of systemd that docs/volunteer.md shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import farandole
from farandole.node.app.commands.control import LEAVE_TIMEOUT
from farandole.node.base.errors import Exit

from .markdown import PAGES, ROOT


def test_the_site_has_every_page_and_what_pages_link_to(tmp_path: Path) -> None:
    """Strict: a page outside the navigation, or a link to nothing, also within a page, ends the build.

    Quiet, it would count no warning, and none would end it.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    assert len([*tmp_path.rglob("*.html")]) == len(PAGES) + 1, "all pages and the one for what is not found"
    assert (tmp_path / "examples/own_loop.py").read_bytes() == (ROOT / "examples/own_loop.py").read_bytes()
    first = (tmp_path / "index.html").read_text()
    assert 'href="faq.html' in first
    assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', first), "it loads nothing from elsewhere"
    python = unescape((tmp_path / "python.html").read_text())
    assert all(f"farandole.{name}" in python for name in farandole.__all__)


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
