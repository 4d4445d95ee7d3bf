"""One Lattica peer of the benchmark: run as a script, in a virtual environment that has Lattica and not farandole.

Lattica moves bytes and averages nothing, so two of them send each other their vectors at once, and numpy averages. Of
its ways (a call with the vector as argument or as answer, plain, streamed, or by an iterator) a streamed call with the
vector as argument, over TCP, was the fastest. Requests and answers are JSON, a line each, on the socket whose
descriptor is the only argument; times are of `time.monotonic`, which processes of one machine share.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lattica import ConnectionHandler, Lattica, rpc_stream  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from collections.abc import Callable

CALL_TIMEOUT = 120  # the library takes nothing but a whole number
MAX_ERROR_CHARS = 300  # its errors bring their stack


class Mailbox(ConnectionHandler):  # type: ignore[misc]
    """The service that the other peer calls."""

    content: bytes = b""

    def empty(self) -> None:
        """Before the next delivery."""
        self.has_content = threading.Event()

    @rpc_stream  # type: ignore[untyped-decorator]
    def put(self, data: bytes) -> int:
        """Take the vector in."""
        self.content = data
        self.has_content.set()
        return len(data)


class Peer:
    """Holds the ``index``-th of two vectors and averages it with the other peer's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, index: int, num_elements: int, peers: list[str]) -> dict[str, Any]:
        """Join the other peer, if there is one yet."""
        self._vector = vector(index, num_elements)
        self._mean = (vector(0, num_elements) + vector(1, num_elements)) / 2
        address = f"/ip4/127.0.0.1/tcp/{free_port()}"
        builder = Lattica.builder().with_listen_addrs([address]).with_mdns(False).with_upnp(False)
        builder = builder.with_storage_path(str(self._folder)).with_key_path(str(self._folder))
        self._lattica = (builder.with_bootstraps(peers) if peers else builder).build()
        self._mailbox = Mailbox(self._lattica)
        self._mailbox.empty()
        return {"addresses": [f"{address}/p2p/{self._lattica.peer_id()}"]}

    def empty(self) -> dict[str, Any]:
        """Be ready for the next vector; says whether the other peer is there."""
        self._mailbox.empty()
        return {"is_connected": bool(self._lattica.get_all_peers())}

    def swap(self) -> dict[str, Any]:
        """Send the vector and have the other's."""
        started_at = time.monotonic()
        (other,) = self._lattica.get_all_peers()
        self._mailbox.get_stub(other).put(self._vector.tobytes()).result(CALL_TIMEOUT)
        if not self._mailbox.has_content.wait(CALL_TIMEOUT):
            raise TimeoutError("the other vector did not come")
        return {"started_at": started_at, "ended_at": time.monotonic()}

    def average(self) -> dict[str, Any]:
        """The mean of both vectors, and how far it is from what it should be."""
        started_at = time.monotonic()
        mean = np.frombuffer(self._mailbox.content, np.float32) + self._vector
        mean *= 0.5
        ended_at = time.monotonic()
        return {
            "started_at": started_at,
            "ended_at": ended_at,
            "rms_error": float(np.sqrt(np.square(mean - self._mean).mean())),
        }


def vector(index: int, num_elements: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(n,) fp32: what a peer starts with."""
    return np.random.default_rng(index).standard_normal(num_elements, dtype=np.float32)


def free_port() -> int:
    """A TCP port that was free a moment ago; Lattica does not tell which it took."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def serve(descriptor: int, peer: object) -> None:
    """Answer requests until the other end closes."""
    with socket.socket(fileno=descriptor) as control, control.makefile("rw") as lines:
        for line in lines:
            request = json.loads(line)
            try:
                act: Callable[..., dict[str, Any]] = getattr(peer, request.pop("do"))
                answer = act(**request)
            except Exception as error:  # the benchmark shows it and goes on
                answer = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        serve(int(sys.argv[1]), Peer(Path(folder)))
