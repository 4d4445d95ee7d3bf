"""A program's blocking connection to its node, and over it to a program of another member."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Final, Self

from farandole.protocol.programs import (
    END,
    LENGTH,
    MAX_ANSWER_BYTES,
    MAX_MESSAGE_BYTES,
    Answer,
    Request,
    decode_answer,
)
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.messagepack import encode

READ_BYTES: Final = 256 * 1024
# A message of this length at most leaves in one piece with its length: each piece is a frame of the encrypted stream.
_JOINED_BYTES: Final = 64 * 1024
# The end of a side is four bytes, which wait behind whatever was sent before.
END_SECONDS: Final = 30.0


class MeshError(FarandoleError):
    """The node refuses, or a peer cannot be reached, or has broken a stream off; the message says which."""


class MeshStream:
    """A stream of messages to a program of another member; messages arrive whole and in order.

    ``peer``: the peer id of that member. ``path``: how the stream travels, such as ``direct`` or ``relayed``.
    A sender waits while the other program does not read. One thread may send while another receives.

    `send` and `receive` raise `MeshError` if the stream is gone, and `TimeoutError` if a whole message takes more than
    ``timeout`` seconds (None: no limit). A later `receive` goes on where one has stopped; after a `send` that was not
    finished the stream is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.peer = self.path = ""  # until the node has said that the other program is there
        self._connection = connection
        self._connection.setblocking(False)
        self._received = bytearray()
        self._has_ended = False
        self._is_ended_here = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            with contextlib.suppress(MeshError, TimeoutError):
                self.end()
        self.close()

    def send(self, message: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        """Send a message of at most 16 MiB."""
        view = memoryview(message).cast("B")
        if view.nbytes > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {view.nbytes} bytes: the most is {MAX_MESSAGE_BYTES}; share a file instead")
        length = LENGTH.pack(view.nbytes)
        self._send((length + view,) if view.nbytes <= _JOINED_BYTES else (length, view), timeout)

    def receive(self, timeout: float | None = None, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """Return the next message; None when the other program has ended its side.

        Raises `MeshError` for one of more than ``max_bytes``.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        received = self._received  # grows as bytes arrive, so a length that a peer has announced costs nothing
        while not self._has_ended:
            if len(received) >= LENGTH.size:
                if received[: LENGTH.size] == END:
                    self._has_ended = True
                    break
                end = LENGTH.size + LENGTH.unpack_from(received)[0]
                if end > LENGTH.size + max_bytes:
                    raise MeshError(f"{self._other_end} announces a message that is longer than {max_bytes} bytes")
                if len(received) >= end:
                    message = bytes(memoryview(received)[LENGTH.size : end])
                    del received[:end]
                    return message
            try:
                part = self._connection.recv(READ_BYTES)
            except BlockingIOError:
                self._wait(selectors.EVENT_READ, deadline)
            except OSError as error:
                raise self._gone() from error
            else:
                if not part:
                    raise self._gone()
                received += part
        return None

    def __iter__(self) -> Iterator[bytes]:
        """Yield messages until the other program ends its side."""
        while (message := self.receive()) is not None:
            yield message

    def end(self) -> None:
        """Say that no more messages come from here; the other side may still send."""
        if not self._is_ended_here:
            self._send((END,), END_SECONDS)
            self._is_ended_here = True

    def close(self) -> None:
        """Close both sides, from any thread. Without `end` before, the other program gets a `MeshError`."""
        with contextlib.suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits
        self._connection.close()

    @property
    def is_closed(self) -> bool:
        """Return whether this end is closed."""
        return self._connection.fileno() < 0

    def _send(self, parts: Iterable[bytes | memoryview], timeout: float | None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    try:
                        view = view[self._connection.send(view) :]
                    except BlockingIOError:
                        self._wait(selectors.EVENT_WRITE, deadline)
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise
            raise self._gone() from error
        except BaseException:  # interrupted in the middle of a message: nothing can follow it
            self.close()
            raise

    def _wait(self, event: int, deadline: float) -> None:
        """Wait for the socket, which a second thread may use meanwhile: its own timeout would be for both."""
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._connection, event)
            except ValueError as error:  # closed by another thread
                raise self._gone() from error
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            if not selector.select(left):
                raise TimeoutError(f"{self._other_end} takes too long")

    @property
    def _other_end(self) -> str:
        return self.peer or "the node"

    def _gone(self) -> MeshError:
        if not self.peer:
            return MeshError("the node has ended")
        return MeshError(f"the stream to {self.peer} is gone: its program, that node or the connection has ended")


def ask(node: MeshStream, request: Request, timeout: float | None) -> Answer:
    """Make a request of the node, and return the answer.

    Raises `MeshError` if it is a refusal, or the node is gone, and `TimeoutError`.
    """
    node.send(encode(request), timeout)
    answer = decode_answer(node.receive(timeout, MAX_ANSWER_BYTES) or b"")
    if answer.refusal:
        raise MeshError(answer.refusal)
    return answer
