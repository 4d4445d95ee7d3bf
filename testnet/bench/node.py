"""A mesh process of the benchmark: exchanges contributions as a daemon does, and measures its event loop's lag."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import trio

from farandole.node.base.control import serve_control
from farandole.node.base.nurseries import open_service_nursery
from farandole.node.base.system.memory import SharedCounter
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.exchange_session import Judge, Outgoing
from farandole.protocol.exchange.exchange_messages import Offer
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.run.outer_rules import Codec

from .link import TrainerLink
from .meter import UsageMeter, watched_loop
from .paths import open_node
from .server import Server, map_payload

# Enough for an exchange of whole contributions over a slow line or a relay, on a busy machine.
EXCHANGE_SECONDS: Final = 60.0
_DIGEST: Final = bytes(32)

Way = Literal["new channel", "kept channel", "stream"]


class Lenient:
    """A judge that accepts every contribution."""

    async def refusal(self, size: int, tokens: int) -> str | None:
        """Return no refusal."""
        return None


async def exchange_with(
    exchanges: ExchangeService,
    peer: bytes,
    round_index: int,
    outgoing: Outgoing,
    incoming: memoryview,
    *,
    is_initiator: bool,
    codec: Codec = "fp32",
    judge: Judge | None = None,
    on_advance: Callable[[int], None] | None = None,
) -> ExchangeEnded:
    """Run one session of `ExchangeService.run`, named by the round; without ``judge`` nothing is refused."""
    session = round_index.to_bytes(16, "big")
    deadline = trio.current_time() + EXCHANGE_SECONDS
    offer = Offer(
        run_id=_DIGEST,
        session=session,
        stage=0,
        layout=_DIGEST,
        codec=codec,
        size=outgoing.memory.nbytes,
        round=round_index,
        tokens=1,
    )
    start = StartExchange(session, peer, round_index, is_initiator, deadline)
    return await exchanges.run(start, offer, outgoing, incoming, judge or Lenient(), on_advance)


def check_committed(result: ExchangeEnded) -> None:
    """Raise `ConnectionError` unless the exchange was committed."""
    if not result.committed:
        raise ConnectionError(f"an exchange was not committed: {result.reason}")


class BenchNode:
    """One of two nodes with an open connection; the node that connected initiates the exchanges."""

    def __init__(self, server: Server, outgoing: int, incoming: int, link: int | None = None) -> None:
        """Create the node; with ``link``, the descriptor of a socket, it has a trainer."""
        self._server = server
        self._outgoing, self._incoming = map_payload(outgoing), map_payload(incoming)
        self._link = None if link is None else TrainerLink(socket.socket(fileno=link))

    async def open(self, address: str | None) -> dict[str, Any] | None:
        """Listen and announce the address, or connect to ``address``; both then have a bulk channel."""
        stack = self._server.stack
        opened = await stack.enter_async_context(open_node(address, self._server.announce))
        self._host, self._channels, self._channel, self._peer = opened
        self._is_initiator = address is not None
        self._exchanges = ExchangeService(self._host, self._channels)
        self._nursery = await stack.enter_async_context(open_service_nursery())
        self._meter = UsageMeter([self._outgoing, self._incoming])
        return {} if address else None

    async def exchange(self, round: int, codec: Codec, size: int, digest: str, way: Way) -> dict[str, Any]:
        """Exchange an encoded contribution, with a screening that accepts."""
        outgoing = Outgoing.whole(self._outgoing[:size], bytes.fromhex(digest))
        with self._meter.running() as figures:
            await self._run(round, codec, way, outgoing)
        return figures

    async def take_round(self, round: int, codec: Codec, way: Way) -> dict[str, Any]:
        """Run one round with the trainer, which encodes and averages while the contributions move."""
        assert self._link is not None, "a node has a trainer"
        with self._meter.running() as figures:
            async with self._link.round(self._outgoing) as outgoing:
                arrive = partial(SharedCounter(self._incoming).store, round)
                await self._run(round, codec, way, outgoing, judge=self._link, on_advance=arrive)
        return figures

    async def _run(self, round: int, codec: Codec, way: Way, outgoing: Outgoing, **by_trainer: Any) -> None:
        incoming = self._incoming[: outgoing.memory.nbytes]
        self._exchanges.channels = None if way == "stream" else self._channels
        if way == "new channel":
            self._channels.close()
        result = await exchange_with(
            self._exchanges,
            self._peer,
            round,
            outgoing,
            incoming,
            is_initiator=self._is_initiator,
            codec=codec,
            **by_trainer,
        )
        check_committed(result)

    async def swap(self, size: int, times: int) -> dict[str, Any]:
        """Move ``size`` bytes each way at once over the bulk channel, ``times`` times, and measure the loop's lag."""
        with self._meter.running() as figures:
            async with watched_loop(figures):
                for _ in range(times):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._channel.send, self._outgoing[:size])
                        nursery.start_soon(self._channel.receive_into, self._incoming[:size])
        return figures

    async def rest(self, seconds: float) -> dict[str, Any]:
        """Do nothing, and measure the loop's lag."""
        with self._meter.running() as figures:
            async with watched_loop(figures):
                await trio.sleep(seconds)
        return figures

    async def control(self, home: str) -> dict[str, Any]:
        """Serve ``status`` on a control socket from now on."""
        await self._nursery.start(serve_control, Path(home, "control.sock"), {"status": self._status})
        return {}

    async def _status(self, _: dict[str, Any]) -> object:
        return {"peers": len(self._host.connected), "addresses": self._host.addresses, "time": time.time()}
