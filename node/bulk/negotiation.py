"""The bulk channels of one node: opened with a partner for an exchange, kept for the next one, closed when idle.

`BulkService.acquire` never raises for a fault of a peer or the network: without a channel the exchange goes over its
libp2p stream. Only expected peers are served: a node answers proposals only from a peer with which it expects an
exchange (`expecting`), and reads from TCP connections only while it negotiates.

The dials of one negotiation (`farandole.protocol.exchange.bulk`) start together: from any port, which firewalls like
best, and a moment later also from the listener's own port. Two dials of the second kind meet in the middle and open a
way through NATs that keep ports (TCP simultaneous open, RFC 5382).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial

import trio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farandole.protocol.exchange.bulk import (
    GREETING_BYTES,
    MAX_OFFERED,
    MAX_PROPOSAL_BYTES,
    TOKEN_BYTES,
    Proposal,
    Side,
    agree,
    decode_proposal,
    dialable,
    greeting,
    is_greeting,
)
from farandole.protocol.mesh.dialling import MIN_PORT, Address
from farandole.protocol.wire.bounds import Backoff
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.messagepack import SESSION_BYTES, encode

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.nurseries import open_service_nursery
from ..base.streams import READ_BYTES, Stream, counted, receive_frame
from ..mesh.addresses import direct_ips
from ..mesh.host import Host
from ..mesh.links import Ciphers, Socket, connect_from, listen_at
from ..mesh.reach.connectivity import Connectivity
from .channel import BulkChannel, ChannelError

logger = logging.getLogger(__name__)

BULK_PROTOCOL = "/farandole/bulk/3"
# The same in a private run, whose connections begin with nonces: an older node is not dialled in vain.
PRIVATE_BULK_PROTOCOL = "/farandole/bulk/private/1"
# From the proposal to the channel: two round trips on the stream, a TCP handshake, greetings and ready records, over a
# bad line.
OPEN_TIMEOUT = 5.0
# After a failure, a peer is left alone for a while: its exchanges start without the wait. A failure may be chance (a
# lost packet, a busy peer), so the first pause lasts a few of these waits. A NAT that lets nothing through costs a wait
# every ten minutes in the end. Ten seconds doubled are 600 at the seventh failure.
FIRST_RETRY_AFTER, MAX_RETRY_AFTER = 10.0, 600.0
# Longer than a round of most runs; most NATs forget a connection after a quarter of an hour at the earliest.
IDLE_TIMEOUT = 300.0
# After this time a channel is not kept: the next one gets independent keys.
MAX_AGE = 3_600.0
# A node exchanges with one partner at a time, and meets it again by chance.
MAX_IDLE = 8
# A greeting is written as soon as the connection opens.
GREETING_TIMEOUT = 3.0
# Connections that have not greeted yet. A partner opens one or two from each of its addresses.
MAX_UNPROVEN, MAX_UNPROVEN_PER_ADDRESS = 32, 8
# Before a dial from the listener's port: most plain dials have answered by then.
PUNCH_AFTER = 0.3

_CHOSEN = b"\x01"


class Race:
    """The connections of one negotiation, of which the answerer chooses one."""

    def __init__(self, peer: bytes, session: bytes, addresses: list[Address], *, is_asker: bool) -> None:
        """``addresses``: where this node can be dialled."""
        self.peer = peer
        self.session = session
        self.is_asker = is_asker
        self.key = X25519PrivateKey.generate()
        public, token = self.key.public_key().public_bytes_raw(), secrets.token_bytes(TOKEN_BYTES)
        self.proposal = Proposal(session=session, token=token, key=public, addresses=addresses)
        self.their_token = b""
        self.is_on = trio.Event()
        """Set once the other end's proposal is here."""
        self.is_over = trio.Event()
        self.chosen: tuple[socket.socket, Ciphers] | None = None
        """The connection, and what hides its bytes; whoever takes it from here owns it."""
        self._choosing = trio.Lock()

    async def settle(self, link: Socket) -> None:
        """End the race with this connection, on which both have greeted, unless it is over.

        The answerer chooses the first connection that takes the message, for which the asker waits on each.
        """
        async with self._choosing if not self.is_asker else contextlib.nullcontext():
            if self.is_asker and await link.read(len(_CHOSEN)) != _CHOSEN:
                return
            if not self.is_asker and not self.is_over.is_set():
                await link.write(_CHOSEN)
            if not self.is_over.is_set():
                self.chosen = link.detach()
                self.is_over.set()


