"""Memory for snapshots: what the system promises is not what it has."""

from __future__ import annotations

import pytest
import torch

from farandole.training.engine import snapshot
from farandole.training.engine.snapshot import SnapshotMemory
from farandole.training.outer.copying import copier_for


def memory_for(num_elements: int) -> SnapshotMemory:
    vectors = {"slow": torch.zeros(num_elements), "means": torch.zeros(num_elements, dtype=torch.bfloat16)}
    return SnapshotMemory(vectors, copier_for(torch.device("cpu")))


def test_memory_that_another_process_takes_meanwhile_is_missed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([1 << 40, 1 << 40, 1 << 20])
    monkeypatch.setattr(snapshot, "available_bytes", lambda: next(left))
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 1 << 18)
    with pytest.raises(MemoryError, match="75712 bytes are wanted, 1048576 available"):
        memory_for(100_000)
    assert next(left, None) is None, "it was asked before each piece"


def test_something_is_left_to_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "available_bytes", lambda: 600_000 + snapshot._RESERVE_BYTES)
    memory_for(100_000)
    with pytest.raises(MemoryError):
        memory_for(100_001)
