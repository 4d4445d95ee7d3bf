"""A mesh process of the benchmark: exchanges contributions as a daemon does, and sees how its event loop fares."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import trio

from farandole.node.base.control import serve_control
from farandole.node.base.system.memory import SharedCounter
from farandole.node.bulk.channel import BulkChannel
from farandole.node.bulk.contributions import Judge, Outgoing
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import BulkService
from farandole.node.mesh.host import Host
from farandole.protocol.exchange_messages import Offer
from farandole.protocol.outer_rules import Codec
from farandole.protocol.pairing_events import StartExchange

from .link import TrainerLink
from .meter import UsageMeter, watched_loop
from .paths import Announce, open_node

DEADLINE: Final = 60.0
_DIGEST: Final = bytes(32)

Way = Literal["new channel", "kept channel", "stream"]


class BenchNode:
    """One of two nodes with an open connection; the one that connected initiates the exchanges."""

    def __init__(
        self,
        host: Host,
        channels: BulkService,
        channel: BulkChannel,
        peer: bytes,
        is_initiator: bool,
        outgoing: memoryview,
        incoming: memoryview,
        link: TrainerLink | None,
    ) -> None:
        self._link = link
        self._channels = channels
        self._channel = channel
        self._peer = peer
        self._is_initiator = is_initiator
        self._outgoing = outgoing
        self._incoming = incoming
        self._host = host
        self._exchanges = ExchangeService(host, channels)
        self._meter = UsageMeter([outgoing, incoming])

    async def exchange(self, round: int, codec: Codec, size: int, digest: str, way: Way) -> dict[str, Any]:
        """One session of `ExchangeService.run`, with a contribution that is encoded, and a screening that accepts."""
        outgoing = Outgoing.whole(self._outgoing[:size], bytes.fromhex(digest))
        with self._meter.running() as figures:
            await self._run(round, codec, way, outgoing, Lenient())
        return figures

    async def take_round(self, round: int, codec: Codec, way: Way) -> dict[str, Any]:
        """One round with the trainer, which encodes and takes in while the contributions move."""
        assert self._link is not None, "a node has a trainer"
        with self._meter.running() as figures:
            async with self._link.round(self._outgoing) as outgoing:
                arrive = partial(SharedCounter(self._incoming).store, round)
                await self._run(round, codec, way, outgoing, self._link, arrive)
        return figures

    async def _run(
        self,
        round: int,
        codec: Codec,
        way: Way,
        outgoing: Outgoing,
        judge: Judge,
        arrive: Callable[[int], None] | None = None,
    ) -> None:
        size = outgoing.memory.nbytes
        self._exchanges.channels = None if way == "stream" else self._channels
        if way == "new channel":
            self._channels.close()
        session = round.to_bytes(16, "big")
        start = StartExchange(session, self._peer, round, self._is_initiator, trio.current_time() + DEADLINE)
        offer = Offer(
            run_id=_DIGEST,
            session=session,
            stage=0,
            layout=_DIGEST,
            codec=codec,
            size=size,
            round=round,
            tokens=1,
        )
        result = await self._exchanges.run(start, offer, outgoing, self._incoming[:size], judge, arrive)
        if not result.committed:
            raise ConnectionError(f"an exchange was not committed: {result.reason}")

    async def swap(self, size: int, times: int) -> dict[str, Any]:
        """Move so many bytes both ways at once over the bulk channel, again and again, with an eye on the loop."""
        with self._meter.running() as figures:
            async with watched_loop(figures):
                for _ in range(times):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._channel.send, self._outgoing[:size])
                        nursery.start_soon(self._channel.receive_into, self._incoming[:size])
        return figures

    async def rest(self, seconds: float) -> dict[str, Any]:
        """Do nothing, with an eye on the loop."""
        with self._meter.running() as figures:
            async with watched_loop(figures):
                await trio.sleep(seconds)
        return figures

    async def control(self, home: str) -> dict[str, Any]:
        """Serve ``status`` on a control socket from now on."""
        await self.nursery.start(serve_control, Path(home, "control.sock"), {"status": self._status})
        return {}

    async def _status(self, _: dict[str, Any]) -> object:
        return {"peers": len(self._host.connected), "addresses": self._host.addresses, "time": time.time()}

    nursery: trio.Nursery
    """For what goes on between requests."""


class Lenient:
    """Accepts every contribution."""

    async def refusal(self, size: int, tokens: int) -> str | None:
        """There is none."""
        return None


@contextlib.asynccontextmanager
async def open_node_end(
    outgoing: memoryview,
    incoming: memoryview,
    address: str | None,
    announce: Announce,
    connection: socket.socket | None,
) -> AsyncIterator[BenchNode]:
    """A node that is connected with the other one, has a bulk channel to it, and perhaps a connection to a trainer."""
    link = None if connection is None else TrainerLink(connection)
    async with open_node(address, announce) as (host, channels, channel, peer), trio.open_nursery() as nursery:
        node = BenchNode(host, channels, channel, peer, address is not None, outgoing, incoming, link)
        node.nursery = nursery
        yield node
        nursery.cancel_scope.cancel()
