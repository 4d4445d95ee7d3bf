"""The first questions of libp2p nodes: identify (github.com/libp2p/specs, identify) and ping."""

from __future__ import annotations

import logging
from typing import Final

import trio

from farandole.protocol.run.releases import Software, software_of
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_bytes

from ..base.errors import PeerUnreachableError
from ..base.project import VERSION
from .addresses import multiaddr_of
from .delimited import encode_delimited, multiaddr_bytes, multiaddr_texts, receive_message
from .dialler import Dialler
from .libp2p_parts import Identify
from .multistream import IDENTIFY_PROTOCOL, PING_PROTOCOL, PUSH_PROTOCOL, ProtocolHandlers
from .yamux import Libp2pStream

logger = logging.getLogger(__name__)

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

    def __init__(self, dialler: Dialler, handlers: ProtocolHandlers) -> None:
        self._dialler = dialler
        self._handlers = handlers
        self.software: dict[bytes, Software] = {}
        """What each connected peer runs, as it has said."""
        handlers.set(IDENTIFY_PROTOCOL, self._serve, MAX_IDENTIFY_BYTES)
        handlers.set(PUSH_PROTOCOL, self._take, MAX_IDENTIFY_BYTES)
        handlers.set(PING_PROTOCOL, _answer_pings, MAX_PING_BYTES)

    async def ask(self, peer: bytes) -> None:
        """Ask a connected peer what it runs and where it can be dialled, and remember that. Raises nothing."""
        try:
            with trio.fail_after(IDENTIFY_TIMEOUT):
                stream = await self._dialler.open_stream(peer, IDENTIFY_PROTOCOL, IDENTIFY_TIMEOUT, may_dial=False)
                await self._take(stream)
        except (PeerUnreachableError, RemoteProtocolError, trio.BrokenResourceError, trio.TooSlowError) as error:
            logger.debug("a peer does not identify itself: %r", error)

    async def _serve(self, stream: Libp2pStream) -> None:
        public_key = peer_id_bytes(self._dialler.author)[2:]  # the id has it in it, behind the multihash's header
        own = (address.rpartition("/p2p/")[0] for address in self._dialler.own.all)
        remote = stream.remote_address
        message = Identify(
            protocol_version=PROTOCOL_VERSION,
            agent_version=AGENT_VERSION,
            public_key=public_key,
            listen_addrs=multiaddr_bytes(own),
            observed_addr=multiaddr_bytes([multiaddr_of(remote[0].partition("%")[0], remote[1])])[0] if remote else b"",
            protocols=self._handlers.protocols,
        )
        with trio.fail_after(IDENTIFY_TIMEOUT):
            await stream.send_all(encode_delimited(message))

    async def _take(self, stream: Libp2pStream) -> None:
        try:
            with trio.fail_after(IDENTIFY_TIMEOUT):
                message = await receive_message(stream, Identify, MAX_IDENTIFY_BYTES)
        finally:
            await stream.aclose()
        if self._dialler.connections.of(stream.peer):
            self.software[stream.peer] = software_of(message.agent_version, message.protocols)
        self._dialler.add_hearsay(stream.peer, multiaddr_texts(message.listen_addrs))


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
