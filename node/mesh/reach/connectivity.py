"""The connectivity of a node: whether others can dial it, the relays that it uses, and its own relay.

The relay's part of Circuit Relay v2 keeps within `farandole.protocol.mesh.relay.Limits`. Relayed data uses only what
this node leaves of its caps (`farandole.node.base.bandwidth.Leftover`), and has the lowest priority on its connections.
A circuit holds at most a window of `WINDOW_BYTES` in each direction. If neither end is a member of this node's run, the
circuit carries little (`Limits.for_strangers`): a newcomer can still reach a member, and a member a newcomer.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Final

import trio

from farandole.protocol.mesh.dialling import Address
from farandole.protocol.mesh.kademlia import relay_key
from farandole.protocol.mesh.reachability import ReachabilityKind, is_global
from farandole.protocol.mesh.relay import HOP_PROTOCOL, MAX_MESSAGE_BYTES, STOP_PROTOCOL, Limits, RelayTable, Status
from farandole.protocol.wire.bounds import Backoff, Latest
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_bytes, public_key_of_bytes, short_name

from ...base.bandwidth import Leftover, Shaping
from ...base.errors import PeerUnreachableError
from ...base.nurseries import open_service_nursery
from ...base.streams import expecting_answer
from ..addresses import MAX_ADDRESSES, direct_ips, multiaddr_of
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
from ..links import site_of
from ..yamux import Libp2pStream
from .punching import Puncher
from .reachability import Examiner, Reachability, tell_time
from .upnp import keep_ports

logger = logging.getLogger(__name__)

# While one is being replaced, the other serves.
NUM_RELAYS: Final = 2
# Renewal starts this number of seconds before a reservation ends, which leaves time for several tries.
RENEW_BEFORE: Final = 300.0
# A relay that refused is full. A peer that does not relay answers at once that it does not speak the protocol; it may
# relay soon, if all nodes have started at the same time.
FIRST_RETRY_AFTER, MAX_RETRY_AFTER = 4.0, 600.0
# Between two checks of the reservations, in addition to checks after a lost connection.
CHECK_INTERVAL: Final = 15.0
# The same while fewer than `NUM_RELAYS` are held; a peer that refused is left alone for longer.
HURRY_INTERVAL: Final = 2.0
# Peers asked at once for each free place.
NUM_ASKED: Final = 3
# Unconnected peers asked in one check: in a run of a thousand of which few relay, it would otherwise dial all of them.
MAX_STRANGERS: Final = 12
# Former relays, which are asked again when all connections are gone: a router that restarts loses the node nothing.
MAX_FORMER: Final = 8

# Timeout of a DHT lookup for relays, and the interval of lookups while relays are wanted.
FIND_TIMEOUT: Final = 5.0
FIND_INTERVAL: Final = 30.0

# A request follows as soon as its stream opens.
REQUEST_TIMEOUT = 5.0
# The target has a connection with us; it answers within a round trip.
STOP_TIMEOUT = 5.0
# 52 Mbit/s at 80 ms: what a home line with a public address sends.
WINDOW_BYTES = 512 * 1024
PIECE_BYTES = 65_536
# A peer that reads nothing for this time is given up.
STALL_TIMEOUT = 30.0


class RelayKeeper:
    """Keeps a node reachable that others cannot dial: holds reservations with two relays, and replaces lost ones.

    Candidates are connected peers, former relays, peers that the DHT lists as relays of the run, and its members; none
    is built in. Whether a peer relays is found out by asking it, which costs a round trip, and a peer that has refused
    is left alone for a while. The addresses through the relays are published.
    """

    def __init__(self, host: Host, reachability: Reachability, key: bytes, known: Collection[bytes] = ()) -> None:
        """``key``: of the run's relays in the DHT; ``known``: peers that may relay, whose addresses the host has."""
        self._host = host
        self._reachability = reachability
        self._key = key
        self._known = known
        self._found_at = -math.inf
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        self._former = Latest[bytes, None](MAX_FORMER)

    @property
    def _are_missing(self) -> bool:
        return len(self._host.relays.reservations) < NUM_RELAYS

    async def run(self) -> None:
        """Hold reservations while the node needs relays, until cancelled."""
        while True:
            if self._reachability.needs_relays:
                await self._keep()
            else:
                for held in self._host.relays.reservations:
                    self._host.relays.forget(held.relay)
            self._announce()
            is_hurried = self._reachability.needs_relays and self._are_missing
            await self._wait(HURRY_INTERVAL if is_hurried else CHECK_INTERVAL)

    async def _wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until a relay is lost or the node's reachability has changed."""

        async def end_at_change() -> None:
            await self._reachability.changed.park()
            waiting.cancel()

        with trio.move_on_after(seconds) as waiting:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_at_change)
                async for peer, is_connected in self._host.connections.events():
                    if not is_connected and self._host.relays.holds(peer):
                        waiting.cancel()

    async def _keep(self) -> None:
        soon = trio.current_time() + RENEW_BEFORE
        async with trio.open_nursery() as nursery:
            for held in self._host.relays.reservations:
                if held.expires_at < soon:
                    nursery.start_soon(self._reserve, held.relay)
        if self._are_missing:
            connected = [peer for peer in self._host.connected if self._host.connections.is_direct(peer)]
            random.shuffle(connected)
            await self._ask_some(self._due(connected))
        if self._are_missing:
            found = sorted(await self._find(), key=lambda peer: self._backoff.has_failed(peer))
            await self._ask_some(self._due([*self._former, *found])[:MAX_STRANGERS])

    async def _find(self) -> list[bytes]:
        """Return unconnected peers that may relay, announced relays first; looks them up in the DHT now and then."""
        relays: list[bytes] = []
        if trio.current_time() - self._found_at >= FIND_INTERVAL:
            self._found_at = trio.current_time()
            relays = [peer for peer, _ in await self._host.dht.find_providers(self._key, FIND_TIMEOUT)]
        others = [*self._known, *(self._host.relays.members or ())]
        for peers in (relays, others):
            random.shuffle(peers)
        left_out = {self._host.author, *self._host.connected}
        return [peer for peer in (*relays, *others) if peer not in left_out]

    def _due(self, peers: Iterable[bytes]) -> list[bytes]:
        """Return the peers that may be asked now, in the same order, each once."""
        now, holds = trio.current_time(), self._host.relays.holds
        return [peer for peer in dict.fromkeys(peers) if not holds(peer) and self._backoff.is_due(peer, now)]

    async def _ask_some(self, peers: list[bytes]) -> None:
        def is_far(peer: bytes) -> bool:
            """Return whether others on the internet could dial the peer, judging by our own connections to it."""
            addresses = (*self._host.connections.remote_addresses(peer), *self._host.dialler.known.of(peer))
            return any(map(is_global, direct_ips(addresses)))

        asked = sorted(peers, key=is_far, reverse=True)
        while asked and self._are_missing:
            batch, asked = asked[:NUM_ASKED], asked[NUM_ASKED:]
            async with trio.open_nursery() as nursery:
                for peer in batch:
                    nursery.start_soon(self._reserve, peer)

    async def _reserve(self, relay: bytes) -> None:
        is_renewal = self._host.relays.holds(relay)
        try:
            await self._host.relays.reserve(relay)
        except PeerUnreachableError as error:
            logger.debug("no relay: %s", error)
            self._backoff.note_failure(relay, trio.current_time())
            return
        self._backoff.note_success(relay)
        if len(self._host.relays.reservations) > NUM_RELAYS:  # others were asked at once, and have agreed before
            self._host.relays.forget(relay)
            return
        if not is_renewal:
            logger.info("reachable through the relay %s", short_name(relay))
        self._announce()  # the other requests may take their time
        self._former[relay] = None

    def _announce(self) -> None:
        verdict, through = self._reachability.verdict, [held.address for held in self._host.relays.reservations]
        public = verdict.addresses if verdict.kind is ReachabilityKind.PUBLIC else ()
        self._host.own.external = [*(multiaddr_of(*address) for address in public), *through]


