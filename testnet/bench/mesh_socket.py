"""One program of the mesh benchmark, served by ``peer.py``: a plain TCP socket, the limit of both others."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_BYTES = 1024 * 1024
LENGTH = struct.Struct("<cQ")


class MeshSocketPeer:
    """One end of a TCP connection on loopback."""

    def __init__(self, vector: Callable[..., object]) -> None:
        pass

    def open(self, place: str, peers: list[str]) -> dict[str, Any]:
        """Connect to the other program, or, as the first one, serve it."""
        if not peers:
            listener = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=_serve, args=[listener], daemon=True).start()
            return {"peer_id": "", "addresses": [str(listener.getsockname()[1])]}
        self._connection = socket.create_connection(("127.0.0.1", int(peers[0])))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {"peer_id": "", "addresses": []}

    def is_connected(self) -> dict[str, Any]:
        """Return that both are connected."""
        return {"is_connected": True}

    def call(self, number: int, size: int) -> dict[str, Any]:
        """Send requests one after the other; return the seconds until each answer."""
        seconds = []
        for _ in range(number):
            request = os.urandom(size)
            started_at = time.monotonic()
            self._connection.sendall(LENGTH.pack(b"e", size) + request)
            answer = _receive(self._connection, size)
            seconds.append(time.monotonic() - started_at)
            assert answer == request
        return {"seconds": seconds}

    def push(self, size: int) -> dict[str, Any]:
        """Send bytes until the other program has them all."""
        piece = memoryview(os.urandom(PIECE_BYTES))
        started_at = time.monotonic()
        self._connection.sendall(LENGTH.pack(b"s", size))
        for start in range(0, size, PIECE_BYTES):
            self._connection.sendall(piece[: min(PIECE_BYTES, size - start)])
        _receive(self._connection, 1)
        return {"started_at": started_at, "ended_at": time.monotonic()}


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        number = connection.recv_into(view)
        if not number:
            raise ConnectionError("the other program is gone")
        view = view[number:]
    return bytes(content)


def _serve(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    piece = memoryview(bytearray(PIECE_BYTES))
    while True:
        kind, size = LENGTH.unpack(_receive(connection, LENGTH.size))
        if kind == b"e":
            connection.sendall(_receive(connection, size))
            continue
        while size:
            size -= connection.recv_into(piece[: min(PIECE_BYTES, size)])
        connection.sendall(b".")
