"""Plain sockets."""

from __future__ import annotations

import socket


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback TCP: the one that dialled, and the one that was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]
