"""Replaces a relayed connection by a direct one: DCUtR over TCP (github.com/libp2p/specs, relay/DCUtR.md).

    callee     Connect(my addresses)             over the relayed connection, which the caller had made
    caller     Connect(mine)
    callee     Sync
    both       dial, the caller at once, the callee half a round trip after it has sent `Sync`

Both dial from the listening port, so that one side's outgoing packets open the way for the other's. On the resulting
connection the caller is the client of every handshake and the callee the server, as the specification requires,
whichever end's dial has arrived. The addresses are asked for just before: relays report what they see of that port,
over a connection that stays until the attempt is over, and so does its NAT mapping.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

import trio

from farandole.protocol.mesh.dialling import DCUTR_PROTOCOL, MAX_MESSAGE_BYTES, NUM_ATTEMPTS, Address, offer, targets
from farandole.protocol.wire.bounds import Backoff
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_of, short_name

from ...base.errors import PeerUnreachableError
from ...base.nurseries import open_service_nursery
from ..addresses import dial_target, multiaddr_of
from ..host import Host
from ..libp2p_parts import HolePunch, encode_delimited, multiaddr_bytes, multiaddr_texts, next_message, receive_message
from ..yamux import Libp2pStream
from .reachability import ANSWER_TIMEOUT, NUM_OBSERVERS, OBSERVE_TIMEOUT, Dialback, Reachability

logger = logging.getLogger(__name__)

# A lost SYN is sent again after one second, and after three.
ATTEMPT_TIMEOUT: Final = 4.0
# Interval of dials if the other end's router refuses instead of dropping, until the hole is open.
REDIAL_INTERVAL: Final = 0.2
# Until a peer has asked its own witnesses, which may have to wait for a dial-back.
MESSAGE_TIMEOUT: Final = ANSWER_TIMEOUT + NUM_OBSERVERS * OBSERVE_TIMEOUT
# Routers do not change; an attempt that fails for twelve seconds fails again, unless an address has changed.
FIRST_RETRY_AFTER, MAX_RETRY_AFTER = 60.0, 3_600.0
# Each dials a few addresses.
MAX_PUNCHING: Final = 8
# Between two looks for pairs to try, and for relayed connections that are no longer needed. A new connection ends the
# wait; the shorter pause is also made in a crowd of newcomers.
CHECK_INTERVAL, SETTLE_SECONDS = 5.0, 0.2
# By then most exchanges and downloads on a relayed connection are over; a link between stages is made again.
RETIRE_AFTER: Final = 120.0


class Puncher:
    """Both sides of hole punching, for one host."""

    def __init__(self, host: Host, dialback: Dialback, reachability: Reachability) -> None:
        self._host = host
        self._dialback = dialback
        self._reachability = reachability
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        self._under_way: set[bytes] = set()
        host.set_handler(DCUTR_PROTOCOL, self._answer)

    async def run(self) -> None:
        """Punch holes and retire relayed connections until cancelled."""
        connections = self._host.connections
        async with trio.open_nursery() as nursery:
            while True:
                for peer in connections.connected:
                    is_due = self._backoff.is_due(peer, trio.current_time(), self._path())
                    has_called = any(not conn.is_outbound for conn in connections.of(peer))
                    if connections.is_direct(peer):
                        connections.retire_relayed(peer, RETIRE_AFTER)
                    elif has_called and is_due and self._may_begin(peer):
                        self._under_way.add(peer)
                        nursery.start_soon(self._lead, peer)
                with trio.move_on_after(CHECK_INTERVAL):
                    await connections.changed.park()
                await trio.sleep(SETTLE_SECONDS)

    def _may_begin(self, peer: bytes) -> bool:
        return peer not in self._under_way and len(self._under_way) < MAX_PUNCHING and bool(self._host.own.listening)

    def _path(self) -> list[str]:
        """Return what success depends on here: the addresses that others see."""
        return [f"{ip} {port}" for ip, port in self._reachability.verdict.addresses]

    @contextlib.contextmanager
    def _attempt(self, peer: bytes) -> Iterator[None]:
        """Allow one attempt at a time with a peer; record how it ends."""
        self._under_way.add(peer)
        began = trio.current_time()
        try:
            yield
        finally:
            self._under_way.discard(peer)
            if self._host.connections.is_direct(peer):
                logger.info("direct with %s after %.1f s", short_name(peer), trio.current_time() - began)
                self._backoff.note_success(peer)
            elif peer in self._host.connected:
                pause = self._backoff.note_failure(peer, trio.current_time(), self._path())
                logger.info("no direct way to %s: relayed; tried again in %.0f s", short_name(peer), pause)

    def is_out_of_reach(self, peer: bytes) -> bool:
        """Return whether attempts have shown that a peer is reachable only through relays."""
        return not self._host.connections.is_direct(peer) and self._backoff.has_failed(peer, self._path())

    # The callee, which leads

    async def _lead(self, peer: bytes) -> None:
        try:
            with self._attempt(peer):
                async with self._observed() as observed, await self._host.open_stream(peer, DCUTR_PROTOCOL) as stream:
                    for _ in range(NUM_ATTEMPTS):
                        asked_at = trio.current_time()
                        with trio.fail_after(MESSAGE_TIMEOUT):
                            await self._send_offer(stream, observed)
                            offered = await receive_message(stream, HolePunch, MAX_MESSAGE_BYTES)
                        chosen = self._choose(peer, offered, observed)
                        with self._host.acceptor.expecting(peer, ()):
                            with trio.fail_after(MESSAGE_TIMEOUT):
                                await stream.send_all(encode_delimited(HolePunch(type=HolePunch.SYNC)))
                            await trio.sleep((trio.current_time() - asked_at) / 2)
                            await self._meet(peer, chosen, is_client=False)
                        if self._host.connections.is_direct(peer):
                            return
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("no hole to %s: %r", short_name(peer), error)

    # The caller

    async def _answer(self, stream: Libp2pStream) -> None:
        peer = stream.peer
        if not stream.is_relayed or not self._may_begin(peer):
            raise RemoteProtocolError("there is nothing to punch")
        with self._attempt(peer):
            async with self._observed() as observed:
                for _ in range(NUM_ATTEMPTS):
                    with trio.fail_after(ATTEMPT_TIMEOUT + 2 * MESSAGE_TIMEOUT):
                        offered = await next_message(stream, HolePunch, MAX_MESSAGE_BYTES)
                        if offered is None:
                            return
                        chosen = self._choose(peer, offered, observed)
                        await self._send_offer(stream, observed)
                    # The callee's dial may come before ours leaves: we begin the handshake on that as well.
                    with self._host.acceptor.expecting(peer, [ip for ip, _ in chosen]):
                        with trio.fail_after(MESSAGE_TIMEOUT):
                            sync = await receive_message(stream, HolePunch, MAX_MESSAGE_BYTES)
                        if sync.type != HolePunch.SYNC:
                            raise RemoteProtocolError("not the word to dial")
                        await self._meet(peer, chosen, is_client=True)

    # Both

    async def _send_offer(self, stream: Libp2pStream, observed: Sequence[Address]) -> None:
        """Send the addresses where this node can be met."""
        addresses = multiaddr_bytes(multiaddr_of(*address) for address in offer(observed, self._host.own.interfaces))
        await stream.send_all(encode_delimited(HolePunch(type=HolePunch.CONNECT, ObsAddrs=addresses)))

    def _choose(self, peer: bytes, offered: HolePunch, observed: Sequence[Address]) -> list[Address]:
        """Return which of the offered addresses to dial; raise `RemoteProtocolError` if the message is no offer."""
        if offered.type != HolePunch.CONNECT:
            raise RemoteProtocolError("not where to connect")
        found = (dial_target(address, peer) for address in multiaddr_texts(offered.ObsAddrs))
        return targets([address for address in found if address is not None], observed, self._host.own.ips)

    @contextlib.asynccontextmanager
    async def _observed(self) -> AsyncIterator[list[Address]]:
        """Yield the addresses that others see for the listening port, while the observed connection is held open."""
        async with self._dialback.observed_by_any() as seen:
            yield list(dict.fromkeys((*seen, *self._reachability.verdict.addresses)))

    async def _meet(self, peer: bytes, chosen: Sequence[Address], *, is_client: bool) -> None:
        """Dial all of them until there is a direct connection, or the time of the attempt is over."""

        async def dial_on(target: Address) -> None:
            while not self._host.connections.is_direct(peer):
                try:
                    await meet(self._host, peer, target, is_initiator=is_client)
                except Exception as error:  # whatever the other end does on a connection that proves nothing yet
                    logger.debug("not met at %s port %d: %r", *target, error)
                    await trio.sleep(REDIAL_INTERVAL)

        with trio.move_on_after(ATTEMPT_TIMEOUT):
            async with open_service_nursery() as nursery:
                for target in chosen:
                    nursery.start_soon(dial_on, target)
                while not self._host.connections.is_direct(peer):
                    await self._host.connections.changed.park()


async def meet(host: Host, peer: bytes, target: Address, *, is_initiator: bool) -> None:
    """Dial from the listening port while the peer does the same; the initiator of the handshake is agreed on.

    Errors of the dial pass through.
    """
    socket = await host.dialler.dial_from_listener(target)
    muxed = await host.upgrader.upgrade(socket, peer if is_initiator else None, is_initiator=is_initiator)
    if muxed.peer != peer:
        await muxed.link.close()
        raise PeerUnreachableError(f"{peer_id_of(muxed.peer)} is there, where {peer_id_of(peer)} should be")
    await host.connections.add(muxed, is_outbound=is_initiator, is_punched=True)
