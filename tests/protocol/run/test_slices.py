from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.slices import MAX_SECTIONS, NUM_PARTS, PART_BYTES, DoneSlices, Sections, part_mask, parts
from farandole.protocol.state.entries import RULES, Kind


@pytest.mark.parametrize("num_slices", [1, 7, MAX_SECTIONS, MAX_SECTIONS + 1, 1_000_000, 2**31 - 1])
def test_sections_cover_an_epoch(num_slices: int) -> None:
    sections = Sections(num_slices)
    assert sections.count <= MAX_SECTIONS
    assert sections.end(sections.count - 1) == num_slices
    assert sections.begin(sections.of(num_slices - 1)) < num_slices
    assert sections.mask(0, num_slices) == sections.all


def test_all_sections_fit_into_the_entries_of_one_author() -> None:
    assert RULES[Kind.LEASE].slots == NUM_PARTS + 1
    assert all(len(part) <= PART_BYTES for part in parts((1 << MAX_SECTIONS) - 1))


@given(st.sets(st.integers(0, MAX_SECTIONS - 1), max_size=50))
def test_a_mask_comes_back_from_its_parts(bits: set[int]) -> None:
    mask = sum(1 << bit for bit in bits)
    assert sum(part_mask(number, raw) for number, raw in enumerate(parts(mask))) == mask


@given(st.integers(1, 40_000), st.integers(0, 2**32))
def test_leases_worked_off_from_the_front_make_a_whole(num_slices: int, seed: int) -> None:
    rng, done = random.Random(seed), DoneSlices(Sections(num_slices))
    while done.whole != done.sections.all:
        first = done.next(rng.randrange(num_slices))
        if first == num_slices:
            first = done.next(0)
        end = min(num_slices, first + rng.randint(1, num_slices))
        before = done.count
        done.add_lease(first, end)
        assert done.count > before
        assert done.next(first) >= end
    assert done.count == num_slices
    assert done.next(0) == num_slices


@given(st.integers(1, 400), st.integers(0, 2**32))
def test_slices_may_be_done_in_any_order(num_slices: int, seed: int) -> None:
    done, order = DoneSlices(Sections(num_slices)), list(range(num_slices))
    done.sections.size, done.sections.count = 16, -(-num_slices // 16)
    done.sections.all = (1 << done.sections.count) - 1
    random.Random(seed).shuffle(order)
    for number, index in enumerate(order):
        assert done.whole != done.sections.all
        assert done.count <= number
        done.add(index)
        done.add(index)
    assert done.whole == done.sections.all
    assert done.count == num_slices


def test_what_was_done_ahead_counts_when_somebody_else_has_done_what_comes_before() -> None:
    done = DoneSlices(Sections(4 * MAX_SECTIONS))
    done.add(2)
    done.add(3)
    done.add_lease(0, 2)
    assert done.next(0) == 4
    assert done.count == 4
    assert done.whole == 1
