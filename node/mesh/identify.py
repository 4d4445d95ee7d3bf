"""The first questions of libp2p nodes: identify (github.com/libp2p/specs, identify) and ping."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

from farandole.protocol.run.releases import Software, software_of
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_bytes

from ..base.errors import PeerUnreachableError
from ..base.release import VERSION
from .addresses import multiaddr_of
from .delimited import encode_delimited, multiaddr_bytes, multiaddr_texts, receive_message
from .libp2p_parts import Identify
from .libp2p_stream import Libp2pStream

if TYPE_CHECKING:
    from .host import Host

logger = logging.getLogger(__name__)

IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
PUSH_PROTOCOL: Final = "/ipfs/id/push/1.0.0"
PING_PROTOCOL: Final = "/ipfs/ping/1.0.0"
PROTOCOL_VERSION: Final = "farandole/1.0.0"
AGENT_VERSION: Final = f"farandole/{VERSION}"
# As many bytes of identify as go-libp2p takes; of ping 4,096 on one stream.
MAX_IDENTIFY_BYTES: Final = 8 * 1024
MAX_PING_BYTES: Final = 128 * 1024
PING_BYTES: Final = 32
IDENTIFY_TIMEOUT: Final = 10.0
# A peer that pings leaves its stream open, and pings again after some seconds.
PING_PAUSE: Final = 60.0


class IdentifyService:
    """Reports who this node is, asks peers what they run and where they can be dialled, and answers pings."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.software: dict[bytes, Software] = {}
        """What each connected peer runs, as it has said."""
        host.handlers.set(IDENTIFY_PROTOCOL, self._serve, MAX_IDENTIFY_BYTES)
        host.handlers.set(PUSH_PROTOCOL, self._take, MAX_IDENTIFY_BYTES)
        host.handlers.set(PING_PROTOCOL, _answer_pings, MAX_PING_BYTES)

    async def ask(self, peer: bytes) -> None:
        """Ask a connected peer what it runs and where it can be dialled, and remember that. Raises nothing."""
        try:
            with trio.fail_after(IDENTIFY_TIMEOUT):
                stream = await self._host.open_stream(peer, IDENTIFY_PROTOCOL, IDENTIFY_TIMEOUT, may_dial=False)
                await self._take(stream)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("a peer does not identify itself: %r", error)

    async def _serve(self, stream: Libp2pStream) -> None:
        own = (address.rpartition("/p2p/")[0] for address in self._host.addresses)
        remote = stream.remote_address
        message = Identify(
            protocol_version=PROTOCOL_VERSION,
            agent_version=AGENT_VERSION,
            public_key=peer_id_bytes(self._host.author)[2:],  # the id has the key in it, behind the multihash's header
            listen_addrs=multiaddr_bytes(own),
            observed_addr=multiaddr_bytes([multiaddr_of(remote[0].partition("%")[0], remote[1])])[0] if remote else b"",
            protocols=self._host.handlers.protocols,
        )
        with trio.fail_after(IDENTIFY_TIMEOUT):
            await stream.send_all(encode_delimited(message))

    async def _take(self, stream: Libp2pStream) -> None:
        try:
            with trio.fail_after(IDENTIFY_TIMEOUT):
                message = await receive_message(stream, Identify, MAX_IDENTIFY_BYTES)
        finally:
            await stream.aclose()
        if self._host.is_connected(stream.peer):
            self.software[stream.peer] = software_of(message.agent_version, message.protocols)
        self._host.add_hearsay(stream.peer, multiaddr_texts(message.listen_addrs))


async def _answer_pings(stream: Libp2pStream) -> None:
    data = b""
    while True:
        with trio.fail_after(PING_PAUSE):
            if not (piece := await stream.receive_some(PING_BYTES - len(data))):
                return
            data += piece
            if len(data) == PING_BYTES:
                await stream.send_all(data)
                data = b""
