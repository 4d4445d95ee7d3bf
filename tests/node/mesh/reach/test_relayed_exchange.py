"""Exchanges of nodes that reach each other only through a relay: over the stream, and without dialling the relay."""

import contextlib
import hashlib
from collections.abc import AsyncIterator

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.mesh.host import open_host
from farandole.protocol.exchange.pipe import BULK_FROM

from ...real_nodes import PATIENCE, TOKENS, Node
from ...relayed import open_relay, reserve

SIZE = 4 * BULK_FROM


@contextlib.asynccontextmanager
async def open_relayed_nodes() -> AsyncIterator[tuple[Node, Node]]:
    """Open two nodes without listeners, connected through a relay; the first one's key is smaller."""
    keys = sorted((Ed25519PrivateKey.generate() for _ in range(2)), key=lambda key: key.public_key().public_bytes_raw())
    with trio.fail_after(2 * PATIENCE):
        async with (
            open_relay() as relay,
            open_host(keys[0], []) as first,
            open_host(keys[1], []) as second,
            open_bulk(first, b"r" * 32) as ones,
            open_bulk(second, b"r" * 32) as twos,
        ):
            await first.connect(second.author, [await reserve(second, relay.host)])
            yield Node(first, ones, ExchangeService(first, ones)), Node(second, twos, ExchangeService(second, twos))


@pytest.mark.parametrize("has_channels", [False, True])
async def test_an_exchange_is_committed_over_a_relay(has_channels: bool) -> None:
    async with open_relayed_nodes() as nodes:
        assert all(one.host.connections.path(other.host.author) == "relayed" for one, other in (nodes, nodes[::-1]))
        for node, seed in zip(nodes, (b"a", b"b"), strict=True):
            node.outgoing = bytearray(hashlib.shake_128(seed).digest(SIZE))
            node.exchanges.channels = node.channels if has_channels else None
        async with trio.open_nursery() as nursery:
            for node, partner, tokens in zip(nodes, nodes[::-1], TOKENS, strict=True):
                nursery.start_soon(node.exchange, partner.host.author, bytes(16), "fp32", bytes(32), tokens)
        for node, partner in zip(nodes, nodes[::-1], strict=True):
            (result,) = node.results
            assert (result.committed, result.path) == (True, "stream")
            assert node.incoming == partner.outgoing
