"""The average of two nodes' weights, over real hosts, streams and channels, equals the mean in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from farandole.protocol.exchange.pipe import BULK_FROM
from farandole.protocol.run.outer_rules import Codec
from farandole.training.base.parameters import flatten_, layout_of
from farandole.training.outer.codec import CODECS, decode, encode, encoded_size
from farandole.training.outer.rule import weighted_mean
from farandole.training.screening.rule import share_by_tokens

from ..real_nodes import TOKENS, open_nodes, swap

Float64s = npt.NDArray[np.float64]


def bound(codec: str, values: Tensor) -> Float64s:
    """Return the largest error of each decoded value, as `farandole.training.outer.codec` states it; (n,)."""
    x = values.double().abs().numpy()
    if codec == "fp32":
        return np.zeros_like(x)
    if codec in ("bf16", "fp16"):
        return np.maximum(x * 2.0 ** (-8 if codec == "bf16" else -11), 2.0**-25)
    length, levels = (256, 127) if codec == "int8" else (64, 7)
    blocks = np.pad(x, (0, -len(x) % length)).reshape(-1, length)
    scales = np.maximum(blocks.max(axis=1) / levels, 2.0**-126) * (1 + 2.0**-20)
    return np.repeat(scales * (0.5 + 2.0**-15), length)[: len(x)]


def exact_mean(codec: str, values: list[Tensor]) -> tuple[Float64s, Float64s]:
    """Return the mean of two contributions by their tokens, in float64, and the allowed error of two nodes."""
    first, second = (share / sum(TOKENS) for share in TOKENS)
    exact = first * values[0].double().numpy() + second * values[1].double().numpy()
    allowed = first * bound(codec, values[0]) + second * bound(codec, values[1])
    largest = np.maximum(*(value.double().abs().numpy() for value in values))
    return exact, allowed + 2.0**-22 * largest  # the mean itself is computed in fp32


def num_elements_around(codec: str, size: int) -> Iterator[int]:
    """Yield the most elements that take less than ``size`` bytes, and the fewest that take at least that."""
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if encoded_size(codec, middle) < size else (low, middle)
    yield from (low, high)


@pytest.mark.parametrize("codec", CODECS)
async def test_means_are_exact_to_the_codecs_error_over_every_path(codec: Codec) -> None:
    around = list(num_elements_around(codec, BULK_FROM))
    async with open_nodes() as nodes:
        for num_elements in (1, 2, 63, 257, 7_919, *around, around[-1] + 7_907):
            generator = torch.Generator().manual_seed(num_elements)
            values = [torch.randn(num_elements, generator=generator) * scale for scale in (1.0, 1e-3)]
            for node, own in zip(nodes, values, strict=True):
                node.outgoing = bytearray(encoded_size(codec, num_elements))
                encode(codec, own, node.outgoing)
            exact, allowed = exact_mean(codec, values)
            for path in ("bulk", "stream"):
                await swap(nodes, codec, path)
                first, second = nodes
                means = [  # each from its sent and received contribution
                    weighted_mean(
                        [
                            decode(codec, node.outgoing if node is first else node.incoming, num_elements),
                            decode(codec, node.incoming if node is first else node.outgoing, num_elements),
                        ],
                        (share_by_tokens(*TOKENS[::-1]), share_by_tokens(*TOKENS)),
                    )
                    for node in (first, second)
                ]
                assert torch.equal(*means), "bit for bit"
                assert (np.abs(means[0].double().numpy() - exact) <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parameters_of_odd_shapes_and_types_come_back_in_their_places(dtype: torch.dtype) -> None:
    module = nn.Module()
    for name, shape in {"scalar": (), "empty": (0, 3), "row": (1, 7), "vector": (257,)}.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    module.register_parameter("other", nn.Parameter(torch.randn(5).to(dtype)))
    before = {name: parameter.detach().float() for name, parameter in module.named_parameters()}
    layout = layout_of(module, "fp32")
    weights, _ = flatten_(module, layout)
    encoded = bytearray(encoded_size("fp32", layout.num_elements))
    encode("fp32", weights, encoded)
    received = layout.views(decode("fp32", encoded, layout.num_elements))
    for name, parameter in module.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, before[name])
        assert torch.equal(received[name], before[name])