class RelayServer:
    """The relay of one host."""

    def __init__(self, host: Host, shaping: Shaping, limits: Limits | None) -> None:
        self._host = host
        self._limits = limits or Limits()
        self.table = RelayTable(self._limits)
        self._shaping = shaping
        self._leftovers = (Leftover(shaping.down), Leftover(shaping.up))
        host.connections.protect(lambda peer: peer in self.table.reservations)

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


class Connectivity:
    """One node's reachability and its own relay; made by `open_connectivity`."""

    def __init__(self, host: Host, reachability: Reachability, server: RelayServer) -> None:
        self.reachability = reachability
        self.examiner = Examiner(host, reachability)
        self.puncher = Puncher(host, self.examiner.dialback, reachability)
        self.server = server
        self._host = host

    @asynccontextmanager
    async def observe_port(self, port: int) -> AsyncIterator[list[Address]]:
        """Yield a port's outer addresses as peers see them, while the block runs; empty if the router keeps ports.

        Peers are asked only if it is known that they see another port than this machine's.
        """
        listening = [own for _, own in self._host.own.listening]
        outer = [seen for _, seen in self.reachability.verdict.addresses]
        if self.reachability.verdict.kind is not ReachabilityKind.PUNCHABLE or set(outer) <= set(listening):
            yield []
            return
        async with self.examiner.dialback.observed_by_any(port) as seen:
            yield seen

    async def relay_while_public(self, key: bytes) -> None:
        """Relay for others while they can dial this node, until cancelled; ``key``: of the run's relays in the DHT."""
        while True:
            while self.reachability.verdict.kind is not ReachabilityKind.PUBLIC:
                await self.reachability.changed.park()
            async with open_service_nursery() as nursery:
                nursery.start_soon(self.server.run)
                nursery.start_soon(self._host.dht.provide, key)
                while self.reachability.verdict.kind is ReachabilityKind.PUBLIC:
                    await self.reachability.changed.park()
            self._host.dht.withdraw(key)


@asynccontextmanager
async def open_connectivity(
    host: Host,
    run_id: bytes,
    shaping: Shaping,
    known: Collection[bytes] = (),
    limits: Limits | None = None,
    reachability: Reachability | None = None,
    *,
    port_lease: int | None = None,
) -> AsyncIterator[Connectivity]:
    """Find out how others reach the host, and keep it reachable, for as long as the block runs.

    ``known``: peers that may relay, whose addresses the host has; ``limits``: None to relay for no peer;
    ``reachability``: given if it is known and need not be examined; ``port_lease``: seconds of each lease for which the
    home's router is asked to forward this node's port; None: it is not asked.
    """
    reached = reachability or Reachability()
    connectivity = Connectivity(host, reached, RelayServer(host, shaping, limits))
    tell_time(host)
    async with open_service_nursery() as nursery:
        has_tried = trio.Event()
        if port_lease is None:
            has_tried.set()
        else:
            nursery.start_soon(keep_ports, host, connectivity.examiner.note_change, port_lease, has_tried)
        if reachability is None:
            nursery.start_soon(connectivity.examiner.run, has_tried.wait)
        nursery.start_soon(RelayKeeper(host, reached, relay_key(run_id), known).run)
        nursery.start_soon(connectivity.puncher.run)
        if limits is not None:
            nursery.start_soon(connectivity.relay_while_public, relay_key(run_id))
        yield connectivity
