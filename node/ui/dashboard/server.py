"""Serves the dashboard on a loopback port; the control socket gives its address and token to the command line."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec
import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app

from ...base.system.sockets import LOOPBACK, listen_alone
from ...status.status import NodeStatus
from .app import Action, Dashboard


class PageAddress(msgspec.Struct, frozen=True):
    """URL and token of a node's page, for its owner."""

    url: str
    token: str


# A page that vanished without closing is detected by then; a page asks every second.
KEEP_ALIVE_SECONDS: Final = 10.0
# Requests have no bodies, and headers of a browser's size.
MAX_HEADER_BYTES: Final = 16 * 1024
MAX_BACKLOG: Final = 32
_MAX_WSGI_BODY_BYTES: Final = 0  # of applications of another kind


@asynccontextmanager
async def open_dashboard(
    port: int, status: Callable[[], NodeStatus], actions: Mapping[str, Action], clock: Callable[[], float]
) -> AsyncIterator[PageAddress]:
    """Serve within the block; at another port if ``port`` is not free."""
    dashboard = Dashboard(status, actions, secrets.token_urlsafe(24), clock)
    application: Any = dashboard.application()  # by Starlette's and Hypercorn's types ASGI is two things
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.keep_alive_timeout = KEEP_ALIVE_SECONDS
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.graceful_timeout = 0.0
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listen_alone(listener)
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError):  # taken, not ours to take, or no port at all
            listener.bind((LOOPBACK, 0))
        listener.listen(MAX_BACKLOG)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dashboard.run)
            nursery.start_soon(
                partial(worker_serve, sockets=Sockets([], [listener], []), shutdown_trigger=trio.sleep_forever),
                wrap_app(application, _MAX_WSGI_BODY_BYTES, "asgi"),
                config,
            )
            yield PageAddress(f"http://{LOOPBACK}:{listener.getsockname()[1]}/", dashboard.token)
            nursery.cancel_scope.cancel()
