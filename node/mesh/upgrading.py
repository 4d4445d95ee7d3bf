"""Upgrades a socket or a circuit to an authenticated, multiplexed connection: Noise and yamux, nothing else.

Noise is libp2p's (`libp2p.security.noise`): it reads from a `RawLink` and gives a session to read from and write to.
Peers are named by Ed25519 keys here, so a peer with another kind of key has no name, and is refused.
"""

from __future__ import annotations

from typing import Final, cast

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import SMALL_ORDER_KEYS, peer_id_bytes, peer_id_of, public_key_of_bytes

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
from .yamux import MuxedConn, UnreadBudget

NOISE: Final = "/noise"
YAMUX: Final = "/yamux/1.0.0"
# From a socket to an authenticated, multiplexed connection. Five round trips at 400 ms fit twice.
HANDSHAKE_TIMEOUT = 5.0


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
