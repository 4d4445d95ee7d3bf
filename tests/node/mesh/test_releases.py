"""What a node loads of py-libp2p, and the range of releases that it works with."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]


def required() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "libp2p"]
    return found


def test_the_range_has_the_releases_that_were_tried_and_the_installed_one() -> None:
    """In 0.7.0 and older the messages for relays differ from the specification."""
    assert all(release in required().specifier for release in ["0.8.0", "0.8.1", version("libp2p")])
    assert "0.7.0" not in required().specifier
    assert "0.9.0" not in required().specifier


def test_a_daemon_loads_no_http_or_dns_client_and_neither_tls_nor_yamux_of_libp2p() -> None:
    code = "import sys, farandole.node.daemon; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "libp2p.security.noise.transport" in loaded
    unwanted = {"httpx", "requests", "dns", "libp2p.host.basic_host"}
    assert (unwanted | {"libp2p.security.tls", "libp2p.stream_muxer.yamux"}).isdisjoint(loaded)
