"""What a node loads of py-libp2p."""

from __future__ import annotations

import subprocess
import sys


def test_a_daemon_loads_no_http_or_dns_client_and_neither_tls_nor_yamux_of_libp2p() -> None:
    code = "import sys, farandole.node.daemon; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "libp2p.security.noise.transport" in loaded
    unwanted = {"httpx", "requests", "dns", "libp2p.host.basic_host"}
    assert (unwanted | {"libp2p.security.tls", "libp2p.stream_muxer.yamux"}).isdisjoint(loaded)
