"""Nodes that exchange over real hosts, streams and channels, on loopback."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import BulkService, open_bulk
from farandole.node.bulk.pipe import Outgoing
from farandole.node.mesh.host import Host, open_host
from farandole.protocol.exchange.exchange import Offer
from farandole.protocol.exchange.pipe import BULK_FROM
from farandole.protocol.rounds.pairing_events import ExchangeEnded, StartExchange
from farandole.protocol.run.rules import Codec

from .hosts import LOOPBACK

PATIENCE = 60.0
# Tokens behind the two contributions: the shares are 0.25 and 0.75.
TOKENS = (300, 900)


@dataclass
class Node:
    """The parts of a daemon that an exchange needs."""

    host: Host
    channels: BulkService
    exchanges: ExchangeService
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)
    results: list[ExchangeEnded] = field(default_factory=list)

    async def exchange(
        self,
        partner: bytes,
        session: bytes,
        codec: Codec = "fp32",
        layout: bytes = bytes(32),
        tokens: int = 1,
        deadline: float = PATIENCE,
    ) -> None:
        """Exchange the contribution in ``outgoing`` with the partner's; the node with the smaller key initiates."""
        self.incoming = bytearray(len(self.outgoing))
        start = StartExchange(session, partner, 0, self.host.author < partner, trio.current_time() + deadline)
        offer = Offer(
            run_id=bytes(32),
            session=session,
            stage=0,
            layout=layout,
            codec=codec,
            size=len(self.outgoing),
            round=0,
            tokens=tokens,
        )
        outgoing = Outgoing(memoryview(self.outgoing), blake3(self.outgoing).digest())
        self.results.append(await self.exchanges.run(start, offer, outgoing, memoryview(self.incoming), self.refusal))

    async def refusal(self, size: int, tokens: int, judge_by: float) -> str | None:
        await trio.lowlevel.checkpoint()
        return None


@contextlib.asynccontextmanager
async def open_nodes() -> AsyncIterator[tuple[Node, Node]]:
    """Open two connected nodes; the first one's key is smaller."""
    keys = sorted((Ed25519PrivateKey.generate() for _ in range(2)), key=lambda key: key.public_key().public_bytes_raw())
    with trio.fail_after(2 * PATIENCE):
        async with (
            open_host(keys[0], LOOPBACK) as first,
            open_host(keys[1], LOOPBACK) as second,
            open_bulk(first, bytes(32)) as ones,
            open_bulk(second, bytes(32)) as twos,
        ):
            await first.connect(second.author, second.addresses)
            yield Node(first, ones, ExchangeService(first, ones)), Node(second, twos, ExchangeService(second, twos))


async def swap(nodes: tuple[Node, Node], codec: Codec, path: str, layout: bytes = bytes(32)) -> None:
    """Exchange the contributions in both nodes' outgoing memory, over this path."""
    session = hashlib.sha256(b"".join(bytes(node.outgoing) for node in nodes) + path.encode()).digest()[:16]
    for node in nodes:
        node.exchanges.channels = node.channels if path == "bulk" else None
        node.results.clear()
    async with trio.open_nursery() as nursery:
        for node, partner, tokens in zip(nodes, nodes[::-1], TOKENS, strict=True):
            nursery.start_soon(node.exchange, partner.host.author, session, codec, layout, tokens)
    for node, partner, tokens in zip(nodes, nodes[::-1], TOKENS[::-1], strict=True):
        (result,) = node.results
        assert (result.committed, result.reason, result.partner_tokens) == (True, "", tokens)
        assert result.path == (path if len(node.outgoing) >= BULK_FROM else "stream")
        assert node.incoming == partner.outgoing
