"""Passing peers on to each other: the relay's part of Circuit Relay v2, within `farandole.protocol.relay.Limits`.

What is relayed waits for what this node leaves of its caps (`farandole.node.base.bandwidth.Leftover`), and behind
everything else that goes over the same connections. A circuit holds at most a window of `WINDOW_BYTES` in each
direction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.errors import RemoteProtocolError
from farandole.protocol.identity import short_name
from farandole.protocol.relay import HOP_PROTOCOL, MAX_TOLD_ADDRESSES, STOP_PROTOCOL, Limits, RelayTable, Status

from ...base.bandwidth import Leftover, Shaper, Shaping
from ...base.errors import PeerUnreachableError
from ..admission import site_of
from ..relay_messages import (
    ConnectRequest,
    RelayAnswer,
    ReserveRequest,
    encode_hop,
    encode_stop,
    receive_hop,
    receive_stop,
    sign_voucher,
)

if TYPE_CHECKING:
    from ..host import Host
    from ..libp2p_stream import Stream

logger = logging.getLogger(__name__)

# A request follows its stream at once.
REQUEST_TIMEOUT = 5.0
# The peer asked for has a connection with us; it answers within a round trip.
STOP_TIMEOUT = 5.0
# 52 Mbit/s at 80 ms: what a home line with a public address sends.
WINDOW_BYTES = 512 * 1024
PIECE_BYTES = 65_536
# Who takes nothing for so long will not.
STALL_TIMEOUT = 30.0


class RelayServer:
    """The relay in one host."""

    def __init__(
        self, host: Host, key: Ed25519PrivateKey, shaping: Shaping | None = None, limits: Limits | None = None
    ) -> None:
        self._host = host
        self._key = key
        self._limits = limits or Limits()
        self._table = RelayTable(self._limits)
        shaping = shaping or Shaping()
        self._may_spend = shaping.may_spend
        self._shapers = (shaping.down, shaping.up)
        self._leftovers = (Leftover(shaping.down), Leftover(shaping.up))
        host.protect(self._table.has_reservation)

    @property
    def num_reservations(self) -> int:
        """Peers that are reached through this node."""
        return self._table.num_reservations

    @property
    def num_circuits(self) -> int:
        """Pairs of peers that talk through this node now."""
        return self._table.num_circuits

    async def run(self) -> None:
        """Relay until cancelled. What is under way then ends with the host."""
        self._host.set_handler(HOP_PROTOCOL, self._serve)
        try:
            with self._host.connection_events() as events:
                async for peer, is_connected in events:
                    if not is_connected:
                        self._table.forget(peer)
        finally:
            self._host.remove_handler(HOP_PROTOCOL)

    async def _serve(self, stream: Stream) -> None:
        try:
            with trio.fail_after(REQUEST_TIMEOUT):
                request = await receive_hop(stream)
        except RemoteProtocolError:
            await self._answer(stream, RelayAnswer(Status.MALFORMED_MESSAGE))
            return
        if stream.is_relayed:
            await self._answer(stream, RelayAnswer(Status.PERMISSION_DENIED))
        elif isinstance(request, ReserveRequest):
            await self._answer(stream, self._reserve(stream))
        elif isinstance(request, ConnectRequest):
            await self._connect(stream, request.peer)
        else:
            await self._answer(stream, RelayAnswer(Status.UNEXPECTED_MESSAGE))

    async def _answer(self, stream: Stream, answer: RelayAnswer) -> None:
        with trio.fail_after(REQUEST_TIMEOUT):
            await stream.send_all(encode_hop(answer))

    # Reservations

    def _reserve(self, stream: Stream) -> RelayAnswer:
        ip, _ = stream.remote_address or ("", 0)
        if not self._may_spend(WINDOW_BYTES):
            return RelayAnswer(Status.RESOURCE_LIMIT_EXCEEDED)
        status = self._table.reserve(stream.peer, site_of(ip).address, trio.current_time())
        if status is not Status.OK:
            return RelayAnswer(status)
        expires_at = int(time.time()) + self._limits.reservation_seconds
        return RelayAnswer(
            status,
            expires_at,
            tuple(address for address in self._host.addresses if "/p2p-circuit" not in address)[:MAX_TOLD_ADDRESSES],
            sign_voucher(self._key, stream.peer, expires_at),
            self._limits.circuit_bytes,
            self._limits.circuit_seconds,
        )

    # Circuits

    async def _connect(self, source: Stream, peer: bytes) -> None:
        if not self._may_spend(WINDOW_BYTES):
            await self._answer(source, RelayAnswer(Status.RESOURCE_LIMIT_EXCEEDED))
            return
        status = self._table.open_circuit(source.peer, peer, trio.current_time())
        if status is not Status.OK:
            await self._answer(source, RelayAnswer(status))
            return
        try:
            await self._relay_to(source, peer)
        finally:
            self._table.close_circuit(source.peer, peer)

    async def _relay_to(self, source: Stream, peer: bytes) -> None:
        try:
            target = await self._call(peer, source.peer)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("cannot pass on to %s: %r", short_name(peer), error)
            await self._answer(source, RelayAnswer(Status.CONNECTION_FAILED))
            return
        try:
            for stream in (source, target):
                stream.limit_window(WINDOW_BYTES)
            limits = self._limits
            await self._answer(
                source, RelayAnswer(Status.OK, max_bytes=limits.circuit_bytes, max_seconds=limits.circuit_seconds)
            )
            await _Pipe(self._limits, self._shapers, self._leftovers, self._may_spend).run(source, target)
        finally:
            target.reset()

    async def _call(self, peer: bytes, source: bytes) -> Stream:
        """A stream to a peer with a reservation, which has agreed to be connected."""
        if not self._host.is_direct(peer):
            raise PeerUnreachableError("it has gone")
        stream = await self._host.open_stream(peer, STOP_PROTOCOL, STOP_TIMEOUT)
        try:
            if stream.is_relayed:
                raise PeerUnreachableError("it has gone")
            with trio.fail_after(STOP_TIMEOUT):
                request = ConnectRequest(source, self._limits.circuit_bytes, self._limits.circuit_seconds)
                await stream.send_all(encode_stop(request))
                answer = await receive_stop(stream)
            if not isinstance(answer, RelayAnswer) or answer.status != Status.OK:
                raise PeerUnreachableError(f"it refuses: {answer}")
        except BaseException:  # cancelled, too: the target is to know that nobody waits
            stream.reset()
            raise
        return stream


class _Pipe:
    """Two streams, copied to each other until both have ended, or one breaks, or a limit is reached."""

    def __init__(
        self,
        limits: Limits,
        shapers: tuple[Shaper, Shaper],
        leftovers: tuple[Leftover, Leftover],
        may_spend: Callable[[int], bool],
    ) -> None:
        self._limits = limits
        self._may_spend = may_spend
        self._piece_bytes = min(PIECE_BYTES, *(shaper.quantum for shaper in shapers))
        self._leftovers = leftovers
        self._num_moved = 0
        self._scope = trio.CancelScope()

    async def run(self, first: Stream, second: Stream) -> None:
        """Both streams are broken off at the end unless they ended by themselves."""
        first.is_bulk = second.is_bulk = True
        self._put_off_end()
        with trio.move_on_after(self._limits.circuit_seconds), self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, first, second)
                nursery.start_soon(self._copy, second, first)
            return
        first.reset()
        second.reset()

    def _put_off_end(self) -> None:
        self._scope.deadline = trio.current_time() + self._limits.idle_seconds

    async def _copy(self, source: Stream, target: Stream) -> None:
        try:
            while data := await source.receive_some(self._piece_bytes):
                self._put_off_end()
                self._num_moved += len(data)
                if self._num_moved > self._limits.circuit_bytes or not self._may_spend(2 * len(data)):
                    logger.debug("a circuit has moved all that it may")
                    self._scope.cancel()
                for leftover in self._leftovers:
                    await leftover.wait(len(data))
                with trio.fail_after(STALL_TIMEOUT):
                    await target.send_all(data)
            await target.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            logger.debug("a circuit ends: %r", error)
            self._scope.cancel()
