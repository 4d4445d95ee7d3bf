from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ..parties import ALICE, BOB, MemoryHost, Party
from .bulk_pair import BulkPair


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    """Return virtual time that jumps to whatever is waited for."""
    return autojump_clock


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
