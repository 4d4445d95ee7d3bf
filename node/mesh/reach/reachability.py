"""Finds out how others reach this node: asks peers now and then, and whenever something may have changed.

Peers say whether they can dial this node, and which address they see; this node answers both for others. It tells them
its time, too, and asks for theirs (`farandole.protocol.mesh.reachability`).

As a witness this node dials only the IP address from which the asker connects, a few times a minute, and sends only the
handshake there. So it cannot be used to dial third parties, or one party for long.

Other modules need only `Reachability`. A caller with a fixed answer (a test, a relay with a fixed address) makes that
value itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import trio

from farandole.protocol.mesh.dialling import Address
from farandole.protocol.mesh.reachability import (
    CLOCK_PROTOCOL,
    DIALBACK_PROTOCOL,
    MAX_MESSAGE_BYTES,
    MAX_PORTS,
    DialBackAnswer,
    ReachabilityKind,
    Request,
    Verdict,
    Witness,
    classify,
    decode_answer,
    decode_clock,
    decode_request,
    is_global,
)
from farandole.protocol.wire.bounds import Latest
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.messagepack import encode

from ...base.errors import PeerUnreachableError
from ...base.nurseries import open_service_nursery
from ...base.streams import DIAL_BACK_TIMEOUT, DIAL_TIMEOUT, ask_all, counted, expecting_answer, receive_frame
from ..addresses import direct_ips, multiaddr_of
from ..connections import Connection
from ..host import Host
from ..links import site_of
from ..yamux import Libp2pStream

logger = logging.getLogger(__name__)

# Two that agree outvote one that lies or errs.
NUM_WITNESSES = 3
# Two are needed to see whether a NAT shows them the same address.
NUM_COMPARED = 2
# Routers change their mappings, and some homes get another address every day. Longer than any NAT keeps a connection
# that has ended, so that no hole that we made ourselves lets a dial-back in.
EXAMINE_INTERVAL = 300.0
# Until then, an inbound dial may have come through a hole that we made: a verdict that it would change has to wait.
HOLE_SECONDS = EXAMINE_INTERVAL
# Pause while no peer has answered yet; and between two examinations, whatever happens.
RETRY_INTERVAL = 10.0
# The first peers connect within a moment of each other.
SETTLE_SECONDS = 0.5
# Most routers that open ports do so within a moment, and then a node is public from the beginning.
PREPARE_SECONDS = 1.0
# A node that can be dialled hears so within three round trips of the slowest lines. If it hears nothing by then, it is
# likely to need relays. The witness keeps trying, since a SYN may be lost.
DOUBT_AFTER = 1.0

# Of a small message.
MESSAGE_TIMEOUT = 5.0
ANSWER_TIMEOUT = DIAL_BACK_TIMEOUT + MESSAGE_TIMEOUT
# To ask peers what they see: two round trips and a handshake. They are asked one after the other, until one answers.
OBSERVE_TIMEOUT = 3.0
NUM_OBSERVERS = 2
# No node's reachability changes faster; a node that has just started asks once.
DIAL_INTERVAL = 20.0
# Limits of concurrent askers, in all and per address. Behind one may be a carrier's customers, or a stranger with many
# keys. Further askers are refused and ask another peer.
MAX_DIALLING, MAX_DIALLING_PER_ADDRESS = 8, 4
# Askers remembered for `DIAL_INTERVAL`, and peers to which there was a probe; as many as a node has connections.
MAX_ASKERS = MAX_PROBES = 512

Key = tuple[bytes, int | None]
"""A peer, and the port; None: libp2p's port."""


class Reachability:
    """The reachability of this node: ``verdict`` changes while the node runs."""

    def __init__(self, verdict: Verdict | None = None) -> None:
        self.verdict = verdict or Verdict(ReachabilityKind.UNKNOWN)
        self.is_examined = verdict is not None
        """Whether peers have been asked, and have not reached this node at once: they may still try."""
        self.changed = trio.lowlevel.ParkingLot()
        """Where to wait for a new verdict, or doubt."""

    def set(self, verdict: Verdict) -> None:
        """Set a new verdict."""
        if verdict.kind is not self.verdict.kind:
            logger.info("this node is %s", verdict.kind)
        self.verdict = verdict
        self._note_examined()

    async def doubt(self) -> None:
        """Note in a moment that the first peers have not reached this node at once."""
        await trio.sleep(DOUBT_AFTER)
        self._note_examined()

    def _note_examined(self) -> None:
        self.is_examined = True
        self.changed.unpark_all()

    @property
    def needs_relays(self) -> bool:
        """Return whether others cannot dial this node over IPv4, or the first dials suggest it."""
        if self.verdict.kind is ReachabilityKind.PUBLIC:
            return bool(self.verdict.addresses) and all(":" in ip for ip, _ in self.verdict.addresses)
        return self.is_examined


