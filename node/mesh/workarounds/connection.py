"""A connection that owns its tasks and those of its streams."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedStream
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from farandole.protocol.token_bucket import TokenBucket

from ..admission import site_of
from ..yamux import MuxedConn

if TYPE_CHECKING:
    from .swarm import MendedSwarm

logger = logging.getLogger(__name__)

# For the last words of a connection; whoever does not take them is cut off.
CLOSE_TIMEOUT = 1.0
# Streams of one connection whose protocol is not agreed yet, and how fast they begin: so many at once, then so many a
# second. More than any protocol here opens; what comes beyond waits its turn.
MAX_NEGOTIATIONS_PER_CONNECTION = 32
STREAM_BURST, STREAMS_PER_SECOND = 128.0, 32.0
# Handlers at work for one connection; a stream's handler may outlive the stream for a moment.
MAX_HANDLERS_PER_CONNECTION = 256
# Handlers may read what came before a connection ended; then they are cancelled.
HANDLER_GRACE = 5.0


class MendedConn(SwarmConn):
    """A connection that owns its tasks and those of its streams, and takes them along when it ends."""

    muxed_conn: MuxedConn

    def __init__(self, muxed_conn: MuxedConn, swarm: MendedSwarm, direction: str) -> None:
        super().__init__(muxed_conn, swarm, direction)
        self.set_transport_info(muxed_conn.get_transport_addresses(), muxed_conn.get_connection_type())
        self.finished = trio.Event()
        self.opened_at = trio.current_time()
        remote = muxed_conn.get_remote_address()
        self.site = site_of(remote[0] if remote else "")
        self._negotiating: set[IMuxedStream] = set()
        self._negotiations = trio.Semaphore(MAX_NEGOTIATIONS_PER_CONNECTION)
        self.is_punched = False
        self._mended_swarm = swarm

    async def run(self) -> None:
        """Until either end closes, or the watchdog gives the peer up. Raises nothing."""
        try:
            async with trio.open_nursery() as handlers:
                handlers.start_soon(self._serve_streams)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.muxed_conn.start)
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._close_when_asked)
                    await self.muxed_conn.event_closed.wait()
                    nursery.cancel_scope.cancel()
                await self._leave()
                handlers.cancel_scope.deadline = trio.current_time() + HANDLER_GRACE
        except Exception:  # whatever the library raises costs this connection, and not the host
            logger.warning("the connection to %s failed", self.muxed_conn.peer_id, exc_info=True)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT, shield=True):
                await self._leave()

    async def _leave(self) -> None:
        if self.finished.is_set():
            return
        self.event_closed.set()
        self.finished.set()
        self._mended_swarm.remove_conn(self)
        await self.muxed_conn.secured_conn.close()
        await self._mended_swarm.notify_disconnected(self)

    async def _close_when_asked(self) -> None:
        await self.event_closed.wait()
        with trio.move_on_after(CLOSE_TIMEOUT):
            await self.muxed_conn.close()
        self.muxed_conn.abort()

    async def _serve_streams(self) -> None:
        """Begin what the other end opens, no faster than the bounds say; the rest waits at the connection."""
        self.event_started.set()
        pace = TokenBucket(STREAM_BURST, STREAMS_PER_SECOND, trio.current_time())
        async with trio.open_nursery() as nursery:
            with suppress(MuxedConnUnavailable):
                while True:
                    stream = await self.muxed_conn.accept_stream()
                    await self._negotiations.acquire()
                    is_needed = self._mended_swarm.is_needed(self.muxed_conn.peer_id)
                    if not self.muxed_conn.is_closed:
                        await trio.sleep(max(0.0, 1 - pace.available(trio.current_time())) / STREAMS_PER_SECOND)
                        pace.take(trio.current_time())
                        if not is_needed:
                            await self._mended_swarm.turns.take(self.site)
                    self._negotiating.add(stream)
                    if self.muxed_conn.is_closed and not is_needed:
                        await stream.reset()  # what a stranger has left behind is nobody's
                        self.note_negotiated(stream)
                    elif len(nursery.child_tasks) < MAX_HANDLERS_PER_CONNECTION:
                        nursery.start_soon(self._handle_stream, stream)
                    else:
                        await stream.reset()
                        self.note_negotiated(stream)

    async def _handle_stream(self, stream: IMuxedStream) -> None:
        try:
            await self._handle_muxed_stream(stream)
        finally:
            self.note_negotiated(stream)

    def note_negotiated(self, stream: IMuxedStream) -> None:
        """A stream that the other end opened has its protocol, or has none: another may begin."""
        if stream in self._negotiating:
            self._negotiating.remove(stream)
            self._negotiations.release()

    async def close(self) -> None:
        """Ask the connection to end, and wait until it has."""
        self.event_closed.set()
        await self.finished.wait()

    async def _watch(self) -> None:
        """Give up a peer that answers nothing: frozen, unplugged, or gone without a word.

        Anything received counts as an answer, since a pong may queue behind much data.
        """
        while True:
            before = self.muxed_conn.num_received
            with trio.move_on_after(self._mended_swarm.ping_timeout) as deadline:
                await self.muxed_conn.ping()
            if deadline.cancelled_caught and self.muxed_conn.num_received == before:
                logger.info("%s does not answer: closing", self.muxed_conn.peer_id)
                self.muxed_conn.abort()
            await trio.sleep(self._mended_swarm.ping_interval)
