"""Fixtures of the tests of transfers."""

from __future__ import annotations

from pathlib import Path

import pytest

from .donors import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)
