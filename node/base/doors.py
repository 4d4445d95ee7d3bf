"""Doors: the sockets at which programs of this node's owner connect (`farandole.node.base.system.endpoint`)."""

from __future__ import annotations

import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from farandole.protocol.wire.errors import RemoteProtocolError

from .streams import read_exactly
from .system.endpoint import Endpoint

if TYPE_CHECKING:
    # libp2p installs trio-typing's stubs, which hide trio's own types from checkers and keep this one elsewhere.
    from trio_typing import TaskStatus

# A program that needs a token sends it at once.
TOKEN_TIMEOUT: Final = 5.0
# Pause after a failed accept: if no descriptor is free, one may be soon.
ACCEPT_PAUSE: Final = 0.1

_log = logging.getLogger(__name__)


async def serve_door(
    endpoint: Endpoint,
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    max_connections: int,
    refusal: bytes = b"",
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Listen, and run ``serve`` for each of the owner's connections until cancelled; further ones wait.

    ``serve`` closes its connection, unless it raises. `trio.BrokenResourceError` and `trio.TooSlowError` mean that the
    program is gone, and end nothing else. A program that does not send the endpoint's token gets the ``refusal``.
    """
    slots = trio.CapacityLimiter(max_connections)

    async def run(connection: trio.SocketStream) -> None:
        try:
            async with slots:
                if await _is_owners(connection, endpoint.token, refusal):
                    await serve(connection)
                else:
                    await connection.aclose()
        except (trio.BrokenResourceError, trio.TooSlowError):
            connection.socket.close()
        except BaseException:  # cancelled, too: nobody else has the connection
            connection.socket.close()
            raise

    endpoint.listener.listen(max_connections)
    async with trio.open_nursery() as nursery:
        task_status.started()
        while True:
            try:
                accepted, _ = await endpoint.listener.accept()
            except OSError as error:  # out of descriptors, or the program is gone again
                _log.warning("cannot accept a connection of a program: %s", error)
                await trio.sleep(ACCEPT_PAUSE)
                continue
            nursery.start_soon(run, trio.SocketStream(accepted))


async def _is_owners(connection: trio.SocketStream, token: bytes, refusal: bytes) -> bool:
    """Return whether the first line is the token, if there is one; if not, nothing that follows is read."""
    if not token:
        return True
    with trio.fail_after(TOKEN_TIMEOUT), contextlib.suppress(RemoteProtocolError):
        said = await read_exactly(connection.receive_some, len(token) + 1)
        if hmac.compare_digest(said, token + b"\n"):
            return True
        await connection.send_all(refusal)
    return False
