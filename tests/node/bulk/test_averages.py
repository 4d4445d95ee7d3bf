"""The average of two nodes' weights, over real hosts, streams and channels, equals the mean in float64."""

from __future__ import annotations

import random

import pytest
import torch
from blake3 import blake3

from farandole.node.bulk import negotiation
from farandole.protocol.exchange.pipe import BULK_FROM
from farandole.protocol.run.rules import Codec, encoded_bytes
from farandole.training.outer.codec import CODECS, decode, encode
from farandole.training.outer.rule import Meeting
from farandole.training.screening.rule import share_by_tokens

from ..hosts import connected_pair, relayed_pair
from ..parties import Party, assert_committed, meet, real_parties

# Tokens behind the two contributions: the shares are 0.25 and 0.75.
TOKENS = (300, 900)


async def swap(nodes: tuple[Party, Party], contributions: list[bytearray], codec: Codec, path: str) -> None:
    """Exchange the contributions over this path."""
    session = blake3(b"".join(contributions) + path.encode()).digest()[:16]
    channels = [node.service.channels for node in nodes]
    for node, contribution, tokens in zip(nodes, contributions, TOKENS, strict=True):
        node.hold(bytes(contribution), codec=codec, session=session, tokens=tokens)
        if path == "stream":
            node.service.channels = None
    await meet(*nodes)
    assert_committed(*nodes)
    for node, tokens, channel in zip(nodes, TOKENS[::-1], channels, strict=True):
        node.service.channels = channel
        assert (node.result.reason, node.result.partner_tokens) == ("", tokens)
        assert node.result.path == (path if len(node.incoming) >= BULK_FROM else "stream")


@pytest.mark.parametrize("codec", CODECS)
async def test_both_nodes_have_the_same_mean_over_every_path(codec: Codec) -> None:
    """A codec's own error is bounded in its tests; an exchange adds none."""
    async with connected_pair() as hosts, real_parties(*hosts) as nodes:
        for num_elements in (1, 63, 257, 7_919, BULK_FROM // 4, 2 * BULK_FROM):
            generator = torch.Generator().manual_seed(num_elements)
            contributions = [bytearray(encoded_bytes(codec, num_elements)) for _ in nodes]
            for contribution, scale in zip(contributions, (1.0, 1e-3), strict=True):
                encode(codec, torch.randn(num_elements, generator=generator) * scale, contribution)
            sent = [decode(codec, contribution, num_elements) for contribution in contributions]
            exact = sum(share / sum(TOKENS) * each.double() for share, each in zip(TOKENS, sent, strict=True))
            for path in ("bulk", "stream"):
                await swap(nodes, contributions, codec, path)
                received = [decode(codec, node.incoming, num_elements) for node in nodes]
                shares = share_by_tokens(*TOKENS[::-1]), share_by_tokens(*TOKENS)
                means = [Meeting(each, shares).mean() for each in ([sent[0], received[0]], [received[1], sent[1]])]
                assert torch.equal(*means), "bit for bit"
                assert torch.allclose(means[0].double(), torch.as_tensor(exact), rtol=0.0, atol=2.0**-20)


async def test_an_exchange_is_committed_over_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "OPEN_TIMEOUT", 0.5)  # there is no channel to wait for
    async with relayed_pair() as (_, alice, bob), real_parties(alice, bob) as nodes:
        for seed, node in enumerate(nodes):
            node.hold(random.Random(seed).randbytes(BULK_FROM + 1))
        await meet(*nodes)
        assert_committed(*nodes)
        assert nodes[0].result.path == "stream"
