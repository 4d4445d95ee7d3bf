"""The model of transfers against closed forms."""

from __future__ import annotations

import random

import numpy as np
import pytest

from farandole.testnet.simulate.lines import SimulatedLine, Transfers, gathered_seconds, ring_seconds, tree_seconds

SIZE, RATE, LATENCY = 1_000_000.0, 250_000.0, 0.05


def constant(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.full(count, LATENCY)


def ends(transfers: Transfers) -> dict[object, float]:
    """Run all flows to their ends."""
    found: dict[object, float] = {}
    while (at := transfers.next_end()) is not None:
        found.update(dict.fromkeys(transfers.take_ended(at), at))
    return found


def test_a_flow_has_the_smaller_of_both_lines() -> None:
    transfers = Transfers({"a": SimulatedLine(100.0, 1_000.0), "b": SimulatedLine(50.0, 60.0)})
    transfers.start("there", "a", "b", 600.0, now=5.0)
    transfers.start("back", "b", "a", 600.0, now=5.0)
    assert ends(transfers) == {"there": pytest.approx(15.0), "back": pytest.approx(17.0)}


def test_flows_of_one_sender_share_its_upload_until_one_ends() -> None:
    transfers = Transfers(
        {"a": SimulatedLine(100.0, 100.0), "b": SimulatedLine(1.0, 1_000.0), "c": SimulatedLine(1.0, 1_000.0)}
    )
    transfers.start("first", "a", "b", 100.0, now=0.0)
    transfers.start("second", "a", "c", 300.0, now=0.0)
    # 50 a second each until the first ends at 2; 200 are left of the second, at 100 a second.
    assert ends(transfers) == {"first": pytest.approx(2.0), "second": pytest.approx(4.0)}


def test_flows_to_one_receiver_share_its_download_and_a_cancelled_one_frees_it() -> None:
    transfers = Transfers({name: SimulatedLine(1_000.0, 100.0) for name in "abc"})
    transfers.start("first", "a", "c", 500.0, now=0.0)
    transfers.start("second", "b", "c", 500.0, now=0.0)
    assert transfers.take_ended(1.0) == []
    transfers.cancel("second", 1.0)
    transfers.cancel("second", 1.0)
    assert ends(transfers) == {"first": pytest.approx(5.5)}


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_a_ring_and_a_group_of_equal_nodes_take_their_closed_forms(count: int) -> None:
    lines = [SimulatedLine(RATE, 5 * RATE)] * count
    moved = 2 * (count - 1) / count * SIZE / RATE
    assert ring_seconds(lines, SIZE, constant) == pytest.approx(moved + 2 * (count - 1) * LATENCY)
    assert gathered_seconds(lines, SIZE, constant) == pytest.approx(moved + 2 * LATENCY)


@pytest.mark.parametrize(("depth", "pieces"), [(1, 1), (3, 1), (3, 16), (6, 16)])
def test_a_full_tree_of_equal_nodes_takes_its_closed_form(depth: int, pieces: int) -> None:
    lines = [SimulatedLine(RATE, RATE)] * (2 ** (depth + 1) - 1)
    # A child sends a piece in 2 size / pieces / rate both ways: its parent's line has two flows.
    one_way = (depth + pieces - 1) * 2 * SIZE / pieces / RATE + depth * LATENCY
    assert tree_seconds(lines, SIZE, constant, pieces) == pytest.approx(2 * one_way)


def test_a_ring_step_by_step_is_the_same_as_its_flows() -> None:
    rng = random.Random(1)
    lines = [SimulatedLine(rng.uniform(1e5, 1e6), rng.uniform(1e5, 1e6)) for _ in range(7)]
    count, transfers = len(lines), Transfers(dict(enumerate(lines)))
    has_arrived = {(node, 0) for node in range(count)}
    is_free, last = dict.fromkeys(range(count), 0), 2 * (count - 1)
    at = 0.0
    while True:
        for node in range(count):
            if (node, is_free[node]) in has_arrived and is_free[node] < last:
                transfers.start((node, is_free[node]), node, (node + 1) % count, SIZE / count, at)
                has_arrived.discard((node, is_free[node]))
        if (end := transfers.next_end()) is None:
            break
        at = end
        for name in transfers.take_ended(at):
            assert isinstance(name, tuple)
            node, step = name
            is_free[node] = step + 1
            has_arrived.add(((node + 1) % count, step + 1))
    assert ring_seconds(lines, SIZE, lambda number: np.zeros(number)) == pytest.approx(at)


def test_the_slowest_line_holds_up_every_mean_over_all() -> None:
    fast, slow = SimulatedLine(RATE, RATE), SimulatedLine(RATE / 10, RATE)
    for seconds in (ring_seconds, tree_seconds, gathered_seconds):
        assert seconds([*[fast] * 6, slow], SIZE, constant) > 2 * seconds([fast] * 7, SIZE, constant)