class Dialback:
    """Both sides of `farandole.protocol.mesh.reachability` for one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._probes = Latest[Key, _Probe](MAX_PROBES)
        self._dialling: Counter[str] = Counter()
        self._num_asking = 0
        self._none_asking = trio.lowlevel.ParkingLot()
        self.holed_at = -math.inf
        """When the listening port last opened a connection: until the router forgets it, an inbound connection may have
        come through that hole."""
        self._dialled_at = Latest[bytes, float](MAX_ASKERS)
        host.set_handler(DIALBACK_PROTOCOL, self._serve)

    # Asking

    async def ask(self, peer: bytes) -> Witness:
        """Ask whether the peer can dial our listeners; raise `PeerUnreachableError` if it does not answer."""
        self._num_asking += 1  # before the stream is open here, the peer may have it and dial
        try:
            stream = await self._host.open_stream(peer, DIALBACK_PROTOCOL)
            if stream.remote_address is None:
                stream.reset()
                raise PeerUnreachableError("a relay cannot tell")
            listening = [port for _, port in self._host.own.listening]
            mapped = [outer for port, (_, outer) in self._host.own.mapped.items() if port in listening]
            opened = [int(address.rpartition("/")[2]) for address in self._host.own.announced]
            ports = tuple(dict.fromkeys((*listening, *mapped, *opened)))[-MAX_PORTS:]
            return await _ask_over(stream, Request(ports))
        finally:
            self._num_asking -= 1
            if not self._num_asking:
                self._none_asking.unpark_all()

    @contextlib.asynccontextmanager
    async def observed_by(
        self, peer: bytes, timeout: float = ANSWER_TIMEOUT, port: int | None = None
    ) -> AsyncIterator[Witness]:
        """Yield the peer's view of our listening port; the connection that it sees stays while the block runs.

        ``port``: another port of this machine instead, over IPv4, which other sockets may share.

        Waits while others dial us, since their dials must not find the hole that this makes. Raises
        `PeerUnreachableError` if the connection, or the answer, then takes longer than ``timeout`` seconds.
        """
        while self._num_asking:
            await self._none_asking.park()
        self.holed_at = trio.current_time()
        probe = self._probes[peer, port] = self._probes.get((peer, port)) or _Probe()
        probe.num_users += 1
        try:
            try:
                with trio.fail_after(timeout):
                    async with probe.dialling:
                        conn = probe.conn
                        if conn is not None and conn.muxed.is_closing:
                            await conn.finished.wait()
                            conn = None
                        if conn is None:
                            conn = probe.conn = await self._dial(peer, port)
                            self._host.nursery.start_soon(conn.run)
                with trio.fail_after(timeout):
                    witness = await _ask_over(await self._host.gate.open_stream(conn, DIALBACK_PROTOCOL), Request(()))
            except Exception as error:  # whatever the handshakes raise
                raise PeerUnreachableError(f"no view of the port that listens: {error!r}") from error
            yield witness
        finally:
            probe.num_users -= 1
            if probe.conn is not None and not probe.num_users:
                probe.conn.muxed.abort()

    @contextlib.asynccontextmanager
    async def observed_by_any(self, port: int | None = None) -> AsyncIterator[list[Address]]:
        """Yield the view of one peer that we have dialled, as a list; the list is empty if no peer answers."""
        peers = [peer for peer in self._host.connected if self._host.connections.dialled_target(peer) is not None]
        async with contextlib.AsyncExitStack() as stack:
            seen: list[Address] = []
            for peer in peers[:NUM_OBSERVERS]:
                try:
                    witness = await stack.enter_async_context(self.observed_by(peer, OBSERVE_TIMEOUT, port))
                except PeerUnreachableError as error:
                    logger.debug("nobody to tell what it sees: %s", error)
                else:
                    seen.append((witness.answer.ip, witness.answer.port))
                    break
            yield seen

    async def _dial(self, peer: bytes, port: int | None) -> Connection:
        target = self._host.connections.dialled_target(peer)
        if target is None:
            raise PeerUnreachableError("we have no connection with it that we dialled directly")
        with trio.fail_after(DIAL_TIMEOUT):
            if ":" in target[0] and (other := self._host.dialler.known.ipv4_target(peer)) is not None:
                with contextlib.suppress(OSError, PeerUnreachableError):
                    conn = await self._dial_at(peer, other, port)
                    self._host.dialler.known.budget.succeed(*other)
                    self._host.dialler.add_addresses(peer, [multiaddr_of(*other)])
                    return conn
            return await self._dial_at(peer, target, port)

    async def _dial_at(self, peer: bytes, target: tuple[str, int], port: int | None) -> Connection:
        socket = await self._host.dialler.dial_from_listener(target, port)
        socket.leave_nothing()
        muxed = await self._host.upgrader.upgrade(socket, peer, is_initiator=True)
        return Connection(muxed, self._host.connections, is_outbound=True)

    # Answering

    async def _serve(self, stream: Libp2pStream) -> None:
        request = decode_request(await hear(stream))
        ip, seen = stream.remote_address or ("", 0)
        site, reached = site_of(ip).address, list[int]()

        async def dial(port: int) -> None:
            try:
                await self._host.upgrader.prove(stream.peer, (ip, port))
            except Exception as error:  # whatever the handshake raises, the port was not reached
                logger.debug("cannot dial %s port %d back: %r", ip, port, error)
            else:
                reached.append(port)

        is_busy = self._dialling.total() >= MAX_DIALLING or self._dialling[site] >= MAX_DIALLING_PER_ADDRESS
        is_late = trio.current_time() >= self._dialled_at.get(stream.peer, -math.inf) + DIAL_INTERVAL
        if may_dial := bool(ip and request.ports) and is_late and not is_busy:
            self._dialled_at[stream.peer] = trio.current_time()
            with counted(self._dialling, site), trio.move_on_after(DIAL_BACK_TIMEOUT):
                async with trio.open_nursery() as nursery:
                    for port in request.ports:
                        nursery.start_soon(dial, port)
        await tell(stream, DialBackAnswer(ip.partition("%")[0], seen, may_dial, tuple(reached)))


async def _ask_over(stream: Libp2pStream, request: Request) -> Witness:
    remote = stream.remote_address
    async with stream:
        with expecting_answer(stream.peer, ANSWER_TIMEOUT):
            await tell(stream, request)
            answer = decode_answer(await hear(stream, ANSWER_TIMEOUT), request)
    return Witness(remote[0] if remote else "", answer)


class _Probe:
    """An extra connection to a peer, from a listening port, to learn how a NAT maps that port.

    Over IPv6 peers see the address that this machine has, and over IPv4 they see the router's. So the connection is
    made over IPv4 if there is a way, whatever the other connections with the peer use.

    One port can have only one connection to one address. So concurrent users share it, and new users wait while it
    closes. It is closed by RST: after an orderly close the kernel would keep it in TIME_WAIT for a minute, and refuse
    the next one.
    """

    def __init__(self) -> None:
        self.num_users = 0
        self.dialling = trio.Lock()
        self.conn: Connection | None = None


async def tell(stream: Libp2pStream, message: msgspec.Struct | tuple[int]) -> None:
    """Send a message; raise `trio.TooSlowError` if the peer does not take it."""
    with trio.fail_after(MESSAGE_TIMEOUT):
        await stream.send_all(frame(encode(message), MAX_MESSAGE_BYTES))


async def hear(stream: Libp2pStream, timeout: float = MESSAGE_TIMEOUT) -> bytes:
    """Return the payload of the next frame; raise `trio.TooSlowError` if there is none in ``timeout`` seconds."""
    with trio.fail_after(timeout):
        return await receive_frame(stream, FrameParser(MAX_MESSAGE_BYTES))


def tell_time(host: Host, clock: Callable[[], float] = time.time) -> None:
    """Answer the peers of a host. ``clock``: Unix seconds."""

    async def tell_time_to(stream: Libp2pStream) -> None:
        await tell(stream, (max(0, int(clock() * 1_000)),))

    host.set_handler(CLOCK_PROTOCOL, tell_time_to)


async def ask_time(host: Host, peer: bytes, clock: Callable[[], float] = time.time) -> float:
    """Return by how many seconds this node's clock is ahead of a peer's, to within half the round trip.

    Raises `PeerUnreachableError` if the peer does not answer.
    """
    async with await host.open_stream(peer, CLOCK_PROTOCOL) as stream:
        asked_at, began_at = clock(), trio.current_time()
        with expecting_answer(peer, MESSAGE_TIMEOUT):
            (milliseconds,) = decode_clock(await hear(stream))
    # Elapsed time is from the steady clock, so setting the clock in between does no harm.
    return asked_at + (trio.current_time() - began_at) / 2 - milliseconds / 1_000


class Examiner:
    """Examines one host's reachability, again and again."""

    def __init__(self, host: Host, reachability: Reachability) -> None:
        self.dialback = Dialback(host)
        self._host = host
        self._reachability = reachability
        self._due = trio.Event()
        self._witnesses: frozenset[bytes] = frozenset()

    async def run(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Examine until cancelled. ``prepare``: awaited, for a short time, before peers are first asked."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            with trio.move_on_after(PREPARE_SECONDS):
                await prepare()
            while True:
                await self._due.wait()
                await trio.sleep(SETTLE_SECONDS)
                self._due = trio.Event()
                has_verdict = await self.examine()
                await trio.sleep(RETRY_INTERVAL)
                if has_verdict:
                    with trio.move_on_after(EXAMINE_INTERVAL):
                        await self._due.wait()
                if self._host.connected:
                    self._due.set()

    def note_change(self) -> None:
        """Note that others may reach this node in another way now."""
        if self._host.connected:
            self._due.set()

    async def _watch(self) -> None:
        """Examine on the first connection, the first ones from the internet, and the loss of a witness."""
        num_asked_far = num_connected = 0
        async for peer, is_connected in self._host.connections.events():
            was_alone, num_connected = num_connected == 0, len(self._host.connected)
            is_far = is_connected and is_global(self._ip_of(peer))
            if not is_connected and peer in self._witnesses:  # maybe because our address has changed
                self._due.set()
            if is_connected and (was_alone or (is_far and num_asked_far < NUM_COMPARED)):
                num_asked_far = 0 if was_alone else num_asked_far
                num_asked_far += is_far
                self._due.set()

    async def examine(self) -> bool:
        """Ask a few peers at once; return whether that has led to a verdict."""
        if not self._host.own.listening:
            self._reachability.set(Verdict(ReachabilityKind.RELAY_ONLY))
            return True
        # Peers with direct connections, distant ones first, at distinct addresses if possible.
        peers = [peer for peer in self._host.connected if self._host.connections.is_direct(peer)]
        random.shuffle(peers)
        peers.sort(key=lambda peer: not is_global(self._ip_of(peer)))
        apart = {self._ip_of(peer): peer for peer in reversed(peers)}
        together = [peer for peer in peers if apart[self._ip_of(peer)] != peer]
        witnesses, is_first = [*reversed(apart.values()), *together][:NUM_WITNESSES], not self._reachability.is_examined
        self._witnesses = frozenset(witnesses)
        async with open_service_nursery() as nursery:
            if is_first and witnesses:
                nursery.start_soon(self._reachability.doubt)
            dialled = await ask_all(self.dialback.ask, witnesses)
        if not is_first and not any(witness.answer.has_dialled for witness in dialled):
            return False  # no peer that could contradict what is known
        verdict = classify(dialled, ())
        if verdict.kind is not ReachabilityKind.PUBLIC:

            async def observe(peer: bytes) -> Witness:
                async with self.dialback.observed_by(peer) as witness:
                    return witness

            verdict = classify(dialled, await ask_all(observe, witnesses))
        elif not is_first and self._reachability.verdict.kind is not ReachabilityKind.PUBLIC:
            # Behind NAT, and suddenly public: through a hole, unless a known address or the router explains it.
            own, mapped = self._host.own.ips, [port for _, port in self._host.own.mapped.values()]
            is_explained = any(ip in own or port in mapped for ip, port in verdict.addresses)
            if not is_explained and trio.current_time() < self.dialback.holed_at + HOLE_SECONDS:
                return True
        self._reachability.set(verdict)
        self._host.own.observed_ips = list(dict.fromkeys(ip for ip, _ in verdict.addresses))
        return verdict.kind is not ReachabilityKind.UNKNOWN

    def _ip_of(self, peer: bytes) -> str:
        return next(iter(direct_ips(self._host.connections.remote_addresses(peer))), "")
