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
from farandole.training.outer.codec import CODECS, MAX_FP16, MAX_MAGNITUDE, MIN_SCALE, decode, encode

BLOCKS = {"int8": (256, 127), "int4": (64, 7)}
codecs = pytest.mark.parametrize("name", CODECS)
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


@codecs
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


@codecs
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
