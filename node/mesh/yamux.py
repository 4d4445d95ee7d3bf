"""Drives `farandole.protocol.mesh.yamux` over one connection.

Streams write by themselves what the connection takes without a wait. One task writes the rest, and one reads. Streams
only touch buffers, so cancelling a stream's wait never leaves half a frame on the wire or loses a byte. Everything that
a frame causes happens between two checkpoints: no locks.

Traffic is charged to the node's bandwidth caps (`farandole.node.base.bandwidth`) here, except the payload of bulk
streams, which wait for the caps themselves and for an empty queue here: no control frame waits behind more bulk than
the one message that is being written.

`Upgrader` makes such connections of sockets and circuits: with Noise and yamux, nothing else. Noise is libp2p's
(`libp2p.security.noise`): it reads from a `RawLink` and gives a session to read from and write to. Peers are named by
Ed25519 keys here, so a peer with another kind of key has no name, and is refused.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final, cast

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.mesh.yamux import MAX_WINDOW, Yamux, YamuxStream
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import (
    SMALL_ORDER_KEYS,
    peer_id_bytes,
    peer_id_of,
    public_key_of_bytes,
    short_name,
)

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError, StrangerError
from .libp2p_parts import (
    ID,
    IRawConnection,
    ISecureConn,
    Noise,
    PeerIDMismatchesPubkey,
    create_new_key_pair,
    create_new_x25519_key_pair,
)
from .links import Negotiation, NoiseSession, RawLink, Socket

logger = logging.getLogger(__name__)

# Received and not yet read, over all connections of strangers: one stream's whole window.
MAX_STRANGERS_UNREAD_BYTES = MAX_WINDOW
# Taken in without a pause: one read of the link, in full messages.
MESSAGES_PER_PASS = 4
# For the last frames of a connection; a peer that does not read them is cut off.
CLOSE_TIMEOUT = 1.0
NOISE: Final = "/noise"
YAMUX: Final = "/yamux/1.0.0"
# From a socket to an authenticated, multiplexed connection. Five round trips at 400 ms fit twice.
HANDSHAKE_TIMEOUT = 5.0


class UnreadBudget:
    """Memory for unread data of strangers, shared by all connections of a node.

    A stranger is a peer for which ``is_needed`` is false. Keys are free, so a bound for each of them is none for all.
    """

    def __init__(self, is_needed: Callable[[bytes], bool] = lambda peer: False) -> None:
        self.is_needed = is_needed
        self.conns: set[MuxedConn] = set()
        self.num_unread = 0

    def limit(self) -> None:
        """Reset the fullest stream of the stranger with the most unread data, if strangers have sent too much."""
        if self.num_unread <= MAX_STRANGERS_UNREAD_BYTES:
            return
        strangers = [conn for conn in self.conns if not self.is_needed(conn.peer)]
        if sum(conn.state.num_unread for conn in strangers) > MAX_STRANGERS_UNREAD_BYTES:
            max(strangers, key=lambda conn: conn.state.num_unread).reset_fullest()


class MuxedConn:
    """One connection and its streams."""

    def __init__(
        self,
        session: NoiseSession,
        link: RawLink,
        peer: bytes,
        shaping: Shaping | None = None,
        budget: UnreadBudget | None = None,
        *,
        is_initiator: bool,
    ) -> None:
        """``session``: encrypts the traffic of the link; ``peer``: the authenticated peer at the other end."""
        self.session = session
        self.link = link
        self.peer = peer
        self.is_initiator = is_initiator
        self.is_closing = False
        """Whether the connection has ended, or is about to."""
        self.event_closed = trio.Event()
        self.num_received = 0
        self.state = Yamux(is_initiator=is_initiator, now=trio.current_time())
        self._shaping = shaping or Shaping()
        self._budget = budget or UnreadBudget()
        self._num_unread_budgeted = 0
        self._num_charged = self._num_writing = 0
        self._streams: dict[int, Libp2pStream] = {}
        self._scope = trio.CancelScope()
        self._opened = trio.Event()  # by the peer, or the connection is over
        self._work = trio.Event()  # something is queued
        self._room = trio.Event()  # something was written
        self._pong = trio.Event()  # the last ping is answered

    @property
    def streams(self) -> list[Libp2pStream]:
        """The streams, accepted or opened here, that are not over."""
        return list(self._streams.values())

    async def start(self) -> None:
        """Run until either end closes or the connection fails. Raises nothing."""
        self._budget.conns.add(self)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._run, self._write_frames)
                    nursery.start_soon(self._run, self._read_frames)
        finally:
            self.is_closing = True
            self.state.end()
            for event in (self.event_closed, self._opened, self._room):
                event.set()
            for stream in self._streams.values():
                stream.wake()
            self._streams.clear()
            self._budget.num_unread -= self._num_unread_budgeted
            self._budget.conns.discard(self)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # whatever a broken connection or its encryption raises ends it, and nothing else
            logger.debug("the connection to %s ends: %r", short_name(self.peer), error)
        self._scope.cancel()

    async def _write_frames(self) -> None:
        while True:
            self.write_now()
            if self.link.has_unwritten:
                await self.link.flush()
                self._note_written()
            elif self.is_closing:
                return
            else:
                self._work = trio.Event()
                await self._work.wait()

    def write_now(self) -> None:
        """Write queued frames as far as this needs no wait; `_write_frames` does the rest.

        Waking that task would cost each message a pass through the event loop.
        """
        while not self.link.has_unwritten and (data := self.state.data_to_send()):
            self._shaping.up.charge(self.state.num_counted_out - self._num_charged)
            self._num_charged = self.state.num_counted_out
            self._num_writing = len(data)
            self.session.write_now(data)
            if not self.link.has_unwritten:
                self._note_written()

    def _note_written(self) -> None:
        self.state.note_sent(self._num_writing)
        self._room.set()

    async def _read_frames(self) -> None:
        num_charged = num_messages = 0
        while not self.state.has_ended and (message := await self.session.read()):
            self.num_received += len(message)
            for stream_id in self.state.receive_data(message, trio.current_time()):
                self.note_change(self._streams.get(stream_id))
            if self.state.waiting:
                self._opened.set()
            if not self.state.awaits_pong:
                self._pong.set()
            self._shaping.down.charge(self.state.num_counted_in - num_charged)
            num_charged = self.state.num_counted_in
            self.note_change()
            self._budget.limit()
            num_messages += 1
            if num_messages % MESSAGES_PER_PASS == 0:  # small ones come by the thousand with one read, and others wait
                await trio.lowlevel.checkpoint()

    def end(self) -> None:
        """Ask the connection to end, once what is queued and a go-away are written, after `CLOSE_TIMEOUT` at most."""
        if not self.is_closing:
            self.is_closing = True
            self._scope.deadline = trio.current_time() + CLOSE_TIMEOUT
            self.state.go_away()
            self._work.set()

    def abort(self) -> None:
        """End at once, without waiting for the peer."""
        self.is_closing = True
        self._scope.cancel()
        self.event_closed.set()

    async def ping(self) -> None:
        """Ping the peer, or wait for its answer to a ping under way."""
        if not self.state.awaits_pong:
            self._pong = trio.Event()
            self.state.ping(trio.current_time(), secrets.randbits(32))
            self.note_change()
        await self._pong.wait()

    async def open_stream(self) -> Libp2pStream:
        """Open a stream; raise `trio.BrokenResourceError` if the connection is over."""
        await trio.lowlevel.checkpoint()
        if self.event_closed.is_set() or self.state.has_ended:
            raise trio.BrokenResourceError("connection closed")
        return self._add(self.state.open_stream())

    async def accept_stream(self) -> Libp2pStream:
        """Return the next stream that the peer opens; raise `trio.BrokenResourceError` if the connection is over."""
        await trio.lowlevel.checkpoint()
        while (state := self.state.accept_stream()) is None:
            if self.event_closed.is_set():
                raise trio.BrokenResourceError("connection closed")
            self._opened = trio.Event()
            await self._opened.wait()
        return self._add(state)

    def _add(self, state: YamuxStream) -> Libp2pStream:
        stream = Libp2pStream(state, self)
        if self.state.is_open(state.stream_id):
            self._streams[state.stream_id] = stream
        self.note_change()
        return stream

    def reset_fullest(self) -> None:
        """Reset the stream with the most unread data; end the connection if that data is of ended streams."""
        stream_id = self.state.reset_fullest()
        if stream_id is None:
            self.abort()
        else:
            self.note_change(self._streams.get(stream_id))

    def note_change(self, stream: Libp2pStream | None = None) -> None:
        """Handle a change of the state, and of this stream: wake its users and the writer, count unread data."""
        if stream is not None:
            stream.wake()
            if not self.state.is_open(stream.state.stream_id):
                self._streams.pop(stream.state.stream_id, None)
        if self.state.num_queued:
            self._work.set()
        if self in self._budget.conns:
            self._budget.num_unread += self.state.num_unread - self._num_unread_budgeted
            self._num_unread_budgeted = self.state.num_unread

    async def wait_for_room(self) -> None:
        """Wait until some of the queue is written, or the connection is over."""
        if self._room.is_set() and not self.event_closed.is_set():
            self._room = trio.Event()
        await self._room.wait()


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
        self.handshake_hash = conn.session.handshake_hash
        """The hash of the connection's Noise handshake: 32 bytes, the same at both ends and nowhere else."""
        self.is_relayed = conn.link.is_relayed
        """Whether a relay carries the connection."""
        self.remote_address = conn.link.remote
        """Host and port at the other end of the connection; None if it is relayed."""
        self._conn = conn
        self._waiting = trio.lowlevel.ParkingLot()
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
            await (self._conn.wait_for_room() if self.state.send_window else self._waiting.park())
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
            await self._waiting.park()
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
        self._waiting.unpark_all()

    def _broken(self) -> trio.BrokenResourceError:
        return trio.BrokenResourceError(f"{self.protocol}: stream reset or connection lost")

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError


