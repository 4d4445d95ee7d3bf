from __future__ import annotations

from pathlib import Path

import pytest

from .small_runs import write_texts


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of small files to train on."""
    return write_texts(tmp_path)
