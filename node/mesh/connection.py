"""A connection that owns its tasks and its streams' tasks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_of, short_name
from farandole.protocol.wire.token_bucket import TokenBucket

from ..base.errors import PeerUnreachableError
from .libp2p_stream import Libp2pStream
from .protocol_handlers import propose
from .yamux import MuxedConn

if TYPE_CHECKING:
    from .connections import ConnectionPool

logger = logging.getLogger(__name__)

# For the last frames of a connection; a peer that does not read them is cut off.
CLOSE_TIMEOUT = 1.0
# Streams of one connection whose protocol is not agreed yet, and the rate at which they begin: a burst, then a number a
# second. More than any protocol here opens; streams over the limit wait.
MAX_NEGOTIATIONS_PER_CONNECTION = 32
STREAM_BURST, STREAMS_PER_SECOND = 128.0, 32.0
# Handlers at work for one connection; a stream's handler may outlive the stream for a moment.
MAX_HANDLERS_PER_CONNECTION = 256
# Handlers may read what came before a connection ended; then they are cancelled.
HANDLER_GRACE = 5.0

ServeStream = Callable[[Libp2pStream, Callable[[], None]], Awaitable[None]]
"""Serves a stream that the peer has opened; calls back exactly once, when its protocol is agreed or refused."""


class Connection:
    """One connection; its streams and tasks end with it."""

    def __init__(self, muxed: MuxedConn, pool: ConnectionPool, *, is_outbound: bool, is_punched: bool = False) -> None:
        """``is_outbound``: whether this node dialled; ``is_punched``: whether a hole punch made it."""
        self.muxed = muxed
        self.peer = muxed.peer
        self.link = muxed.link
        self.is_outbound = is_outbound
        self.is_punched = is_punched
        self.opened_at = trio.current_time()
        self.finished = trio.Event()
        self.num_negotiating = 0
        """Streams that the peer has opened and whose protocol is not agreed yet."""
        self.is_introduced = False
        """Whether the peer has admitted this node (`farandole.node.mesh.gate`)."""
        self.introducing = trio.Lock()
        self._pool = pool
        self._is_asked_to_end = trio.Event()
        self._negotiations = trio.Semaphore(MAX_NEGOTIATIONS_PER_CONNECTION)

    @property
    def is_closed(self) -> bool:
        """Return whether the connection has ended, or is about to."""
        return self._is_asked_to_end.is_set()

    @property
    def is_in_use(self) -> bool:
        """Return whether a stream has an agreed protocol; a stream that the peer has not answered does not count."""
        return any(stream.protocol for stream in self.muxed.streams)

    async def run(self) -> None:
        """Run until either end closes, or the watchdog gives the peer up. Raises nothing."""
        try:
            async with trio.open_nursery() as handlers:
                handlers.start_soon(self._serve_streams)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.muxed.start)
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._close_when_asked)
                    await self.muxed.event_closed.wait()
                    nursery.cancel_scope.cancel()
                await self._leave()
                handlers.cancel_scope.deadline = trio.current_time() + HANDLER_GRACE
        except Exception:  # a defect costs this connection, and not the host
            logger.warning("the connection to %s failed", short_name(self.peer), exc_info=True)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT, shield=True):
                await self._leave()

    async def _leave(self) -> None:
        if self.finished.is_set():
            return
        self._is_asked_to_end.set()
        self.finished.set()
        self._pool.remove(self)
        await self.link.close()

    async def open_stream(self, protocol: str) -> Libp2pStream:
        """Open a stream of this protocol; raise `PeerUnreachableError` if that fails."""
        if self._pool.gate is not None:
            await self._pool.gate.introduce(self, protocol)
        try:
            return await propose(await self.muxed.open_stream(), protocol)
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            raise PeerUnreachableError(f"{peer_id_of(self.peer)} gives no stream of {protocol}: {error!r}") from error

    def end(self) -> None:
        """Ask the connection to end."""
        self._is_asked_to_end.set()

    async def close(self) -> None:
        """Ask the connection to end, and wait until it has."""
        self.end()
        await self.finished.wait()

    async def _close_when_asked(self) -> None:
        await self._is_asked_to_end.wait()
        with trio.move_on_after(CLOSE_TIMEOUT):
            await self.muxed.close()
        self.muxed.abort()

    async def _serve_streams(self) -> None:
        """Serve the streams that the peer opens, within the rate limits; further streams wait in the connection."""
        pace = TokenBucket(STREAM_BURST, STREAMS_PER_SECOND, trio.current_time())
        async with trio.open_nursery() as nursery:
            with suppress(trio.BrokenResourceError):
                while True:
                    stream = await self.muxed.accept_stream()
                    await self._negotiations.acquire()
                    is_needed = self._pool.is_needed(self.peer)
                    is_over = self.muxed.event_closed.is_set()
                    if not is_over:
                        await trio.sleep(max(0.0, 1 - pace.available(trio.current_time())) / STREAMS_PER_SECOND)
                        pace.take(trio.current_time())
                        if not is_needed:
                            await self._pool.turns.take(self.link.site)
                    # Streams that a stranger left behind when its connection ended are dropped.
                    is_left = self.muxed.event_closed.is_set() and not is_needed
                    if is_left or len(nursery.child_tasks) >= MAX_HANDLERS_PER_CONNECTION:
                        stream.reset()
                        self._negotiations.release()
                    else:
                        self.num_negotiating += 1
                        nursery.start_soon(self._pool.serve, stream, self._note_negotiated)

    def _note_negotiated(self) -> None:
        self.num_negotiating -= 1
        self._negotiations.release()

    async def _watch(self) -> None:
        """Give up a peer that does not answer: frozen, unplugged, or gone without closing.

        Anything received counts as an answer, since a pong may queue behind much data.
        """
        while True:
            before = self.muxed.num_received
            with trio.move_on_after(self._pool.ping_timeout) as deadline:
                await self.muxed.ping()
            if deadline.cancelled_caught and self.muxed.num_received == before:
                logger.info("%s does not answer: closing", short_name(self.peer))
                self.muxed.abort()
            await trio.sleep(self._pool.ping_interval)