class Upgrader:
    """Authenticates connections by one key, and multiplexes them."""

    def __init__(
        self,
        key: Ed25519PrivateKey,
        shaping: Shaping | None = None,
        budget: UnreadBudget | None = None,
        network_key: bytes = b"",
    ) -> None:
        """``network_key``: the key of a private run; empty: connections are standard libp2p."""
        self.network_key = network_key
        pair = create_new_key_pair(key.private_bytes_raw())
        self._noise = Noise(pair, noise_privkey=create_new_x25519_key_pair().private_key)
        self._shaping = shaping
        self._budget = budget

    async def upgrade(self, link: RawLink, peer: bytes | None, *, is_initiator: bool) -> MuxedConn:
        """Return the connection over a link, which no task runs yet. Errors pass through, and close the link.

        ``is_initiator``: whether this end has dialled; then only this peer may be at the other end. If the other end
        has, ``peer`` is one that we dial at the same time, if any; it may wait for us to begin.
        """
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                await self._begin(link)
                negotiation = Negotiation(link.read, link.write)
                if is_initiator:
                    await negotiation.propose(NOISE)
                elif peer is None:
                    await negotiation.answer((NOISE,))
                else:
                    is_initiator = await negotiation.find_role(NOISE)
                session, found = await self._authenticate(link, peer if is_initiator else None)
                over_session = Negotiation(session.read, session.write)
                await (over_session.propose(YAMUX) if is_initiator else over_session.answer((YAMUX,)))
        except BaseException:  # also when cancelled: nothing else owns the link yet
            link.abort()
            raise
        link.finish_handshake()
        noise = NoiseSession(session, link)
        return MuxedConn(noise, link, found, self._shaping, self._budget, is_initiator=is_initiator)

    async def authenticate(self, link: RawLink, peer: bytes) -> ISecureConn:
        """Do the first half of `upgrade`, for an initiator that only checks the peer's identity; it closes the link."""
        with trio.fail_after(HANDSHAKE_TIMEOUT):
            await self._begin(link)
            await Negotiation(link.read, link.write).propose(NOISE)
            return (await self._authenticate(link, peer))[0]

    async def prove(self, peer: bytes, target: tuple[str, int]) -> None:
        """Dial a peer, and hang up as soon as it has authenticated itself.

        Raises `StrangerError` if it is another peer; other errors of the dial pass through.
        """
        link = Socket(await trio.open_tcp_stream(*target))
        try:
            await self.authenticate(link, peer)
        except StrangerError as error:
            raise StrangerError(f"{peer_id_of(peer)} is not at {target[0]} port {target[1]}") from error
        finally:
            link.abort()

    async def _begin(self, link: RawLink) -> None:
        """Begin the encryption of a private run; a circuit lies inside connections that have it already.

        Raises `trio.BrokenResourceError` if the peer returns this end's nonce: it would reflect what it cannot read.
        """
        if (key := self.network_key) and not link.is_relayed and await link.hide(key) == await link.reveal(key):
            raise trio.BrokenResourceError("the peer reflects what it gets")

    async def _authenticate(self, link: RawLink, peer: bytes | None) -> tuple[ISecureConn, bytes]:
        """Do the Noise handshake, as its initiator if the peer is given; return the session and the peer's key."""
        raw = cast("IRawConnection", link)  # of which Noise uses what links have
        if peer is None:
            session = await self._noise.secure_inbound(raw)
        else:
            try:
                session = await self._noise.secure_outbound(raw, ID(peer_id_bytes(peer)))
            except PeerIDMismatchesPubkey as error:
                raise StrangerError(f"another peer than {peer_id_of(peer)} answers") from error
        remote = session.get_remote_peer()
        try:
            found = public_key_of_bytes(remote.to_bytes())
        except RemoteProtocolError as error:
            raise PeerUnreachableError(f"{remote} has no Ed25519 key, which peers need here") from error
        if found in SMALL_ORDER_KEYS:
            raise PeerUnreachableError("a key of small order proves nothing")
        if peer is not None and peer != found:
            raise StrangerError(f"{remote} answers for {peer_id_of(peer)}")
        return session, found
