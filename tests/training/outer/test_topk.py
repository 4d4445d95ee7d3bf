import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farandole.training.base.errors import CodecError
from farandole.training.outer.codec import MIN_SCALE, TopK
from farandole.training.screening.rule import Encounter

from ..conftest import ALICE, BOB, MakeReplica, sent, train

SETTINGS: dict[str, object] = {"codec": "topk", "topk": 40, "alpha": 0.0, "beta": 1.0, "gamma": 1.0}


def encoded(form: TopK, values: Tensor, last: Tensor | None = None) -> Tensor:
    data = torch.empty(form.size(len(values)), dtype=torch.uint8)
    form.encode(values, data, last)
    return data


def places_sent(form: TopK, data: Tensor, num_elements: int) -> Tensor:
    """(n,) bool."""
    form.decode(data, values := torch.full((num_elements,), math.nan))
    return ~values.isnan()


def test_a_block_is_a_scale_levels_and_places() -> None:
    values, last = torch.zeros(256), torch.zeros(256)
    values[7], values[200], last[9] = 127.0, -2.4, 1.0

    data = bytes(encoded(TopK(3), values, last).tolist())

    assert data == struct.pack("<f", 1.0) + struct.pack("3b", 127, 0, -2) + bytes([7, 9, 200])
    assert [TopK(3).size(n) for n in (0, 1, 3, 256, 257)] == [0, 6, 10, 10, 16]


@given(
    num_elements=st.integers(0, 700),
    k=st.integers(1, 128),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1e-40, 1e-3, 1.0]),
)
def test_those_that_moved_furthest_are_sent(num_elements: int, k: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, last = (torch.randn(num_elements, generator=generator) * scale for _ in range(2))
    form = TopK(k)
    data = encoded(form, values, last)
    form.decode(data, decoded := last.clone())

    chosen = places_sent(form, data, num_elements)
    for block in range(0, num_elements, 256):
        part = slice(block, min(block + 256, num_elements))
        moved, is_sent = (values - last).abs()[part], chosen[part]
        assert int(is_sent.sum()) == min(k, len(moved))
        if not bool(is_sent.all()):
            assert float(moved[is_sent].min()) >= float(moved[~is_sent].max()) * (1 - 2.0**-14) - 2.0**-140
        step = max(float(values[part][is_sent].abs().max()) / 127, MIN_SCALE)
        errors = (decoded - values)[part][is_sent].abs()
        assert float(errors.max()) <= step * (0.5 + 2.0**-15)
    assert torch.equal(decoded[~chosen], last[~chosen])


@pytest.mark.parametrize(
    ("scale", "places", "reason"),
    [
        (1.0, [3, 3], "ascending"),
        (1.0, [4, 3], "ascending"),
        (1.0, [3, 100], "beyond"),
        (math.nan, [3, 4], "scale"),
        (-1.0, [3, 4], "scale"),
        (3e38, [3, 4], "scale"),
    ],
)
def test_malformed_blocks_are_refused(scale: float, places: list[int], reason: str) -> None:
    data = torch.tensor([*struct.pack("<f", scale), 1, 1, *places], dtype=torch.uint8)

    with pytest.raises(CodecError, match=reason):
        TopK(2).decode(data, torch.zeros(100))


def test_partners_agree_where_both_have_sent_and_move_where_the_other_has(make_replica: MakeReplica) -> None:
    alice, bob = make_replica(ALICE, **SETTINGS), make_replica(BOB, **SETTINGS)
    for node in (alice, bob):
        train(node)
    form, num_elements = TopK(40), alice.checkpoint.layout.num_elements
    own = {node: node.round_end.fast_weights() for node in (alice, bob)}
    data = {node: torch.frombuffer(sent(node), dtype=torch.uint8) for node in (alice, bob)}
    by_alice, by_bob = (places_sent(form, data[node], num_elements) for node in (alice, bob))
    both, neither = by_alice & by_bob, ~(by_alice | by_bob)
    assert both.any()
    assert neither.any()

    alice.round_end.apply(data[bob].numpy(), Encounter(b"", 3, 1), own_first=True)
    bob.round_end.apply(data[alice].numpy(), Encounter(b"", 1, 3), own_first=False)

    scale = 2.0**-7 * max(float(weights.abs().max()) for weights in own.values())
    assert float((alice.round_end.slow_weights() - bob.round_end.slow_weights())[both].abs().max()) < scale, (
        "but for the codec's rounding"
    )
    for node, other, mine, theirs, share in (
        (alice, bob, by_alice, by_bob, 0.75),
        (bob, alice, by_bob, by_alice, 0.25),
    ):
        after, kept = node.round_end.slow_weights(), mine & ~theirs
        torch.testing.assert_close(after[neither], own[node][neither], rtol=2.0**-22, atol=0)  # the mean's rounding
        torch.testing.assert_close(after[kept], own[node][kept], rtol=2.0**-22, atol=0)
        form.decode(data[other], received := own[node].clone())
        only = theirs & ~mine
        mean = share * own[node][only] + (1 - share) * received[only]
        torch.testing.assert_close(after[only], mean, rtol=1e-5, atol=1e-7)


def test_what_was_left_out_is_sent_some_rounds_later(make_replica: MakeReplica) -> None:
    """40 of 256 elements a round: after 7 rounds of nothing new all have had their turn, to half a scale."""
    alice, bob = make_replica(ALICE, **SETTINGS), make_replica(BOB, **SETTINGS)
    moved = torch.linspace(0.01, 0.02, alice.checkpoint.layout.num_elements)
    alice.round_end.weights.flat.add_(moved)
    meant = alice.round_end.fast_weights()
    told = bob.round_end.fast_weights()
    for number in range(9):
        data = torch.frombuffer(sent(alice), dtype=torch.uint8)
        if number == 0:  # nobody to be had: it was not passed on
            alice.round_end.apply(None)
            continue
        of_bob = sent(bob)
        alice.round_end.apply(of_bob, Encounter(b"", 1, 0))
        alice.round_end.weights.flat.copy_(meant)  # Bob's pull aside
        TopK(40).decode(data, told)
        bob.round_end.apply(None)

    errors = (told - meant).abs()
    assert float(errors.max()) <= float(meant.abs().max()) / 127
    assert torch.equal(told, alice.checkpoint.vectors()["sent"])
