"""Doors: the sockets at which programs of this node's owner connect (`farandole.node.base.system.unix_socket`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NoReturn

import trio

if TYPE_CHECKING:
    # libp2p installs trio-typing's stubs, which hide trio's own types from checkers and keep this one elsewhere.
    from trio_typing import TaskStatus

# Pause after a failed accept: if no descriptor is free, one may be soon.
ACCEPT_PAUSE: Final = 0.1

_log = logging.getLogger(__name__)


async def serve_door(
    listener: trio.socket.SocketType,
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    max_connections: int,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Listen, and run ``serve`` for each of the owner's connections until cancelled; further ones wait.

    ``serve`` closes its connection, unless it raises. `trio.BrokenResourceError` and `trio.TooSlowError` mean that the
    program is gone, and end nothing else.
    """
    slots = trio.CapacityLimiter(max_connections)

    async def run(connection: trio.SocketStream) -> None:
        try:
            async with slots:
                await serve(connection)
        except (trio.BrokenResourceError, trio.TooSlowError):
            connection.socket.close()
        except BaseException:  # cancelled, too: nobody else has the connection
            connection.socket.close()
            raise

    listener.listen(max_connections)
    async with trio.open_nursery() as nursery:
        task_status.started()
        while True:
            try:
                accepted, _ = await listener.accept()
            except OSError as error:  # out of descriptors, or the program is gone again
                _log.warning("cannot accept a connection of a program: %s", error)
                await trio.sleep(ACCEPT_PAUSE)
                continue
            nursery.start_soon(run, trio.SocketStream(accepted))
