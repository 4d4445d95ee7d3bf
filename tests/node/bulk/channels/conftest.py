from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from farandole.node.bulk import negotiation as bulk

from .parties import Party, two_parties


@pytest.fixture
async def parties() -> AsyncIterator[tuple[Party, Party]]:
    async with two_parties() as both:
        yield both


@pytest.fixture
def alice(parties: tuple[Party, Party]) -> Party:
    return parties[0]


@pytest.fixture
def bob(parties: tuple[Party, Party]) -> Party:
    return parties[1]


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "OPEN_TIMEOUT", 0.3)
    monkeypatch.setattr(bulk, "GREETING_TIMEOUT", 0.3)
