"""Every test here that waits for a peer fails after `PATIENCE`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from farandole.node.mesh.reach import connectivity, punching

from ...patience import PATIENCE


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes look soon for relays, for holes, and whether a target is frozen: tests wait for nothing else."""
    monkeypatch.setattr(connectivity, "HURRY_INTERVAL", 0.1)
    monkeypatch.setattr(punching, "CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(connectivity, "STOP_TIMEOUT", 1.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent) or not isinstance(item, pytest.Function):
            continue
        if inspect.iscoroutinefunction(item.obj):
            item.obj = in_time(item.obj)


def in_time(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(**fixtures: object) -> None:
        with trio.fail_after(PATIENCE):
            await test(**fixtures)

    return run
