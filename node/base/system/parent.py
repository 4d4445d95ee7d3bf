"""A child process's end of the connection with its parent (`farandole.node.base.system.children`)."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from typing import Final

from .sockets import LOOPBACK

SECRET_BYTES: Final = 32
# A process must start Python before it connects: on a machine under load, from a slow disk.
CONNECT_SECONDS: Final = 120.0
PORT: Final = "port:"


def connect_to_parent(parent: str) -> socket.socket:
    """Connect to the parent; call it once, before anything else reads the standard input. Raises `OSError`."""
    if not parent.startswith(PORT):
        return socket.socket(fileno=int(parent))
    # By its descriptor, from which `farandole.node.base.system.signals.tell_where` reads later.
    secrets = _exactly(2 * SECRET_BYTES, lambda size: os.read(0, size))
    connection = socket.create_connection((LOOPBACK, int(parent.removeprefix(PORT))), CONNECT_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(secrets[:SECRET_BYTES])
        if not hmac.compare_digest(_exactly(SECRET_BYTES, connection.recv), secrets[SECRET_BYTES:]):
            raise ConnectionRefusedError("the port is another process's now")
    except BaseException:  # whatever it is, no caller has the socket yet
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _exactly(size: int, read: Callable[[int], bytes]) -> bytes:
    received = b""
    while len(received) < size:
        part = read(size - len(received))
        if not part:
            raise ConnectionResetError("the parent is gone")
        received += part
    return received
