"""One Lattica peer of the benchmark, served by ``peer.py``.

Lattica moves bytes and averages nothing, so two peers send each other their vectors at once, and numpy averages. Of its
call types (with the vector as argument or as answer, plain, streamed, or by an iterator) a streamed call with the
vector as argument, over TCP, was the fastest. A file is one of its blocks.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from lattica import ConnectionHandler, Lattica, rpc_method, rpc_stream

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_INTERVAL = 0.1
CALL_TIMEOUT = 120  # the library requires a whole number


class Mailbox(ConnectionHandler):
    """The service that the other peer calls."""

    content: bytes = b""

    def empty(self) -> None:
        """Prepare for the next delivery."""
        self.has_content = threading.Event()

    @rpc_method
    def echo(self, request: bytes) -> bytes:
        """Return the request."""
        return request

    @rpc_stream
    def put(self, data: bytes) -> int:
        """Receive the vector, or other bytes."""
        self.content = data
        self.has_content.set()
        return len(data)


class Peer:
    """Holds the ``index``-th of two vectors and averages it with the other peer's; or calls the other peer."""

    def __init__(self, vector: Callable[[int, int], np.ndarray[Any, np.dtype[np.float32]]]) -> None:
        self._make_vector = vector
        self._folder = tempfile.TemporaryDirectory()  # removed with the process

    def open(self, peers: list[str], index: int = 0, num_elements: int = 0) -> dict[str, Any]:
        """Join the other peer, if there is one yet."""
        self._vector = self._make_vector(index, num_elements)
        self._mean = (self._make_vector(0, num_elements) + self._make_vector(1, num_elements)) / 2
        address = f"/ip4/127.0.0.1/tcp/{free_port()}"
        builder = Lattica.builder().with_listen_addrs([address]).with_mdns(False).with_upnp(False)
        builder = builder.with_storage_path(self._folder.name).with_key_path(self._folder.name)
        self._lattica = (builder.with_bootstraps(peers) if peers else builder).build()
        self._mailbox = Mailbox(self._lattica)
        self._mailbox.empty()
        return {"addresses": [f"{address}/p2p/{self._lattica.peer_id()}"]}

    def connect(self) -> None:
        """Wait until the other peer is there."""
        while not self._lattica.get_all_peers():
            time.sleep(LOOK_INTERVAL)  # there is no event for it, so poll

    def empty(self) -> None:
        """Prepare for the next vector."""
        self._mailbox.empty()

    def swap(self) -> dict[str, Any]:
        """Send the vector and receive the other's."""
        started_at = time.monotonic()
        self._stub().put(self._vector.tobytes()).result(CALL_TIMEOUT)
        if not self._mailbox.has_content.wait(CALL_TIMEOUT):
            raise TimeoutError("the other vector did not come")
        return {"started_at": started_at, "ended_at": time.monotonic()}

    def average(self) -> dict[str, Any]:
        """Average both vectors, and return the distance from the true mean."""
        started_at = time.monotonic()
        mean = np.frombuffer(self._mailbox.content, np.float32) + self._vector
        mean *= 0.5
        ended_at = time.monotonic()
        error = float(np.sqrt(np.square(mean - self._mean).mean()))
        return {"started_at": started_at, "ended_at": ended_at, "rms_error": error}

    def call(self, number: int, size: int) -> dict[str, Any]:
        """Send requests one after the other; return the seconds until each answer."""
        seconds, stub = [], self._stub()
        for _ in range(number):
            request = os.urandom(size)
            started_at = time.monotonic()
            answer = stub.echo(request).result(CALL_TIMEOUT)
            seconds.append(time.monotonic() - started_at)
            assert answer == request
        return {"seconds": seconds}

    def push(self, size: int) -> dict[str, Any]:
        """Send bytes until the other peer has them all."""
        content, stub = os.urandom(size), self._stub()
        started_at = time.monotonic()
        number = stub.put(content).result(CALL_TIMEOUT)
        ended_at = time.monotonic()
        assert number == size
        return {"started_at": started_at, "ended_at": ended_at}

    def share(self, size: int) -> dict[str, Any]:
        """Offer a block of random bytes."""
        return {"file": self._lattica.put_block(os.urandom(size))}

    def fetch(self, file: str, size: int) -> dict[str, Any]:
        """Fetch the other's block."""
        started_at = time.monotonic()
        _, content = self._lattica.get_block(file, timeout_secs=CALL_TIMEOUT)
        ended_at = time.monotonic()
        assert len(content) == size
        self._lattica.remove_block(file)
        return {"started_at": started_at, "ended_at": ended_at}

    def _stub(self) -> Any:
        (other,) = self._lattica.get_all_peers()
        return self._mailbox.get_stub(other)


def free_port() -> int:
    """Return a TCP port that was free a moment ago; Lattica does not report its own choice."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
