"""The parameters of a model of one's own in a manifest: equal layers once."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.run.manifest import MAX_MANIFEST_BYTES
from farandole.protocol.run.own_model import MAX_NAMES, count, expanded, packed, problems_of

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
