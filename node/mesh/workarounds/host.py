"""Streams and their handlers, and what identify tells."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import AddrsFactory, BasicHost
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from ..yamux import MuxedStream
from .connection import MendedConn
from .swarm import MendedSwarm
from .upgrading import NEGOTIATION_TIMEOUT, BoundedCommunicator

logger = logging.getLogger(__name__)

# What a peer may send on one stream of the library's protocols, which read up to 4 MiB at a time. Of identify as much
# as go-libp2p takes (the library keeps it); of questions to Kademlia some dozens; of ping 4,096. An answer of Kademlia
# has twenty peers and twenty providers, with as many addresses as `peers.py` keeps and a signed record of them.
MAX_IDENTIFY_BYTES = 8 * 1024
MAX_LIBRARY_BYTES = 128 * 1024
MAX_ANSWER_BYTES = 512 * 1024
IDENTIFY_TIMEOUT = 10.0
# How long the library's peer store believes an address that somebody told it, in seconds.
PEER_ADDRESS_TTL = 3600


class MendedHost(BasicHost):
    """The library's host, whose stream handlers may fail and cost only their stream."""

    _network: MendedSwarm

    def __init__(self, network: MendedSwarm, addrs_factory: AddrsFactory) -> None:
        self.external_addresses: list[Multiaddr] = []
        """Of this host as others see it, and through relays; each ends in its peer id."""
        # What peers observe is asked for in dialback.py, over connections from the port that listens.
        super().__init__(network, addrs_factory=addrs_factory, disable_identify_address_discovery=True)

    def get_addrs(self) -> list[Multiaddr]:
        """What this host advertises: the addresses that it has, and those that others reach it at."""
        own = self.own_addrs()
        return [*own, *(address for address in self.external_addresses if address not in own)]

    def own_addrs(self) -> list[Multiaddr]:
        """The addresses of this machine's interfaces at which this host listens."""
        return super().get_addrs()

    async def connect(self, peer_info: PeerInfo) -> None:
        """Connect by the host's own rules."""
        self.peerstore.add_addrs(peer_info.peer_id, peer_info.addrs, PEER_ADDRESS_TTL)
        await self._network.dial(peer_info.peer_id)

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """A stream of the first of the protocols that the peer speaks, connecting if need be."""
        return await self._negotiate(await self._network.new_stream(peer_id), protocol_ids)

    async def new_stream_on(self, conn: MendedConn, protocol_id: TProtocol) -> NetStream:
        """A stream of a protocol on this very connection."""
        stream = await conn.new_stream()
        await self._negotiate(stream, [protocol_id])
        return stream

    async def _negotiate(self, stream: INetStream, protocol_ids: Sequence[TProtocol]) -> INetStream:
        try:
            protocol = await self.multiselect_client.select_one_of(
                protocol_ids, BoundedCommunicator(stream), NEGOTIATION_TIMEOUT
            )
        except BaseException:  # cancelled too: nobody else knows of the stream
            cast("MuxedStream", cast("NetStream", stream).muxed_stream).break_off()
            raise
        _limit(stream, protocol, MAX_ANSWER_BYTES)
        stream.set_protocol(protocol)
        return stream

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        # The library runs this outside of every nursery, where an exception would end the program.
        if peer_id != self.get_id() and peer_id not in self._identify_inflight:
            self._identify_inflight.add(peer_id)
            assert self._network.background_nursery is not None
            self._network.background_nursery.start_soon(self._identify_task_entry, peer_id, reason)

    async def _identify_task_entry(self, peer_id: ID, reason: str) -> None:
        try:
            with trio.move_on_after(IDENTIFY_TIMEOUT):
                await self._identify_peer(peer_id, reason=reason)
        except Exception:  # whatever it is, the host goes on without knowing more of the peer
            logger.debug("identifying %s failed", peer_id, exc_info=True)
        finally:
            self._identify_inflight.discard(peer_id)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        try:
            try:
                communicator = BoundedCommunicator(net_stream)
                protocol, handler = await self.multiselect.negotiate(communicator, NEGOTIATION_TIMEOUT)
            finally:
                stream = cast("NetStream", net_stream)
                cast("MendedConn", stream.swarm_conn).note_negotiated(stream.muxed_stream)
            if protocol is None or handler is None:
                raise SwarmException("no protocol")
            _limit(net_stream, protocol, MAX_LIBRARY_BYTES)
            net_stream.set_protocol(protocol)
            await handler(net_stream)
            cast("MuxedStream", cast("NetStream", net_stream).muxed_stream).abandon()
        except Exception as error:  # a handler's, or the library's: it costs its stream
            logger.debug("a stream of %s failed: %r", net_stream.muxed_conn.peer_id, error)
            await net_stream.reset()


def _limit(stream: INetStream, protocol: str, max_bytes: int) -> None:
    """Bound what a peer sends on a stream that the library reads."""
    if protocol.startswith("/ipfs/"):
        is_identify = protocol.startswith("/ipfs/id/")
        muxed_stream = cast("MuxedStream", cast("NetStream", stream).muxed_stream)
        muxed_stream.limit(MAX_IDENTIFY_BYTES if is_identify else max_bytes)
