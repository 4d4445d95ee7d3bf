"""Requests of a program to its node (`farandole.protocol.programs.program_messages`), over blocking sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TypeVar

from farandole.protocol.programs.program_messages import (
    LENGTH,
    MAX_ANSWER_BYTES,
    Answer,
    Refused,
    Request,
    decode_answer,
    framed_request,
)
from farandole.protocol.wire.errors import FarandoleError

AnswerType = TypeVar("AnswerType", bound=Answer)
READ_BYTES = 256 * 1024


class MeshError(FarandoleError):
    """The node refuses, or a peer cannot be reached, or has broken a stream off; the message says which."""


def ask(connection: socket.socket, request: Request, kind: type[AnswerType], timeout: float | None) -> AnswerType:
    """Make a request, and return the answer. Raises as `receive_answer` does."""
    try:
        connection.settimeout(timeout)
        connection.sendall(framed_request(request))
    except TimeoutError:
        raise
    except OSError as error:
        raise MeshError("the node has ended") from error
    return receive_answer(connection, kind, timeout)


def receive_answer(connection: socket.socket, kind: type[AnswerType], timeout: float | None) -> AnswerType:
    """Return the next answer. Raises `MeshError` if it is a refusal, or the node is gone, and `TimeoutError`."""
    try:
        (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size, timeout))
        if length > MAX_ANSWER_BYTES:
            raise MeshError(f"the node answers with {length} bytes: it is of another release")
        answer = decode_answer(receive_exactly(connection, length, timeout))
    except TimeoutError:
        raise
    except OSError as error:
        raise MeshError("the node has ended") from error
    if isinstance(answer, Refused):
        raise MeshError(answer.reason)
    if not isinstance(answer, kind):
        raise MeshError(f"the node answers with {type(answer).__name__}: it is of another release")
    return answer


def receive_exactly(connection: socket.socket, size: int, timeout: float | None) -> bytes:
    """Return this number of bytes. Raises `OSError`, also for an earlier end, and `TimeoutError`.

    ``timeout`` in seconds is for all of them, however slowly they come. Memory grows as bytes arrive, so a length that
    a peer has announced costs nothing by itself.
    """
    received, deadline = bytearray(), None if timeout is None else time.monotonic() + timeout
    while len(received) < size:
        if deadline is not None and (timeout := deadline - time.monotonic()) <= 0:
            raise TimeoutError("it took too long")
        connection.settimeout(timeout)
        if not (part := connection.recv(min(READ_BYTES, size - len(received)))):
            raise ConnectionResetError("the stream has ended")
        received += part
    return bytes(received)


def close(connection: socket.socket) -> None:
    """Close a connection, also one that another thread reads from."""
    with contextlib.suppress(OSError):  # the other end was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
