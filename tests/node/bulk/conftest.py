"""Alice and Bob, with contributions over a stream and bulk channels in memory."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from farandole.protocol.exchange.pipe import BULK_FROM

from ..parties import ALICE, BOB, PATIENCE, MemoryChannels, MemoryHost, Party, assert_committed, meet


class BulkPair:
    """Alice and Bob with contributions of one size, by default large enough for a channel."""

    def __init__(self, nursery: trio.Nursery, size: int = BULK_FROM + 1) -> None:
        self.size = size
        hosts: dict[bytes, MemoryHost] = {}
        channels: dict[bytes, MemoryChannels] = {}
        self.ways = [MemoryChannels(author, channels) for author in (ALICE, BOB)]
        self.alice, self.bob = (
            Party(MemoryHost(way.author, nursery, hosts), seed, size, way) for seed, way in enumerate(self.ways, 1)
        )

    def way(self, author: bytes) -> MemoryChannels:
        return self.ways[author == BOB]

    def party(self, author: bytes) -> Party:
        return self.bob if author == BOB else self.alice

    def both(self, first: bytes) -> tuple[Party, Party]:
        return (self.alice, self.bob) if first == ALICE else (self.bob, self.alice)

    async def meet(self) -> None:
        await meet(self.alice, self.bob)

    def assert_committed(self, path: str, num_channels: int) -> None:
        """Assert that both committed, over this number of channels."""
        assert_committed(self.alice, self.bob)
        assert self.alice.result.path == path
        assert self.way(ALICE).num_acquired == num_channels
        assert trio.current_time() <= PATIENCE


@pytest.fixture
def network() -> dict[bytes, MemoryHost]:
    return {}


@pytest.fixture
async def alice(nursery: trio.Nursery, network: dict[bytes, MemoryHost]) -> Party:
    return Party(MemoryHost(ALICE, nursery, network), seed=1)


@pytest.fixture
async def bob(nursery: trio.Nursery, network: dict[bytes, MemoryHost]) -> Party:
    return Party(MemoryHost(BOB, nursery, network), seed=2)


@pytest.fixture
async def pair(nursery: trio.Nursery) -> BulkPair:
    return BulkPair(nursery)
