"""Relays peers to each other: the relay's part of Circuit Relay v2, within `farandole.protocol.mesh.relay.Limits`.

Relayed data uses only what this node leaves of its caps (`farandole.node.base.bandwidth.Leftover`), and has the lowest
priority on its connections. A circuit holds at most a window of `WINDOW_BYTES` in each direction. If neither end is a
member of this node's run, the circuit carries little (`Limits.for_strangers`): a newcomer can still reach a member, and
a member a newcomer.
"""

from __future__ import annotations

import logging
import time

import trio

from farandole.protocol.mesh.relay import HOP_PROTOCOL, MAX_MESSAGE_BYTES, STOP_PROTOCOL, Limits, RelayTable, Status
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_bytes, public_key_of_bytes, short_name

from ...base.bandwidth import Leftover, Shaping
from ...base.errors import PeerUnreachableError
from ...base.streams import expecting_answer
from ..addresses import MAX_ADDRESSES
from ..admission import site_of
from ..dialler import agree
from ..host import Host
from ..libp2p_parts import (
    HopMessage,
    PeerId,
    RelayStatus,
    Reservation,
    StopMessage,
    encode_delimited,
    multiaddr_bytes,
    receive_message,
)
from ..yamux import Libp2pStream

logger = logging.getLogger(__name__)

# A request follows as soon as its stream opens.
REQUEST_TIMEOUT = 5.0
# The target has a connection with us; it answers within a round trip.
STOP_TIMEOUT = 5.0
# 52 Mbit/s at 80 ms: what a home line with a public address sends.
WINDOW_BYTES = 512 * 1024
PIECE_BYTES = 65_536
# A peer that reads nothing for this time is given up.
STALL_TIMEOUT = 30.0


class RelayServer:
    """The relay of one host."""

    def __init__(self, host: Host, shaping: Shaping, limits: Limits | None) -> None:
        self._host = host
        self._limits = limits or Limits()
        self.table = RelayTable(self._limits)
        self._shaping = shaping
        self._leftovers = (Leftover(shaping.down), Leftover(shaping.up))
        host.connections.protect(self.table.has_reservation)

    async def run(self) -> None:
        """Relay until cancelled. Circuits under way then end with the host."""
        self._host.set_handler(HOP_PROTOCOL, self._serve)
        try:
            async for peer, is_connected in self._host.connections.events():
                if not is_connected:
                    self.table.forget(peer)
        finally:
            self._host.handlers.remove(HOP_PROTOCOL)

    async def _serve(self, stream: Libp2pStream) -> None:
        try:
            with trio.fail_after(REQUEST_TIMEOUT):
                request = await receive_message(stream, HopMessage, MAX_MESSAGE_BYTES)
            if not request.HasField("type") or request.type not in HopMessage.Type.values():
                raise RemoteProtocolError("not a hop message")
            peer = public_key_of_bytes(request.peer.id) if request.type == HopMessage.CONNECT else b""
        except RemoteProtocolError:
            await self._answer(stream, Status.MALFORMED_MESSAGE)
            return
        if stream.is_relayed:
            await self._answer(stream, Status.PERMISSION_DENIED)
        elif request.type == HopMessage.STATUS:
            await self._answer(stream, Status.UNEXPECTED_MESSAGE)
        elif not self._shaping.may_spend(WINDOW_BYTES):
            await self._answer(stream, Status.RESOURCE_LIMIT_EXCEEDED)
        elif request.type == HopMessage.RESERVE:
            await self._reserve(stream)
        else:
            await self._connect(stream, peer)

    async def _answer(self, stream: Libp2pStream, status: Status, reservation: Reservation | None = None) -> None:
        answer = HopMessage(type=HopMessage.STATUS, status=RelayStatus.ValueType(status), reservation=reservation)
        with trio.fail_after(REQUEST_TIMEOUT):
            await stream.send_all(encode_delimited(answer))

    # Reservations

    async def _reserve(self, stream: Libp2pStream) -> None:
        ip, _ = stream.remote_address or ("", 0)
        status = self.table.reserve(stream.peer, site_of(ip).address, trio.current_time())
        reservation = None
        if status is Status.OK:
            expires_at = int(time.time()) + self._limits.reservation_seconds
            own = [address for address in self._host.addresses if "/p2p-circuit" not in address][:MAX_ADDRESSES]
            reservation = Reservation(expire=expires_at, addrs=multiaddr_bytes(own))
        await self._answer(stream, status, reservation)

    # Circuits

    async def _connect(self, source: Libp2pStream, peer: bytes) -> None:
        status = self.table.open_circuit(source.peer, peer, trio.current_time())
        if status is not Status.OK:
            await self._answer(source, status)
            return
        members, limits = self._host.relays.members, self._limits
        if members is not None and members.isdisjoint((source.peer, peer)):  # in no run, or not yet, all are alike
            limits = limits.for_strangers
        try:
            if not self._host.connections.is_direct(peer):
                raise PeerUnreachableError("it has gone")
            target = await self._host.open_stream(peer, STOP_PROTOCOL, STOP_TIMEOUT)
            try:
                if target.is_relayed:
                    raise PeerUnreachableError("it has gone")
                request = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=peer_id_bytes(source.peer)))
                with expecting_answer(peer, STOP_TIMEOUT):
                    await agree(target, request)
                for stream in (source, target):
                    stream.state.max_window = WINDOW_BYTES
                await self._answer(source, Status.OK)
                await self._relay(source, target, limits)
            finally:
                target.reset()
        except PeerUnreachableError as error:
            logger.debug("cannot pass on to %s: %s", short_name(peer), error)
            await self._answer(source, Status.CONNECTION_FAILED)
        finally:
            self.table.close_circuit(source.peer, peer)

    async def _relay(self, first: Libp2pStream, second: Libp2pStream, limits: Limits) -> None:
        """Copy two streams to each other until both have ended, or one breaks, or a limit is reached.

        Both are reset at the end unless they ended by themselves.
        """
        num_moved, down, up = 0, self._shaping.down, self._shaping.up
        first.is_bulk = second.is_bulk = True

        async def copy(source: Libp2pStream, target: Libp2pStream) -> None:
            nonlocal num_moved
            try:
                while data := await source.receive_some(min(PIECE_BYTES, down.quantum, up.quantum)):
                    in_use.deadline = trio.current_time() + limits.idle_seconds
                    num_moved += len(data)
                    if num_moved > limits.circuit_bytes or not self._shaping.may_spend(2 * len(data)):
                        logger.debug("a circuit has moved all that it may")
                        in_use.cancel()
                    for leftover in self._leftovers:
                        await leftover.wait(len(data))
                    with trio.fail_after(STALL_TIMEOUT):
                        await target.send_all(data)
                await target.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
                logger.debug("a circuit ends: %r", error)
                in_use.cancel()

        with trio.move_on_after(limits.circuit_seconds), trio.move_on_after(limits.idle_seconds) as in_use:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copy, first, second)
                nursery.start_soon(copy, second, first)
            return
        first.reset()
        second.reset()
