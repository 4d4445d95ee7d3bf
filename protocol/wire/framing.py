"""Frames on a stream: a length of four bytes, big-endian, then this number of bytes.

The length is compared with the cap before anything is allocated, so a false length costs its sender the stream, and
this node nothing.
"""

from __future__ import annotations

from .errors import LocalProtocolError, RemoteProtocolError

LENGTH_BYTES = 4


def frame(payload: bytes, max_bytes: int) -> bytes:
    """Return the payload with its length before it; raise `LocalProtocolError` if it is longer than ``max_bytes``."""
    if len(payload) > max_bytes:
        raise LocalProtocolError(f"a frame of {len(payload)} bytes, the protocol allows {max_bytes}")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameParser:
    """Cuts what arrives, in pieces of any size, into frames of at most ``max_bytes``.

    Holds at most one unfinished frame and the bytes received behind it: the caller takes all frames out (`next_frame`
    until None) before it reads more from the stream.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes from the stream."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """Return the next complete frame, None until more data comes; raise `RemoteProtocolError` if over the cap."""
        if len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if length > self.max_bytes:
            raise RemoteProtocolError(f"a frame of {length} bytes, at most {self.max_bytes} are allowed")
        end = LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[LENGTH_BYTES:end])
        del self._buffer[:end]
        return payload

    def receive_eof(self) -> None:
        """Note the end of the stream; raise `RemoteProtocolError` if it ends inside a frame."""
        if self._buffer:
            raise RemoteProtocolError(f"the stream ended {len(self._buffer)} bytes into a frame")

    @property
    def buffered(self) -> int:
        """Return the number of received bytes that belong to no frame returned yet."""
        return len(self._buffer)

    def take_rest(self) -> bytes:
        """Remove and return the bytes behind the returned frames, for a protocol that goes on with bare bytes."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest
