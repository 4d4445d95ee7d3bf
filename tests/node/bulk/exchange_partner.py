"""A partner in its own process: ``exchange_partner.py SIZE PARTNER ADDRESS`` sends SIZE bytes, at 4 MB/s."""

from __future__ import annotations

import sys
from pathlib import Path

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.bulk.exchange_service import ExchangeService
from farandole.node.bulk.negotiation import open_bulk
from farandole.node.mesh.host import open_host

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.node.real_nodes import Node  # a script finds its neighbour by the path above


async def main(size: int, partner: bytes, address: str) -> None:
    shaping = Shaping.of_mbit(32, 0)
    key = Ed25519PrivateKey.generate()
    async with open_host(key, ["/ip4/127.0.0.1/tcp/0"]) as host, open_bulk(host, b"r" * 32, shaping) as channels:
        node = Node(host, channels, ExchangeService(host, channels, shaping))
        node.outgoing = bytearray(b"\x55" * size)
        await host.connect(partner, [address])
        print(host.author.hex(), flush=True)
        await node.exchange(partner, bytes(16))


trio.run(main, int(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3])
