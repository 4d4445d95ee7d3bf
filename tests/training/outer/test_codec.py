import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farandole.protocol.run.rules import encoded_bytes
from farandole.training.base.errors import CodecError
from farandole.training.outer import codec
from farandole.training.outer.codec import CODECS, MAX_FP16, MAX_MAGNITUDE, MIN_SCALE, TopK, decode, encode
from farandole.training.screening.rule import Encounter

from ..conftest import ALICE, BOB, MakeReplica, sent, train

BLOCKS = {"int8": (256, 127), "int4": (64, 7)}
codecs = pytest.mark.parametrize("name", CODECS)
all_codecs = pytest.mark.parametrize("name", [*CODECS, "topk"])
numbers = st.floats(-MAX_MAGNITUDE, MAX_MAGNITUDE, width=32) | st.floats(-2.0, 2.0, width=32)
# Sizes around the block's, without drawing every element.
tensors = st.lists(numbers, max_size=8).flatmap(
    lambda head: st.integers(0, 515).map(lambda n: torch.tensor((head * n)[:n] or [0.0] * n))
)


def encoded(name: str, values: Tensor) -> bytearray:
    """Encoded; what fp16 cannot hold is cut off first."""
    limit = MAX_FP16 if name == "fp16" else MAX_MAGNITUDE
    buffer = bytearray(encoded_bytes(name, values.numel()))
    assert encode(name, values.float().clamp(-limit, limit), buffer) == len(buffer)
    return buffer


def round_trip(name: str, values: Tensor) -> Tensor:
    return decode(name, encoded(name, values), values.numel())


@given(tensors)
def test_fp32_is_exact(values: Tensor) -> None:
    assert torch.equal(round_trip("fp32", values), values)


@given(tensors)
def test_bf16_rounds_to_the_nearest(values: Tensor) -> None:
    error = (round_trip("bf16", values) - values).abs()

    assert bool((error <= values.abs() * 2.0**-8 + 2.0**-134).all())


@given(tensors)
def test_fp16_rounds_to_the_nearest(values: Tensor) -> None:
    values = values.clamp(-MAX_FP16, MAX_FP16)
    error = (round_trip("fp16", values) - values).abs()

    assert bool((error <= (values.abs() * 2.0**-11).clamp(min=2.0**-25)).all())


def test_fp16_refuses_what_it_cannot_hold() -> None:
    assert round_trip("fp16", torch.tensor([MAX_FP16, -MAX_FP16])).tolist() == [MAX_FP16, -MAX_FP16]
    with pytest.raises(CodecError, match="too large for fp16"):
        encode("fp16", torch.tensor([65_505.0]), bytearray(2))


@pytest.mark.parametrize("name", BLOCKS)
@given(values=tensors)
def test_blocks_err_by_half_a_scale_at_most(name: str, values: Tensor) -> None:
    length, levels = BLOCKS[name]
    decoded = round_trip(name, values)

    for block, back in zip(torch.split(values, length), torch.split(decoded, length), strict=True):
        scale = max(float(block.abs().max()) / levels if len(block) else 0.0, MIN_SCALE)
        errors = (block.double() - back.double()).abs().tolist()
        assert max(errors, default=0.0) <= scale * (0.5 + 2.0**-15)


def test_int4_lies_two_to_a_byte_behind_its_scale() -> None:
    values = torch.tensor([7.0, -7.0, 3.4])

    assert encoded("int4", values) == struct.pack("<f", 1.0) + bytes([8 + 7 | (8 - 7) << 4, 8 + 3 | 8 << 4])
    assert round_trip("int4", values).tolist() == [7.0, -7.0, 3.0]
    assert [encoded_bytes("int4", n) for n in (0, 1, 64, 65)] == [0, 5, 36, 41]


@codecs
@given(values=tensors)
def test_encoding_again_changes_nothing_more(name: str, values: Tensor) -> None:
    once = round_trip(name, values)

    assert encoded(name, values) == encoded(name, values)
    torch.testing.assert_close(round_trip(name, once), once, rtol=1e-6, atol=0)


