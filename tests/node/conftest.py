from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from farandole.protocol.run.manifest import SignedManifest

from .small_runs import small_manifest, write_run, write_texts


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of small files to train on."""
    return write_texts(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> SignedManifest:
    """Write a small run to ``run.manifest``."""
    return write_run(tmp_path, small_manifest())


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    """Return virtual time that jumps to whatever is waited for."""
    return autojump_clock
