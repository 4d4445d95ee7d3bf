"""One program of the mesh benchmark, served by ``peer.py``, at a farandole node: it uses `Mesh`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import farandole

ECHO, SINK = "bench-echo/1", "bench-sink/1"
PIECE_BYTES = 1024 * 1024
TIMEOUT = 120.0


class MeshFarandolePeer:
    """A program at the node whose data directory is ``place``."""

    def __init__(self, vector: Callable[..., object]) -> None:
        pass

    def open(self, place: str, peers: list[str]) -> dict[str, Any]:
        """Use the node, and serve the other program."""
        self._folder = Path(place)
        self._mesh = farandole.Mesh(home=place)
        for name, serve in ((ECHO, _echo), (SINK, _sink)):
            threading.Thread(target=_serve_all, args=[self._mesh.listen(name), serve], daemon=True).start()
        return {"peer_id": self._mesh.peer_id, "addresses": []}

    def is_connected(self) -> dict[str, Any]:
        """Return whether the other program can be called."""
        try:
            self._other = self._mesh.members()[0]
            self._calls = self._mesh.open(self._other, ECHO, 5.0)
        except (IndexError, farandole.MeshError):
            return {"is_connected": False}
        return {"is_connected": True}

    def call(self, number: int, size: int) -> dict[str, Any]:
        """Send requests on the open stream, one after the other; return the seconds until each answer."""
        return {"seconds": [_timed(lambda request: _ask(self._calls, request), size) for _ in range(number)]}

    def call_anew(self, number: int, size: int) -> dict[str, Any]:
        """Send each request on a stream of its own."""

        def ask(request: bytes) -> bytes | None:
            with self._mesh.open(self._other, ECHO) as stream:
                return _ask(stream, request)

        return {"seconds": [_timed(ask, size) for _ in range(number)]}

    def push(self, size: int) -> dict[str, Any]:
        """Send bytes on a stream until the other program has them all."""
        piece = os.urandom(PIECE_BYTES)
        started_at = time.monotonic()
        with self._mesh.open(self._other, SINK) as stream:
            for start in range(0, size, PIECE_BYTES):
                stream.send(memoryview(piece)[: min(PIECE_BYTES, size - start)], TIMEOUT)
            stream.end()
            answer = stream.receive(TIMEOUT)
        assert answer is not None
        assert int(answer) == size
        return {"started_at": started_at, "ended_at": time.monotonic()}

    def share(self, size: int) -> dict[str, Any]:
        """Offer a file of random bytes."""
        path = self._folder / f"bench-{time.monotonic_ns()}"
        path.write_bytes(os.urandom(size))
        return {"file": self._mesh.share(path)}

    def fetch(self, file: str, size: int) -> dict[str, Any]:
        """Fetch the other's file."""
        path = self._folder / "bench-fetched"
        started_at = time.monotonic()
        self._mesh.fetch(file, path)
        ended_at = time.monotonic()
        assert path.stat().st_size == size
        path.unlink()
        return {"started_at": started_at, "ended_at": ended_at}


def _timed(ask: Callable[[bytes], bytes | None], size: int) -> float:
    request = os.urandom(size)
    started_at = time.monotonic()
    answer = ask(request)
    seconds = time.monotonic() - started_at
    assert answer == request
    return seconds


def _ask(stream: farandole.MeshStream, request: bytes) -> bytes | None:
    stream.send(request, TIMEOUT)
    answer: bytes | None = stream.receive(TIMEOUT)
    return answer


def _serve_all(listener: farandole.MeshListener, serve: Callable[[farandole.MeshStream], None]) -> None:
    for stream in listener:
        threading.Thread(target=serve, args=[stream], daemon=True).start()


def _echo(stream: farandole.MeshStream) -> None:
    with contextlib.suppress(farandole.MeshError, TimeoutError), stream:
        for message in stream:
            stream.send(message, TIMEOUT)


def _sink(stream: farandole.MeshStream) -> None:
    with contextlib.suppress(farandole.MeshError, TimeoutError), stream:
        stream.send(str(sum(map(len, stream))).encode(), TIMEOUT)
