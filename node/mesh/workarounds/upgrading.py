"""From a socket to an authenticated, multiplexed connection: Noise and yamux, nothing else."""

from __future__ import annotations

from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import IMuxedConn, IRawConnection, ISecureConn, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from farandole.protocol.identity import SMALL_ORDER_KEYS, public_key_of

from ...base.bandwidth import Shaping
from ..yamux import MuxedConn, UnreadBudget

# A multistream message is a protocol id; go-libp2p allows 1,024 bytes too.
MAX_NEGOTIATION_BYTES = 1024
# Messages of one negotiation: the greeting, and proposals; who knows us proposes one.
MAX_NEGOTIATION_MESSAGES = 16
NEGOTIATION_TIMEOUT = 8
# A peer that has dialled proposes its first protocol within a round trip of the greetings.
ROLE_PAUSE = 0.7


class BoundedCommunicator(MultiselectCommunicator):
    """Multistream messages of at most `MAX_NEGOTIATION_BYTES`, and at most `MAX_NEGOTIATION_MESSAGES` of them."""

    _num_read = 0

    async def read(self) -> str:
        """One message; `MultiselectCommunicatorError` for anything that is not one, or one too many."""
        self._num_read += 1
        if self._num_read > MAX_NEGOTIATION_MESSAGES:
            raise MultiselectCommunicatorError("too many negotiation messages")
        try:
            message = await read_varint_prefixed_bytes_limited(self.read_writer, MAX_NEGOTIATION_BYTES)
            if not message.endswith(b"\n"):
                raise MultiselectCommunicatorError("negotiation message without its newline")
            return message[:-1].decode()
        except MultiselectCommunicatorError:
            raise
        except Exception as error:  # the library raises several kinds, and decodes text
            raise MultiselectCommunicatorError("no negotiation message") from error


class MendedUpgrader(TransportUpgrader):
    """From a raw connection to a secure one to a multiplexed one: Noise, then yamux, and nothing else."""

    def __init__(self, noise: ISecureTransport, shaping: Shaping | None = None) -> None:
        super().__init__({NOISE_PROTOCOL_ID: noise}, {TProtocol(YAMUX_PROTOCOL_ID): MuxedConn})
        self.unread_budget = UnreadBudget()
        self._noise = noise
        self._shaping = shaping

    async def _negotiate(self, conn: Any, protocol: TProtocol, is_initiator: bool) -> None:
        communicator = BoundedCommunicator(conn)
        if is_initiator:
            await MultiselectClient().select_one_of([protocol], communicator, NEGOTIATION_TIMEOUT)
        else:
            await Multiselect({protocol: None}).negotiate(communicator, NEGOTIATION_TIMEOUT)

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """Authenticate the other end; the initiator says whom it expects, and anybody else is refused.

        Raises whatever the library does: the callers take every exception for a failed handshake.
        """
        await self._negotiate(raw_conn, NOISE_PROTOCOL_ID, is_initiator)
        return await self.authenticate(raw_conn, is_initiator, peer_id)

    async def find_role(self, raw_conn: IRawConnection) -> bool:
        """Negotiate on an accepted connection, of which a peer that waits for us may be the other end.

        Whether that is so: it proposes nothing, and we are the initiator. Who dials as others do proposes at once.
        """
        communicator = BoundedCommunicator(raw_conn)
        await Multiselect({}).handshake(communicator)
        proposal = None
        with trio.move_on_after(ROLE_PAUSE):
            proposal = await communicator.read()
        if proposal not in (None, NOISE_PROTOCOL_ID):
            raise SwarmException("it proposes something else")
        await communicator.write(NOISE_PROTOCOL_ID)
        if proposal is None and await communicator.read() != NOISE_PROTOCOL_ID:
            raise SwarmException("it knows something else")
        return proposal is None

    async def authenticate(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """The handshake of `upgrade_security`, once it is negotiated."""
        if not is_initiator:
            secure = await self._noise.secure_inbound(raw_conn)
        elif peer_id is None:
            raise SwarmException("dialling needs the peer's id")
        else:
            secure = await self._noise.secure_outbound(raw_conn, peer_id)
            if secure.get_remote_peer() != peer_id:
                raise SwarmException(f"{secure.get_remote_peer()} answered for {peer_id}")
        # Peers are named by Ed25519 keys here, and one of small order proves nothing.
        if public_key_of(secure.get_remote_peer().to_base58()) in SMALL_ORDER_KEYS:
            raise SwarmException("a key of small order")
        return secure

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Multiplex a secure connection."""
        await self._negotiate(conn, TProtocol(YAMUX_PROTOCOL_ID), conn.is_initiator)
        return MuxedConn(conn, peer_id, self._shaping, self.unread_budget)


def make_upgrader(key: Ed25519PrivateKey, shaping: Shaping | None = None) -> MendedUpgrader:
    """What authenticates connections by this key, and multiplexes them."""
    key_pair = create_new_key_pair(key.private_bytes_raw())
    noise = NoiseTransport(key_pair, noise_privkey=create_new_x25519_key_pair().private_key)
    return MendedUpgrader(noise, shaping)
