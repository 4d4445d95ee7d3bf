"""Partners that speak the protocol of an exchange by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import trio
import trio.testing
from blake3 import blake3

from farandole.node.base.streams import Stream
from farandole.node.bulk.exchange_service import EXCHANGE_PROTOCOL
from farandole.protocol.exchange.exchange import Control, Exchange, Offer
from farandole.protocol.exchange.pipe import CHUNK_BYTES, Route, Sealed

from ..parties import ALICE, BOB, PATIENCE, SIZE, MemoryHost, Party, offer_of


class Liar:
    """A partner that speaks the protocol by hand."""

    def __init__(self, stream: Stream, offer: Offer, contribution: bytes) -> None:
        self.stream = stream
        self.exchange = Exchange(True, offer, memoryview(bytearray(offer.size)))
        self.contribution = memoryview(contribution)
        self.digest = blake3(contribution).digest()

    async def send(self, message: Control | Route | Sealed | memoryview) -> None:
        if isinstance(message, memoryview):
            await self.stream.send_all(self.exchange.pipe.send_chunk(message))
        elif isinstance(message, Route | Sealed):
            await self.stream.send_all(self.exchange.pipe.send(message))
        else:
            await self.stream.send_all(self.exchange.send(message))

    async def send_contribution(self) -> None:
        await self.send(Sealed(self.digest))
        for offset in range(0, self.exchange.offer.size, CHUNK_BYTES):
            await self.send(self.contribution[offset : offset + CHUNK_BYTES])

    async def expect(self, kind: type[object]) -> None:
        """Wait for the next event of the honest side, of this kind; its hash, which comes at any time, is skipped."""
        pipe = self.exchange.pipe
        while (event := pipe.next_event()) is None or isinstance(event, Sealed):
            if event is not None:
                continue
            data = await self.stream.receive_some(65_536)
            assert data
            pipe.receive_data(bytes(data))
        assert isinstance(self.exchange.receive(event) if isinstance(event, bytes) else event, kind)


async def meet_liar(bob: Party, script: Callable[[Liar], Awaitable[None]], contribution: bytes = bytes(SIZE)) -> None:
    """Let Bob exchange with an Alice who follows the script."""
    offer = msgspec.structs.replace(offer_of(contribution), seconds_left=PATIENCE)
    host = MemoryHost(ALICE, bob.host.nursery, bob.host.network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.exchange, ALICE)
        await trio.testing.wait_all_tasks_blocked()
        stream = await host.open_stream(BOB, EXCHANGE_PROTOCOL)
        await script(Liar(stream, offer, contribution))
