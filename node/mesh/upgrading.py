"""Upgrades a socket or a circuit to an authenticated, multiplexed connection: Noise and yamux, nothing else.

Both ends agree on each of these, and on the protocol of each stream, by multistream-select 1.0
(github.com/multiformats/multistream-select): one end proposes protocol ids, and the other echoes the one that it
accepts, or answers that it knows none. Messages are bounded in size and number for any peer: py-libp2p 0.8.1 allocates
whatever length it reads.

Noise is libp2p's (`libp2p.security.noise`): it reads from a `RawLink` and gives a session to read from and write to.
Peers are named by Ed25519 keys here, so a peer with another kind of key has no name, and is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import contextmanager
from typing import Final, cast

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import SMALL_ORDER_KEYS, peer_id_bytes, peer_id_of, public_key_of_bytes

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError, StrangerError
from ..base.streams import read_delimited
from .libp2p_parts import (
    ID,
    IRawConnection,
    ISecureConn,
    Noise,
    PeerIDMismatchesPubkey,
    create_new_key_pair,
    create_new_x25519_key_pair,
    encode_delim,
)
from .links import NoiseSession, RawLink, Socket
from .yamux import Libp2pStream, MuxedConn, UnreadBudget

logger = logging.getLogger(__name__)

MULTISTREAM: Final = "/multistream/1.0.0"
IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
PUSH_PROTOCOL: Final = "/ipfs/id/push/1.0.0"
PING_PROTOCOL: Final = "/ipfs/ping/1.0.0"
# A message is a protocol id; go-libp2p allows 1,024 bytes too.
MAX_NEGOTIATION_BYTES: Final = 1024
# Messages of one negotiation: the greeting, and proposals; a peer that knows farandole proposes one.
MAX_NEGOTIATION_MESSAGES: Final = 16
NEGOTIATION_TIMEOUT: Final = 8.0
NOT_AVAILABLE: Final = "na"
# A peer that has dialled proposes its first protocol within a round trip of the greetings.
ROLE_PAUSE: Final = 0.7
NOISE: Final = "/noise"
YAMUX: Final = "/yamux/1.0.0"
# From a socket to an authenticated, multiplexed connection. Five round trips at 400 ms fit twice.
HANDSHAKE_TIMEOUT = 5.0

Handler = Callable[[Libp2pStream], Awaitable[None]]


class Negotiation:
    """One negotiation on a connection or a stream."""

    def __init__(self, receive: Callable[[int], Awaitable[bytes]], send: Callable[[bytes], Awaitable[None]]) -> None:
        """``receive``: returns at most that many bytes, none at the end."""
        self._receive = receive
        self._send = send
        self._num_received = 0

    async def propose(self, protocol: str) -> None:
        """Agree on this protocol; raise `RemoteProtocolError` if the peer does not speak it, or says why it refuses."""
        await self._greet(protocol)
        await self._expect(protocol)

    async def answer(self, protocols: Container[str]) -> str:
        """Accept the first proposal that is in ``protocols``; raise `RemoteProtocolError` if there is none."""
        await self._greet()
        while (proposal := await self._next()) not in protocols:
            await self._say(NOT_AVAILABLE)
        await self._say(proposal)
        return proposal

    async def find_role(self, protocol: str) -> bool:
        """Negotiate on an accepted connection whose other end may be a peer that waits for us.

        Return whether it waits: then it proposes nothing, and we are the initiator. A peer that dials in the usual way
        proposes at once.
        """
        await self._greet()
        proposal = None
        with trio.move_on_after(ROLE_PAUSE):
            proposal = await self._next()
        if proposal not in (None, protocol):
            raise RemoteProtocolError("the peer proposes something else")
        await self._say(protocol)
        if proposal is None:
            await self._expect(protocol)
        return proposal is None

    async def _greet(self, *proposal: str) -> None:
        await self._say(MULTISTREAM, *proposal)
        if await self._next() != MULTISTREAM:
            raise RemoteProtocolError("the peer does not speak multistream-select")

    async def _expect(self, protocol: str) -> None:
        answer = await self._next()
        if answer == NOT_AVAILABLE:
            raise RemoteProtocolError(f"the peer does not speak {protocol}")
        if answer != protocol:
            raise RemoteProtocolError(f"the peer refuses {protocol}: {answer!r}")

    async def _next(self) -> str:
        self._num_received += 1
        if self._num_received > MAX_NEGOTIATION_MESSAGES:
            raise RemoteProtocolError("too many negotiation messages")
        message = await read_delimited(self._receive, MAX_NEGOTIATION_BYTES)
        if message is None:
            raise RemoteProtocolError("the peer ended the negotiation")
        if not message.endswith(b"\n"):
            raise RemoteProtocolError("a negotiation message without its newline")
        return message[:-1].decode(errors="replace")

    async def _say(self, *texts: str) -> None:
        await self._send(b"".join(encode_delim(text.encode()) for text in texts))


class ProtocolHandlers:
    """The handlers of one host."""

    def __init__(self) -> None:
        self.admits: Callable[[bytes, str], bool] = lambda peer, protocol: True
        """Whether a peer may open streams of a protocol; to others it is one that this node does not serve."""
        self._handlers: dict[str, tuple[Handler, int | None]] = {}

    @property
    def protocols(self) -> list[str]:
        """The protocols that this node serves."""
        return list(self._handlers)

    def set(self, protocol: str, handler: Handler, max_bytes: int | None = None) -> None:
        """Serve a protocol. A stream on which the peer sends more than ``max_bytes`` is reset."""
        self._handlers[protocol] = (handler, max_bytes)

    def remove(self, protocol: str) -> None:
        """Stop serving a protocol."""
        self._handlers.pop(protocol, None)

    async def serve(self, stream: Libp2pStream, note_negotiated: Callable[[], None]) -> None:
        """Agree on a protocol for a stream that a peer has opened, and run its handler. Raises nothing.

        The stream is closed when the handler returns, and reset when it raises, which is logged unless the error is
        the peer's fault or the network's.
        """
        try:
            try:
                with trio.fail_after(NEGOTIATION_TIMEOUT):
                    offered = [protocol for protocol in self._handlers if self.admits(stream.peer, protocol)]
                    stream.protocol = await Negotiation(stream.receive_some, stream.send_all).answer(offered)
                handler, max_bytes = self._handlers[stream.protocol]
            finally:
                note_negotiated()
            if max_bytes is not None:
                stream.limit(max_bytes)
            await handler(stream)
            await stream.aclose()
        except (RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("a stream of %s ended: %r", stream.protocol, error)
        except Exception:  # a defect of ours: it costs this stream, and neither the others nor the host
            logger.exception("the handler of %s failed", stream.protocol)
        finally:
            stream.reset()


@contextmanager
def expecting_answer(peer: bytes, timeout: float) -> Iterator[None]:
    """Wait for a peer; raise `PeerUnreachableError` if it is late, breaks off, or says what no honest peer says."""
    try:
        with trio.fail_after(timeout):
            yield
    except trio.TooSlowError as error:
        raise PeerUnreachableError(f"{peer_id_of(peer)} did not answer in {timeout:g} s") from error
    except (RemoteProtocolError, trio.BrokenResourceError) as error:
        raise PeerUnreachableError(f"{peer_id_of(peer)} gives no answer: {error!r}") from error


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
        """Begin the encryption of a private run; a circuit lies inside connections that have it already."""
        if self.network_key and not link.is_relayed:
            await link.begin_private(self.network_key)

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
