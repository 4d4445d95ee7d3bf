"""Plain sockets."""

from __future__ import annotations

import socket


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over loopback TCP: the dialling one, and the accepted one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]
