"""The modules of libp2p that a node loads, checked in separate processes."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_a_daemon_loads_no_http_or_dns_client_and_neither_tls_nor_yamux_of_libp2p() -> None:
    loaded = run("import sys, farandole.node.daemon; print(*sys.modules, sep='\\n')").splitlines()
    assert "libp2p.security.noise.transport" in loaded
    unwanted = {
        "httpx",
        "requests",
        "dns",
        "libp2p.host.basic_host",
        "libp2p.security.tls",
        "libp2p.stream_muxer.yamux",
    }
    assert unwanted.isdisjoint(loaded)


def test_all_of_libp2p_is_there_for_whoever_asks() -> None:
    code = "import farandole.node.mesh, libp2p; print(libp2p.peer.id.ID, libp2p.new_host)"
    assert "function new_host" in run(code)
    assert "function new_host" in run("import libp2p; import farandole.node.daemon; print(libp2p.new_host)")


def test_a_name_that_a_package_has_not_is_no_attribute() -> None:
    code = "import farandole.node.mesh, libp2p; print(hasattr(libp2p, 'nothing'), hasattr(libp2p, 'new_host'))"
    assert run(code) == "False True"
    assert run("import farandole.node.mesh, libp2p; print(hasattr(libp2p, '__wrapped__'))") == "False"
