"""All tests are run, in an order in which no worker has the slow ones at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import slow

ROOT = Path(__file__).parents[1]


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_each_worker_begins_with_its_part_of_the_slow_tests() -> None:
    names = [*slow.SECONDS][:4]
    items: list[Any] = [Item(f"tests/short_{number}.py::test") for number in range(30)]
    items += [Item(f"{name}::test_{number}") for name in names for number in range(2)]
    dealt = slow.deal(items, 4)
    assert {id(item) for item in dealt} == {id(item) for item in items}
    assert len(dealt) == len(items) == 38
    parts = [[item.nodeid for item in dealt[start : start + 9]] for start in range(0, 36, 9)]
    assert sorted(part[0].partition("::")[0] for part in parts) == sorted(names)
    assert all("short" in name for part in parts for name in part[2:])


@pytest.mark.parametrize("num_workers", [1, 3])
def test_nothing_is_left_out_where_there_are_few_tests(num_workers: int) -> None:
    items: list[Any] = [Item(f"{name}::test") for name in [*slow.SECONDS][:2]]
    assert len(slow.deal(items, num_workers)) == 2
    assert slow.deal([], num_workers) == []


def test_the_slow_modules_exist() -> None:
    assert [name for name in slow.SECONDS if not (ROOT / name).exists()] == []
