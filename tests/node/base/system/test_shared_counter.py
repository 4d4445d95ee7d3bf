"""A counter in shared memory: stored values, and which of them another epoch accepts."""

from __future__ import annotations

import pytest

from farandole.node.base.system.memory import (
    MAX_EPOCHS,
    SharedCounter,
    counted_size,
    map_shared_memory,
    open_shared_memory,
)


@pytest.mark.parametrize("size", [1, 7, 8, 100_001])
def test_one_mapping_stores_and_another_reads(size: int) -> None:
    with open_shared_memory("test") as shared:
        writer, reader = (map_shared_memory(shared, counted_size(size)) for _ in range(2))
        ours, theirs = SharedCounter(writer), SharedCounter(reader)
        assert theirs.read() == (0, 0)
        ours.store(3, 2**44)
        assert theirs.read() == (3, 2**44)
        writer[:size] = b"\xff" * size
        assert theirs.read() == (3, 2**44), "it lies behind the contribution"


def test_a_count_of_another_epoch_is_none() -> None:
    counter = SharedCounter(bytearray(counted_size(10)))
    counter.store(MAX_EPOCHS + 5, 7)
    assert counter.count_of(5) == counter.count_of(MAX_EPOCHS + 5) == 7
    assert counter.count_of(4) == counter.count_of(6) == 0
