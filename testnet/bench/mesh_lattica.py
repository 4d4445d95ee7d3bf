"""One program of the mesh benchmark, served by ``peer.py``: it uses Lattica's SDK.

Requests are its calls (`rpc_method`), bytes go as the argument of a streamed call, its fastest way, and a file is one
of its blocks.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from typing import TYPE_CHECKING, Any

from lattica import ConnectionHandler, Lattica, rpc_method, rpc_stream

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 120  # the library requires a whole number


class Service(ConnectionHandler):
    """The service that the other program calls."""

    @rpc_method
    def echo(self, request: bytes) -> bytes:
        """Return the request."""
        return request

    @rpc_stream
    def put(self, content: bytes) -> int:
        """Return the number of bytes that came."""
        return len(content)


class MeshLatticaPeer:
    """A peer of Lattica's."""

    def __init__(self, vector: Callable[..., object]) -> None:
        self._folder = tempfile.TemporaryDirectory()  # removed with the process

    def open(self, place: str, peers: list[str]) -> dict[str, Any]:
        """Join the other peer, if there is one yet; ``place`` is not needed."""
        with socket.create_server(("127.0.0.1", 0)) as listener:  # Lattica does not report its own choice
            port = listener.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}"
        builder = Lattica.builder().with_listen_addrs([address]).with_mdns(False).with_upnp(False)
        builder = builder.with_storage_path(self._folder.name).with_key_path(self._folder.name)
        self._lattica = (builder.with_bootstraps(peers) if peers else builder).build()
        self._service = Service(self._lattica)
        return {"peer_id": self._lattica.peer_id(), "addresses": [f"{address}/p2p/{self._lattica.peer_id()}"]}

    def is_connected(self) -> dict[str, Any]:
        """Return whether the other peer is there."""
        peers = self._lattica.get_all_peers()
        if peers:
            self._other = self._service.get_stub(peers[0])
        return {"is_connected": bool(peers)}

    def call(self, number: int, size: int) -> dict[str, Any]:
        """Send requests one after the other; return the seconds until each answer."""
        seconds = []
        for _ in range(number):
            request = os.urandom(size)
            started_at = time.monotonic()
            answer = self._other.echo(request).result(TIMEOUT)
            seconds.append(time.monotonic() - started_at)
            assert answer == request
        return {"seconds": seconds}

    def push(self, size: int) -> dict[str, Any]:
        """Send bytes until the other peer has them all."""
        content = os.urandom(size)
        started_at = time.monotonic()
        number = self._other.put(content).result(TIMEOUT)
        ended_at = time.monotonic()
        assert number == size
        return {"started_at": started_at, "ended_at": ended_at}

    def share(self, size: int) -> dict[str, Any]:
        """Offer a block of random bytes."""
        return {"file": self._lattica.put_block(os.urandom(size))}

    def fetch(self, file: str, size: int) -> dict[str, Any]:
        """Fetch the other's block."""
        started_at = time.monotonic()
        _, content = self._lattica.get_block(file, timeout_secs=TIMEOUT)
        ended_at = time.monotonic()
        assert len(content) == size
        self._lattica.remove_block(file)
        return {"started_at": started_at, "ended_at": ended_at}
