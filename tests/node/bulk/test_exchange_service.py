"""Exchanges between two nodes"""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
import trio
import trio.testing
from blake3 import blake3
from trio.testing import MockClock

from farandole.node.base.bandwidth import Shaper, Shaping
from farandole.node.base.figures import BYTES_PER_MBIT, size
from farandole.node.bulk import negotiation
from farandole.node.bulk.exchange_service import (
    CLAIM_TIMEOUT,
    EXCHANGE_PROTOCOL,
    FAREWELL_TIMEOUT,
    MAX_UNCLAIMED,
    MAX_UNCLAIMED_PER_PEER,
    too_slow,
)
from farandole.protocol.exchange.exchange import ASK_FROM, DATA_UNTIL
from farandole.protocol.exchange.pipe import BULK_FROM, CHUNK_BYTES
from farandole.protocol.run.rules import Codec, encoded_bytes
from farandole.training.outer.codec import CODECS, decode, encode
from farandole.training.outer.rule import Meeting
from farandole.training.screening.rule import share_by_tokens

from ..hosts import connected_pair, hang, relayed_pair
from ..parties import ALICE, BOB, PATIENCE, SESSION, SIZE, MemoryHost, Party, assert_committed, meet, real_parties


async def test_a_contribution_that_does_not_fit_into_its_time_says_so_with_figures(
    alice: Party, bob: Party, clock: MockClock
) -> None:
    """Both ends report figures: the one with the slow line, and the one that waits for it."""
    up = Shaper(SIZE / PATIENCE / 2, trio.current_time)
    alice.service._shaping = Shaping(up, Shaper())
    await meet(alice, bob)
    for party, way in ((alice, "up"), (bob, "down")):
        assert not party.result.committed
        assert party.result.is_broken
        rate = re.fullmatch(rf"{size(SIZE)} did not fit into .* s at (.*) Mbit/s {way}", party.result.reason)
        assert rate is not None, party.result.reason
        assert float(rate[1]) == pytest.approx(up.rate / BYTES_PER_MBIT, rel=0.2)
    assert 0 < alice.result.bytes_sent < SIZE
    assert too_slow(SIZE, 2.0, SIZE, 0) == f"nothing of the partner's {size(SIZE)} arrived in 2.0 s", "not slow"


async def test_a_verdict_overtakes_a_contribution_that_waits_for_its_cap(
    alice: Party, bob: Party, clock: MockClock
) -> None:
    up = Shaper(SIZE / 5, trio.current_time)
    up.charge(2 * SIZE)
    alice.service._shaping = Shaping(up, Shaper())
    alice.refuses = "not this one"
    await meet(alice, bob)
    assert bob.result.reason == "the partner aborted: refused: not this one"
    assert not bob.result.is_broken
    assert up.reserve(0) > 0  # the contribution would still have to wait


@pytest.mark.parametrize("refuser", [ALICE, BOB])
async def test_what_one_refuses_neither_uses(alice: Party, bob: Party, refuser: bytes, clock: MockClock) -> None:
    refusing, other = (alice, bob) if refuser == ALICE else (bob, alice)
    refusing.refuses = "not finite"
    await meet(alice, bob)
    assert not alice.result.committed
    assert not bob.result.committed
    assert refusing.result.reason == "refused: not finite"
    assert other.result.reason == "the partner aborted: refused: not finite"
    assert not refusing.result.is_broken
    assert not other.result.is_broken
    assert trio.current_time() < 1


@pytest.mark.parametrize("offer_within", [math.inf, 2.0])
async def test_a_partner_that_never_comes_costs_a_share_of_the_deadline_or_less(
    bob: Party, offer_within: float, clock: MockClock
) -> None:
    await bob.exchange(ALICE, offer_within=offer_within)
    assert bob.result.reason == "the partner opened no stream in time"
    assert bob.result.is_broken
    assert trio.current_time() == pytest.approx(min(DATA_UNTIL * PATIENCE, offer_within))


async def test_a_partner_that_sends_no_offer_costs_as_little(alice: Party, bob: Party, clock: MockClock) -> None:
    bob.host.set_handler(EXCHANGE_PROTOCOL, hang)
    await alice.exchange(BOB, offer_within=2.0)
    assert alice.result.reason == "the partner did not begin in time"
    assert alice.result.is_broken
    assert trio.current_time() == pytest.approx(2.0, abs=FAREWELL_TIMEOUT)


async def test_a_partner_that_is_gone_is_known_at_once(alice: Party, clock: MockClock) -> None:
    await alice.exchange(BOB)
    assert alice.result.reason == "nobody there"
    assert alice.result.is_broken
    assert trio.current_time() < 1


async def test_a_stream_that_comes_before_its_session_is_expected_waits_for_it(
    alice: Party, bob: Party, clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.exchange, BOB)
        await trio.sleep(CLAIM_TIMEOUT / 2)
        nursery.start_soon(bob.exchange, ALICE)
    assert_committed(alice, bob)


async def test_streams_that_nobody_expects_are_few_and_short(bob: Party, clock: MockClock) -> None:
    streams = []
    for i in range(MAX_UNCLAIMED + 5):
        mallory = MemoryHost(bytes([i]) * 32, bob.host.nursery, bob.host.network)
        streams.append(await mallory.open_stream(BOB, EXCHANGE_PROTOCOL))
    await trio.testing.wait_all_tasks_blocked()
    for stream in streams[MAX_UNCLAIMED:]:
        assert await stream.receive_some(1) == b""
    assert trio.current_time() == 0
    for stream in streams[:MAX_UNCLAIMED]:
        assert await stream.receive_some(1) == b""
    assert trio.current_time() == pytest.approx(CLAIM_TIMEOUT)


async def test_a_peer_that_opens_many_streams_keeps_no_partner_away(alice: Party, bob: Party, clock: MockClock) -> None:
    mallory = MemoryHost(b"m" * 32, bob.host.nursery, bob.host.network)
    streams = [await mallory.open_stream(BOB, EXCHANGE_PROTOCOL) for _ in range(MAX_UNCLAIMED)]
    await trio.testing.wait_all_tasks_blocked()
    for stream in streams[MAX_UNCLAIMED_PER_PEER:]:
        assert await stream.receive_some(1) == b""
    await meet(alice, bob)
    assert_committed(alice, bob)


async def test_a_cancelled_exchange_ends_at_once_and_is_aborted(alice: Party, bob: Party, clock: MockClock) -> None:
    bob.host.faults.freeze_at = CHUNK_BYTES
    with trio.move_on_after(3):
        await alice.exchange(BOB)
    assert not alice.results
    assert alice.service._outcomes.answer(SESSION, BOB) == "aborted"


async def test_a_slow_screening_costs_no_exchange(
    alice: Party, bob: Party, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleepy(size: int, tokens: int) -> str | None:
        await trio.sleep_forever()
        return None

    monkeypatch.setattr(bob, "refusal", sleepy)
    await meet(alice, bob)
    assert_committed(alice, bob)
    assert trio.current_time() <= ASK_FROM * PATIENCE


async def test_the_shorter_deadline_holds_for_both(alice: Party, bob: Party, clock: MockClock) -> None:
    bob.host.faults.freeze_at = CHUNK_BYTES
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.exchange, BOB, 100.0)
        nursery.start_soon(bob.exchange, ALICE, 10.0)
    assert not alice.result.committed
    assert trio.current_time() <= 10.0


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
