"""The parameters of a model of one's own in a manifest, equal layers once; and the slices of an epoch."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol.run.manifest import MAX_MANIFEST_BYTES
from farandole.protocol.run.own_model import MAX_NAMES, count, expanded, packed, problems_of
from farandole.protocol.run.slices import MAX_SECTIONS, NUM_PARTS, PART_BYTES, DoneSlices, Sections, part_mask, parts
from farandole.protocol.state.entries import RULES, Kind

Shapes = dict[str, tuple[int, ...]]


def adapters(num_layers: int, rank: int = 16, width: int = 8_192) -> Shapes:
    """The names that peft gives to adapters of all linear layers of a Llama."""
    linear = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    return {
        f"base_model.model.model.layers.{layer}.{each}.lora_{side}.default.weight": shape
        for layer in range(num_layers)
        for each in linear
        for side, shape in (("A", (rank, width)), ("B", (width, rank)))
    }


def test_the_adapters_of_eighty_layers_fit_into_a_manifest() -> None:
    shapes = adapters(80)
    assert len(msgspec.msgpack.encode(shapes)) > MAX_MANIFEST_BYTES
    short = packed(shapes)
    assert len(msgspec.msgpack.encode(short)) < 2_000
    assert list(expanded(short).items()) == list(shapes.items())
    assert count(short) == count(shapes) == 80 * 14 * 16 * 8_192
    assert list(problems_of("model", short)) == []


@pytest.mark.parametrize(
    "names",
    [
        ["0.weight", "0.bias", "1.weight", "1.bias", "head"],
        ["embedding", "h.0.a", "h.0.b", "h.1.a", "h.2.a", "h.3.a", "h.3.b", "h.4.a", "h.4.b"],
        ["a.0.x", "a.1.x", "a.0.y", "a.1.y", "a.3.x", "a.2.x"],
        ["h.0.experts.0.w", "h.0.experts.1.w", "h.1.experts.0.w", "h.1.experts.1.w"],
        ["h.00.w", "h.01.w", "h.7", "7.h.8.w", "7.h.9.w", "h.99999.w", "h.100000.w"],
    ],
)
def test_all_names_come_back_in_their_order(names: list[str]) -> None:
    shapes: Shapes = dict.fromkeys(names, (1, 2))
    assert list(expanded(packed(shapes)).items()) == list(shapes.items())


def test_layers_of_other_shapes_are_not_equal() -> None:
    shapes: Shapes = {"h.0.w": (1,), "h.1.w": (1,), "h.2.w": (2,)}
    assert packed(shapes) == {"h.{0-1}.w": (1,), "h.2.w": (2,)}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a.{0-99999}.x"], f"more than {MAX_NAMES}"),
        (["a.{0-40000}.x", "b.{0-40000}.x"], f"more than {MAX_NAMES}"),
        (["a.{0-3}.x", "a.2.x"], "twice"),
        (["a.{3-0}.x"], "without numbers"),
    ],
)
def test_a_signer_of_false_ranges_is_refused_before_they_take_memory(names: list[str], problem: str) -> None:
    (said,) = problems_of("model", dict.fromkeys(names, (1,)))
    assert problem in said


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
