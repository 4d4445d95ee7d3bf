"""What a node loads of py-libp2p, and releases that it works with: the range, and the tests that each passed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
# All releases in the range. In 0.7.0 and older the messages for relays differ from the specification.
RELEASES = ["0.8.0", "0.8.1"]
# Tests that use Noise and each of the messages: dialling, streams, the DHT, relays, punching, strangers.
TESTS = [
    "test_host.py",
    "test_yamux.py",
    "test_dht.py",
    "test_hostile.py",
    "reach/test_relaying.py",
    "reach/test_punching.py",
]
INSTALL_TIMEOUT, TEST_TIMEOUT = 300, 900


def required() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "libp2p"]
    return found


def test_the_range_has_the_releases_that_are_tried_and_the_installed_one() -> None:
    assert all(release in required().specifier for release in [*RELEASES, version("libp2p")])
    assert "0.7.0" not in required().specifier
    assert "0.9.0" not in required().specifier


def test_a_daemon_loads_no_http_or_dns_client_and_neither_tls_nor_yamux_of_libp2p() -> None:
    code = "import sys, farandole.node.daemon; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "libp2p.security.noise.transport" in loaded
    unwanted = {"httpx", "requests", "dns", "libp2p.host.basic_host"}
    assert (unwanted | {"libp2p.security.tls", "libp2p.stream_muxer.yamux"}).isdisjoint(loaded)


@pytest.mark.soak
@pytest.mark.parametrize("release", RELEASES)
def test_the_mesh_works_with_each_release(release: str, tmp_path: Path) -> None:
    """The environment is new: it has this one's packages except libp2p, and whatever else that release needs."""
    venv.create(tmp_path, with_pip=True)
    python = str(tmp_path / ("Scripts" if os.name == "nt" else "bin") / "python")
    scheme = sysconfig.get_paths(vars={"base": str(tmp_path), "platbase": str(tmp_path)})
    ours = sysconfig.get_paths()["purelib"]
    (Path(scheme["purelib"]) / "zz_ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"libp2p=={release}"]
    if subprocess.run(install, check=False, timeout=INSTALL_TIMEOUT).returncode:
        pytest.skip(f"libp2p {release} cannot be installed here")
    found = [python, "-c", "from importlib.metadata import version; print(version('libp2p'))"]
    assert subprocess.run(found, check=True, capture_output=True, text=True).stdout.strip() == release
    run = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    tests = [f"tests/node/mesh/{name}" for name in TESTS]
    options = ["-q", "-m", "not soak", "-p", "no:cacheprovider"]
    done = subprocess.run([python, "-c", run, *options, *tests], cwd=ROOT, check=False, timeout=TEST_TIMEOUT)
    assert done.returncode == 0
