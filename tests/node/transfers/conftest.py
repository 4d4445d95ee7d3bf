"""Fixtures of the tests of transfers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from .donors import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.fixture
async def serving(world: World) -> AsyncIterator[World]:
    """Return the world while its node serves others."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.weights.provider.run)
        yield world
        nursery.cancel_scope.cancel()