@dataclass(eq=False)
class BulkService:
    """The bulk channels of one node; made by `open_bulk`."""

    _host: Host
    _run_id: bytes
    _listeners: dict[socket.AddressFamily, trio.socket.SocketType]
    _shaping: Shaping
    _reach: Connectivity | None

    def __post_init__(self) -> None:
        self._idle: OrderedDict[bytes, BulkChannel] = OrderedDict()
        self._backoff = Backoff(FIRST_RETRY_AFTER, MAX_RETRY_AFTER)
        self._expected: Counter[bytes] = Counter()
        self._races: dict[bytes, Race] = {}  # by session; at most one per peer that is expected, or was asked
        self._unproven: Counter[str] = Counter()
        self._is_closed = False
        self._network_key = self._host.upgrader.network_key
        self._protocol = PRIVATE_BULK_PROTOCOL if self._network_key else BULK_PROTOCOL
        self._host.set_handler(self._protocol, self._answer)

    # For exchanges

    def expecting(self, peer: bytes) -> contextlib.AbstractContextManager[None]:
        """Answer this peer's proposals for as long as the block runs."""
        return counted(self._expected, peer)

    async def acquire(self, peer: bytes) -> BulkChannel | None:
        """Return a kept or new channel with a peer that expects us; None if there is no way, or none in `OPEN_TIMEOUT`.

        The caller gives the channel back with `release`, or closes it.
        """
        for kept in [channel for channel in self._idle.values() if channel.peer == peer]:
            if (fit := self.take(peer, kept.session)) is not None:
                return fit
        if self._reach is not None and self._reach.puncher.is_out_of_reach(peer):
            return None
        if not self._backoff.is_due(peer, trio.current_time(), self._path(peer)):
            return None
        channel: BulkChannel | None = None
        reason = "no answer, or no way, in time"
        try:
            with trio.move_on_after(OPEN_TIMEOUT):
                channel = await self._negotiate(peer)
        except (ChannelError, PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError) as error:
            reason = str(error)
        finally:  # also when the caller's time is up, which may be less
            if channel is None:
                pause = self._backoff.note_failure(peer, trio.current_time(), self._path(peer))
                logger.info(
                    "no bulk channel with %s (%s): exchanges go over the stream; for %.0f s no channel is tried",
                    short_name(peer),
                    reason,
                    pause,
                )
        return channel

    def _path(self, peer: bytes) -> list[str]:
        """Return what a channel depends on: the addresses here, and at the other ends of the peer's connections."""
        own = (*self._host.own.observed_ips, *direct_ips(self._host.addresses))
        return [*sorted(own), "", *sorted(self._host.connections.remote_addresses(peer))]

    def take(self, peer: bytes, session: bytes) -> BulkChannel | None:
        """Return the channel that the peer has acquired, by its name; None if it is not here or no longer fit."""
        channel = self._idle.get(session)
        if channel is None or channel.peer != peer:
            return None
        del self._idle[session]
        if not channel.is_fit:
            channel.close()
            return None
        return channel

    def release(self, channel: BulkChannel) -> None:
        """Keep a channel without data under way in either direction for the next exchange; close an old one."""
        now = trio.current_time()
        if self._is_closed or now - channel.opened_at > MAX_AGE:
            return channel.close()
        channel.idle_since = now
        self._idle[channel.session] = channel
        if len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)[1].close()

    # Negotiations

    async def _negotiate(self, peer: bytes) -> BulkChannel:
        """Negotiate a channel as the asker; raises what `acquire` treats as a failure."""
        channel: BulkChannel | None = None
        try:
            async with self._observed() as observed:
                opened = await self._host.open_stream(peer, self._protocol, OPEN_TIMEOUT)
                async with contextlib.aclosing(opened) as stream:
                    with self._race(peer, secrets.token_bytes(SESSION_BYTES), observed, is_asker=True) as race:
                        await stream.send_all(frame(encode(race.proposal), MAX_PROPOSAL_BYTES))
                        theirs = await _receive_proposal(stream)
                        if theirs.session != race.session:
                            raise RemoteProtocolError("an answer to another proposal")
                        channel = await self._run_race(race, stream, theirs)
        except BaseException:  # also when cancelled while the stream closes: nothing else owns the channel yet
            if channel is not None:
                channel.close()
            raise
        return channel

    async def _answer(self, stream: Stream) -> None:
        """Answer a peer's proposal of a channel. Raises `RemoteProtocolError` for any other bytes."""
        peer = stream.peer
        if not self._expected[peer]:
            return
        with trio.move_on_after(OPEN_TIMEOUT):
            theirs = await _receive_proposal(stream)
            async with self._observed() as observed:
                is_taken = theirs.session in self._races or theirs.session in self._idle
                if is_taken or any(race.peer == peer for race in self._races.values()):
                    return
                with self._race(peer, theirs.session, observed, is_asker=False) as race:
                    await stream.send_all(frame(encode(race.proposal), MAX_PROPOSAL_BYTES))
                    try:
                        channel = await self._run_race(race, stream, theirs)
                    except ChannelError as error:
                        logger.debug("no bulk channel: %s", error)
                    else:
                        self.release(channel)
                        channel.announce()

    @contextlib.asynccontextmanager
    async def _observed(self) -> AsyncIterator[list[Address]]:
        """Yield the addresses that others see for the listener, if peers have to be asked for them."""
        listener = self._listeners.get(socket.AF_INET)
        if listener is None or self._reach is None:
            yield []
            return
        async with self._reach.observe_port(listener.getsockname()[1]) as observed:
            yield observed

    @contextlib.contextmanager
    def _race(self, peer: bytes, session: bytes, observed: list[Address], *, is_asker: bool) -> Iterator[Race]:
        """Let connections in that greet for this session, until the block ends.

        This node's proposal has the addresses that the router forwards; the ``observed`` ones, which others see for the
        listener; the IP addresses that others see or the host announces, each with the listener's port, since most NATs
        keep ports if they can (RFC 4787, 4.2.1).
        """
        own = self._host.own
        ports = {family: listener.getsockname()[1] for family, listener in self._listeners.items()}
        ips = dict.fromkeys((*own.observed_ips, *direct_ips(self._host.addresses)))
        mapped = [own.mapped[port] for port in ports.values() if port in own.mapped]
        known = [(ip, ports[f]) for ip in ips if (f := _family(ip)) in ports]
        addresses = [address for address in dict.fromkeys((*mapped, *observed, *known)) if address[1] >= MIN_PORT]
        race = self._races[session] = Race(peer, session, addresses[:MAX_OFFERED], is_asker=is_asker)
        try:
            yield race
        finally:
            del self._races[session]
            race.is_over.set()  # nobody is chosen from now on
            if race.chosen is not None:
                race.chosen[0].close()

    async def _run_race(self, race: Race, stream: Stream, theirs: Proposal) -> BulkChannel:
        """Dial, let the answerer choose, confirm the keys; give up if the peer gives up and closes the stream."""

        async def end_with_stream() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some(READ_BYTES):
                    pass
            race.is_over.set()

        us, them = Side(self._host.author, race.proposal), Side(race.peer, theirs)
        channel_secrets = agree(race.key, us, them, (self._run_id, stream.handshake_hash), race.is_asker)
        race.their_token = theirs.token
        race.is_on.set()
        async with open_service_nursery() as nursery:
            nursery.start_soon(end_with_stream)
            in_use = direct_ips(self._host.connections.remote_addresses(race.peer))
            for address in dialable(theirs.addresses, in_use):
                nursery.start_soon(self._dial, race, address, False)
                nursery.start_soon(self._dial, race, address, True)
            await race.is_over.wait()
        chosen, race.chosen = race.chosen, None
        if chosen is None:
            raise ChannelError("the peer gave up")
        channel = BulkChannel(race.peer, race.session, chosen[0], channel_secrets, self._shaping, chosen[1])
        await channel.open(race.is_asker)
        self._backoff.note_success(race.peer)
        return channel

    # Connections

    async def _dial(self, race: Race, address: Address, is_punch: bool) -> None:
        """Dial once; from the listener's port if ``is_punch``."""
        link: Socket | None = None
        try:
            if is_punch:
                await trio.sleep(PUNCH_AFTER)
                listener = self._listeners.get(_family(address[0]))
                if listener is None:
                    return
                link = Socket(await connect_from(listener.getsockname(), address))
            else:
                link = Socket(await trio.open_tcp_stream(*address))
            await self._greet(link, race)
            if is_greeting(await self._hear(link), race.session, race.proposal.token):
                await race.settle(link)
        except (OSError, trio.BrokenResourceError) as error:
            logger.debug("no bulk connection to %s: %s", address, error)
        finally:
            if link is not None:
                link.abort()

    async def admit(self, stream: trio.SocketStream) -> None:
        """Let an inbound connection greet for a running race; the caller closes it. A bounded number may greet."""
        link, race = Socket(stream), None
        address = link.remote[0] if link.remote else ""
        is_full = self._unproven.total() >= MAX_UNPROVEN or self._unproven[address] >= MAX_UNPROVEN_PER_ADDRESS
        if is_full or not self._races:
            return
        with contextlib.suppress(trio.BrokenResourceError):
            with counted(self._unproven, address), trio.move_on_after(GREETING_TIMEOUT):
                received = await self._hear(link)
                named = self._races.get(received[:SESSION_BYTES])
                if named is not None and is_greeting(received, named.session, named.proposal.token):
                    await named.is_on.wait()
                    await self._greet(link, named)
                    race = named
            if race is not None:
                with trio.move_on_after(OPEN_TIMEOUT):
                    await race.settle(link)

    async def _greet(self, link: Socket, race: Race) -> None:
        """Send the greeting. In a private run a nonce begins each direction, and hides what follows."""
        if self._network_key:
            await link.hide(self._network_key)
        await link.write(greeting(race.session, race.their_token))

    async def _hear(self, link: Socket) -> bytes:
        """Return the greeting of the other end."""
        if self._network_key:
            await link.reveal(self._network_key)
        return await link.read(GREETING_BYTES)

    async def close_idle(self) -> None:
        """Close kept channels when they expire, and at once if the peer has closed them."""
        while True:
            await trio.sleep(IDLE_TIMEOUT / 4)
            for channel in list(self._idle.values()):
                if not channel.is_fit or trio.current_time() - channel.idle_since > IDLE_TIMEOUT:
                    del self._idle[channel.session]
                    channel.close()

    def close_kept(self) -> None:
        """Close all kept channels."""
        while self._idle:
            self._idle.popitem()[1].close()

    def close(self) -> None:
        """Close all kept channels and keep no more: the host's handlers may end later, and release theirs."""
        self._is_closed = True
        self.close_kept()