@codecs
@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-45, 2.0**-126])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 255, 256, 257])
def test_zeros_and_denormals_pass(name: str, value: float, size: int) -> None:
    decoded = round_trip(name, torch.full((size,), value))

    assert decoded.shape == (size,)
    assert max(decoded.abs().tolist(), default=0.0) <= 2 * abs(value)


@all_codecs
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_what_is_not_finite_is_not_sent(name: str, value: float) -> None:
    values = torch.ones(300)
    values[299] = value

    with pytest.raises(CodecError, match="not finite"):
        encode(name, values, bytearray(2_000))


def test_what_is_not_finite_is_not_received() -> None:
    with pytest.raises(CodecError, match="not finite"):
        decode("fp32", struct.pack("<f", math.nan), 1)
    for name in ("bf16", "fp16"):
        with pytest.raises(CodecError, match="not finite"):
            decode(name, b"\x80\x7f", 1)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 0.0, 3e38])
@pytest.mark.parametrize("name", BLOCKS)
def test_an_impossible_scale_is_refused(name: str, scale: float) -> None:
    with pytest.raises(CodecError, match="scale"):
        decode(name, struct.pack("<fb", scale, 1), 1)


@codecs
def test_another_length_is_refused(name: str) -> None:
    size = encoded_bytes(name, 10)

    for wrong in (0, size - 1, size + 1):
        with pytest.raises(CodecError, match="10 elements"):
            decode(name, bytes(wrong), 10)
    with pytest.raises(CodecError, match="the buffer has"):
        encode(name, torch.ones(10), bytearray(size - 1))


@all_codecs
@given(data=st.binary(max_size=600), num_elements=st.integers(0, 300))
def test_any_bytes_decode_to_finite_numbers_or_are_refused(name: str, data: bytes, num_elements: int) -> None:
    try:
        values = decode(name, data, num_elements)
    except CodecError:
        return
    assert bool(values.isfinite().all())


@codecs
def test_slices_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5 * 256 + 7, generator=torch.Generator().manual_seed(0))
    whole = encoded(name, values)

    monkeypatch.setattr(codec, "_SLICE", 256)

    assert encoded(name, values) == whole
    assert torch.equal(decode(name, whole, len(values)), round_trip(name, values))


def test_buffers_may_be_larger_arrays_and_data_read_only() -> None:
    buffer = np.zeros(50, np.uint8)

    size = encode("bf16", torch.ones(3), buffer)

    assert decode("bf16", memoryview(buffer[:size].tobytes()), 3).tolist() == [1.0, 1.0, 1.0]
    assert not buffer[size:].any()


# topk

TOPK: dict[str, object] = {"codec": "topk", "topk": 40, "alpha": 0.0, "beta": 1.0, "gamma": 1.0}


def sent_by(form: TopK, values: Tensor, last: Tensor | None = None) -> Tensor:
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

    data = bytes(sent_by(TopK(3), values, last).tolist())

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
    data = sent_by(form, values, last)
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
    alice, bob = make_replica(ALICE, **TOPK), make_replica(BOB, **TOPK)
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
    assert float((alice.round_end.outer.slow - bob.round_end.outer.slow)[both].abs().max()) < scale, (
        "but for the codec's rounding"
    )
    for node, other, mine, theirs, share in (
        (alice, bob, by_alice, by_bob, 0.75),
        (bob, alice, by_bob, by_alice, 0.25),
    ):
        after, kept = node.round_end.outer.slow.clone(), mine & ~theirs
        torch.testing.assert_close(after[neither], own[node][neither], rtol=2.0**-22, atol=0)  # the mean's rounding
        torch.testing.assert_close(after[kept], own[node][kept], rtol=2.0**-22, atol=0)
        form.decode(data[other], received := own[node].clone())
        only = theirs & ~mine
        mean = share * own[node][only] + (1 - share) * received[only]
        torch.testing.assert_close(after[only], mean, rtol=1e-5, atol=1e-7)


def test_what_was_left_out_is_sent_some_rounds_later(make_replica: MakeReplica) -> None:
    """40 of 256 elements a round: after 7 rounds of nothing new all have had their turn, to half a scale."""
    alice, bob = make_replica(ALICE, **TOPK), make_replica(BOB, **TOPK)
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
