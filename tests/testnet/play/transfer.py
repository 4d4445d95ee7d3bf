"""Transfer times from one place to another, with plain sockets in separate processes."""

from __future__ import annotations

import subprocess
import sys

from farandole.testnet.natlab.namespace import Location

from ...patience import PATIENCE

SIZE = 1_000_000
_SERVER = f"""
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print(flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(1))
    left = {SIZE}
    while left:
        left -= len(connection.recv(left))
    connection.sendall(b"!")
"""
_CLIENT = f"""
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
started_at = time.monotonic()
connection.sendall(b"?"), connection.recv(1)
answered_at = time.monotonic()
connection.sendall(bytes({SIZE})), connection.recv(1)
print(answered_at - started_at, time.monotonic() - answered_at)
"""


def measure(near: Location, far: Location) -> tuple[float, float]:
    """Return the seconds of a round trip, and of sending `SIZE` bytes from ``near`` to ``far``."""
    with subprocess.Popen([*far.enter, sys.executable, "-c", _SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            client = subprocess.run(
                [*near.enter, sys.executable, "-c", _CLIENT, far.ip],
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE,
            )
        finally:
            server.kill()
    round_trip, transfer = map(float, client.stdout.split())
    return round_trip, transfer
