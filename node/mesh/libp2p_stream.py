"""One stream of a connection, with trio's stream interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from farandole.protocol.mesh.yamux import YamuxStream

if TYPE_CHECKING:
    from .yamux import MuxedConn


class Libp2pStream(trio.abc.HalfCloseableStream):
    """One libp2p stream. `BrokenResourceError` means that the peer, or the connection to it, is gone.

    Every wait may be cancelled and repeated without losing a byte. A cancelled `send_all` has sent an unknown part of
    its data.
    """

    def __init__(self, state: YamuxStream, conn: MuxedConn) -> None:
        self.state = state
        self.peer = conn.peer
        self.protocol = ""
        """The protocol that both ends have agreed on; empty before."""
        self._conn = conn
        self._changed = trio.Event()
        self._is_closed = False

    @property
    def is_bulk(self) -> bool:
        """Return whether the user of the stream keeps to the caps (`farandole.node.base.bandwidth`) in both directions.

        Its data then has the lowest priority. Other streams do not wait for the caps, but count towards them.
        """
        return self.state.is_bulk

    @is_bulk.setter
    def is_bulk(self, value: bool) -> None:
        self.state.is_bulk = value

    @property
    def handshake_hash(self) -> bytes:
        """The hash of the connection's Noise handshake: 32 bytes, the same at both ends and nowhere else."""
        return self._conn.handshake_hash

    @property
    def is_relayed(self) -> bool:
        """Return whether a relay carries the connection."""
        return self._conn.link.is_relayed

    @property
    def remote_address(self) -> tuple[str, int] | None:
        """Host and port at the other end of the connection; None if it is relayed."""
        return self._conn.link.remote

    def limit_window(self, max_bytes: int) -> None:
        """Limit the unread bytes that the peer may send; a stream never gets less than its initial window."""
        self.state.max_window = max_bytes

    def limit(self, max_bytes: int) -> None:
        """Reset the stream when the peer has sent more than ``max_bytes``, including what it has sent already."""
        self.state.limit(max_bytes)
        self._conn.note_change(self)

    @property
    def room(self) -> int:
        """Return the number of bytes that `send_now` may be given now."""
        return 0 if self._is_closed else self.state.room

    def send_now(self, data: bytes) -> None:
        """Send at most `room` bytes, without a wait."""
        self.state.send(memoryview(data))
        self._conn.write_now()
        self._conn.note_change()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all data, or raise `trio.BrokenResourceError`. Waits for as long as the peer reads nothing."""
        view, has_waited = memoryview(data).cast("B"), False
        while view:
            self._check_open()
            if self.state.has_finished:
                raise trio.ClosedResourceError("this end has finished")
            if self.state.is_reset:
                raise self._broken()
            if num_taken := self.state.send(view):
                view = view[num_taken:]
                self._conn.write_now()
                self._conn.note_change()
                continue
            has_waited = True
            await (self._conn.wait_for_room() if self.state.has_credit else self._changed.wait())
        if not has_waited:  # each pass through the event loop costs a tenth of what a message of bulk does
            await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        """Return at once: nothing is known beforehand."""
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return at least one byte, or b"" at the end; raise `trio.BrokenResourceError` if the peer is gone."""
        self._check_open()
        if self.state.num_unread or self.state.has_ended or self.state.is_reset:  # else the wait below is one
            await trio.lowlevel.checkpoint()
        while not self.state.num_unread:
            self._check_open()
            if self.state.has_ended:
                return b""
            if self.state.is_reset:
                raise self._broken()
            await self._changed.wait()
        data = self.state.read(max_bytes, trio.current_time())
        self._conn.note_change()
        return data

    async def send_eof(self) -> None:
        """End this side; the peer's side stays open."""
        self._check_open()
        self.state.finish()
        self._conn.note_change(self)
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """End both sides. Data that was sent still arrives, and incoming data is refused."""
        if not self._is_closed:
            self._is_closed = True
            self.state.abandon()
            self._conn.note_change(self)
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Break the stream off: the peer gets an error, not an end."""
        if not self._is_closed:
            self._is_closed = True
            self.state.reset()
            self._conn.note_change(self)

    def wake(self) -> None:
        """Wake readers and writers after a change of state."""
        self._changed.set()
        self._changed = trio.Event()

    def _broken(self) -> trio.BrokenResourceError:
        return trio.BrokenResourceError(f"{self.protocol}: stream reset or connection lost")

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError
