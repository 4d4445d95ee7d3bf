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
