"""Serves the dashboard on a loopback port, and stores its address and token in a private file for the command line."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app

from ...base.system.files import open_private
from ...base.system.sockets import LOOPBACK, listen_alone
from ...status.status import NodeStatus
from .app import Action, Dashboard


class PageAddress(msgspec.Struct, frozen=True):
    """URL and token of a node's page, stored in a file next to its control socket."""

    url: str
    token: str

    @property
    def link(self) -> str:
        """The link to open. The token is in the fragment, which a browser sends to no server."""
        return f"{self.url}#{self.token}"


def find_place(place_file: Path) -> PageAddress | None:
    """Return the page address of the node that runs here, or None if it has none."""
    try:
        return msgspec.json.decode(place_file.read_bytes(), type=PageAddress)
    except (OSError, msgspec.MsgspecError):
        return None


@contextmanager
def stored_place(place_file: Path, place: PageAddress) -> Iterator[PageAddress]:
    """Store the page's address within the block, in a file that is private to its owner from the start."""
    place_file.unlink(missing_ok=True)
    with os.fdopen(open_private(place_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(msgspec.json.encode(place))
    try:
        yield place
    finally:
        place_file.unlink(missing_ok=True)


# A page that vanished without closing is detected by then; a page asks every second.
KEEP_ALIVE_SECONDS: Final = 10.0
# Requests have no bodies, and headers of a browser's size.
MAX_HEADER_BYTES: Final = 16 * 1024
MAX_BACKLOG: Final = 32
_MAX_WSGI_BODY_BYTES: Final = 0  # of applications of another kind


@asynccontextmanager
async def open_dashboard(
    place_file: Path,
    port: int,
    status: Callable[[], NodeStatus],
    actions: Mapping[str, Action],
    clock: Callable[[], float],
) -> AsyncIterator[PageAddress]:
    """Serve within the block, and store the address in ``place_file``; at another port if ``port`` is not free."""
    dashboard = Dashboard(status, actions, secrets.token_urlsafe(24), clock)
    application: Any = dashboard.application()  # by Starlette's and Hypercorn's types ASGI is two things
    with _listening(port) as listener:
        address = PageAddress(f"http://{LOOPBACK}:{listener.getsockname()[1]}/", dashboard.token)
        with stored_place(place_file, address) as place:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dashboard.run)
                nursery.start_soon(
                    partial(worker_serve, sockets=Sockets([], [listener], []), shutdown_trigger=trio.sleep_forever),
                    wrap_app(application, _MAX_WSGI_BODY_BYTES, "asgi"),
                    _config(),
                )
                yield place
                nursery.cancel_scope.cancel()


def _config() -> Config:
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.keep_alive_timeout = KEEP_ALIVE_SECONDS
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.graceful_timeout = 0.0
    return config


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listen_alone(listener)
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError):  # taken, not ours to take, or no port at all
        listener.bind((LOOPBACK, 0))
    listener.listen(MAX_BACKLOG)
    return listener
