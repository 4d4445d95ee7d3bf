"""The control API's listening socket as a port on loopback, for its owner alone by a token.

Every user and every web page of this machine can connect to a port. So a client sends a token first, on a line of its
own; the token is in a file of the home folder. A browser's request begins with another line, whatever host name it
used, and is not read further. This is one of two modules with the same two functions
(`farandole.node.base.system.endpoint`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import trio

from .endpoint import Endpoint
from .files import open_binary
from .sockets import LOOPBACK, listen_alone


class _Port(msgspec.Struct, frozen=True):
    """Port and token, stored in a file in the place of the Unix socket."""

    port: int
    token: str


@contextlib.contextmanager
def bound(path: Path) -> Iterator[Endpoint]:
    """Bind a port with a new token each time, so that an old token is useless."""
    token, place = secrets.token_urlsafe(24), _place_of(path)
    with socket.socket() as listener:
        listen_alone(listener)
        listener.bind((LOOPBACK, 0))
        place.unlink(missing_ok=True)
        with os.fdopen(open_binary(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(msgspec.json.encode(_Port(listener.getsockname()[1], token)))
        try:
            yield Endpoint(trio.socket.from_stdlib_socket(listener), token.encode())
        finally:
            place.unlink(missing_ok=True)


def connected(path: Path, timeout: float) -> socket.socket:
    """Connect to it and send the token."""
    try:
        place = msgspec.json.decode(_place_of(path).read_bytes(), type=_Port)
    except msgspec.MsgspecError as error:
        raise FileNotFoundError(f"{_place_of(path)} is damaged") from error
    connection = socket.create_connection((LOOPBACK, place.port), timeout)
    try:
        connection.sendall(place.token.encode() + b"\n")
    except BaseException:  # whatever it is, no caller has the socket yet
        connection.close()
        raise
    return connection


def _place_of(path: Path) -> Path:
    return path.with_suffix(".port")