@contextlib.asynccontextmanager
async def open_bulk(
    host: Host, run_id: bytes, shaping: Shaping | None = None, reach: Connectivity | None = None
) -> AsyncIterator[BulkService]:
    """Open a run's bulk channels for as long as the block runs; listen where the host does, on any ports."""
    listeners = _open_listeners(host.own.bound_ips)
    service = BulkService(host, run_id, listeners, shaping or Shaping(), reach)
    ports = {listener.getsockname()[1] for listener in listeners.values()}
    host.own.bulk_ports.update(ports)
    try:
        async with open_service_nursery() as nursery:
            for served in map(trio.SocketListener, listeners.values()):
                nursery.start_soon(partial(trio.serve_listeners, service.admit, [served], handler_nursery=nursery))
            nursery.start_soon(service.close_idle)
            yield service
    finally:
        host.own.bulk_ports.difference_update(ports)
        service.close()
        for listener in listeners.values():
            listener.close()


def _open_listeners(ips: list[str]) -> dict[socket.AddressFamily, trio.socket.SocketType]:
    """Open one listener per family, if possible on one port; skip failures.

    It listens on the host's one address, or on all of the family if the host has several.
    """
    port = 0
    listeners: dict[socket.AddressFamily, trio.socket.SocketType] = {}
    for family, wildcard in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        own = [ip for ip in ips if _family(ip) is family]
        if not own:
            continue
        ip = own[0] if len(own) == 1 else wildcard
        try:
            try:
                listener = listen_at(ip, port)
            except OSError:
                listener = listen_at(ip, 0)
        except OSError as error:
            logger.warning("bulk channels cannot be opened from outside over %s: %s", family.name, error)
        else:
            port = listener.getsockname()[1]
            listeners[family] = trio.socket.from_stdlib_socket(listener)
    return listeners


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


async def _receive_proposal(stream: Stream) -> Proposal:
    return decode_proposal(await receive_frame(stream, FrameParser(MAX_PROPOSAL_BYTES)))
