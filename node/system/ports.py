"""Ports that listen, the same way on every system."""

from __future__ import annotations

import socket
import sys
from typing import Final

LOOPBACK: Final = "127.0.0.1"


def listen_alone(listener: socket.socket) -> None:
    """Before it is bound: let nobody else bind to the same port, and do so even if one that has just ended did.

    On Windows anybody may bind to a port that is in use, and SO_REUSEADDR means just that. On other systems nobody may,
    and it is about connections of before that are not quite over.
    """
    if sys.platform == "win32":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
