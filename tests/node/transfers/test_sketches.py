"""A member's sketch of its weights reaches a newcomer, between real hosts; peers' questions are bounded."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from farandole.node.base.errors import PeerUnreachableError
from farandole.node.transfers import sketches as sketching
from farandole.node.transfers.giver import Holding
from farandole.node.transfers.sketches import PEER_BURST, REST, SketchService, ask_for_sketch
from farandole.protocol.checkpoints.sketches import SKETCH_PROTOCOL, SketchQuestion, encode_answer, values_of
from farandole.protocol.wire.framing import frame
from farandole.protocol.wire.safetensors import encode_header

from ...patience import PATIENCE
from ..hosts import host_at_loopback
from .files import RUN, ToDonor, hold

WEIGHTS = np.random.default_rng(1).standard_normal(600_000, np.float32)
CONTENT = encode_header({}, [("slow/w", WEIGHTS.shape), ("momentum/w", WEIGHTS.shape)]) + 2 * WEIGHTS.tobytes()
SEED = b"s" * 32
QUESTION = SketchQuestion(RUN, 0, SEED)


def finding(holding: Holding) -> Callable[[int], Awaitable[Holding | None]]:
    """Return a member's lookup with one checkpoint, of stage 0."""

    async def find_own(stage: int) -> Holding | None:
        await trio.lowlevel.checkpoint()
        return holding if stage == 0 else None

    return find_own


async def test_a_members_sketch_is_that_of_its_file(tmp_path: Path) -> None:
    holding = hold(tmp_path / "theirs", CONTENT)
    async with host_at_loopback() as newcomer, host_at_loopback() as member:
        SketchService(member, RUN, finding(holding))
        newcomer.dialler.add_addresses(member.author, member.addresses)
        with trio.fail_after(PATIENCE):
            sketch = await ask_for_sketch(newcomer, member.author, QUESTION)
            assert sketch == values_of(await sketching.sketch_file(holding, SEED))
            assert await ask_for_sketch(newcomer, member.author, SketchQuestion(RUN, 0, b"t" * 32)) != sketch
            assert await ask_for_sketch(newcomer, member.author, SketchQuestion(RUN, 1, SEED)) is None
            assert await ask_for_sketch(newcomer, member.author, SketchQuestion(b"x" * 32, 0, SEED)) is None


@pytest.mark.parametrize("lie", [b"", b"\xc1", encode_answer(b"short"), encode_answer(b"\xff" * 1_024), b"x" * 2_000])
async def test_what_is_no_sketch_is_the_members_fault(lie: bytes) -> None:
    async with host_at_loopback() as newcomer, host_at_loopback() as liar:

        async def answer(stream: Any) -> None:
            await stream.receive_some()
            await stream.send_all(frame(lie, 10_000))

        liar.set_handler(SKETCH_PROTOCOL, answer)
        newcomer.dialler.add_addresses(liar.author, liar.addresses)
        with trio.fail_after(PATIENCE), pytest.raises(PeerUnreachableError):
            await ask_for_sketch(newcomer, liar.author, QUESTION)


# Sketches that a member computes for others


class Donor:
    """A member whose sketches take ten seconds each."""

    def __init__(self, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, holding: Holding) -> None:
        self.made: list[tuple[bytes, float]] = []
        """Seed of each sketch, and the time when it began."""
        self.at_once = self.most_at_once = 0
        self.service = SketchService(ToDonor(nursery, self.serve), RUN, finding(holding))
        monkeypatch.setattr(sketching, "sketch_file", self.sketch)
        self._nursery = nursery

    async def serve(self, stream: Any) -> None:
        await self.service.serve(stream)

    async def sketch(self, file: object, seed: bytes) -> bytes:
        self.made.append((seed, trio.current_time()))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await trio.sleep(10.0)
        self.at_once -= 1
        return b"\0" * 1_024

    async def answers(self, peer: bytes, seed: bytes) -> bool:
        host: Any = ToDonor(self._nursery, self.serve)
        return await ask_for_sketch(host, peer, SketchQuestion(RUN, 0, seed)) is not None


@pytest.fixture
def donor(tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Donor:
    return Donor(nursery, monkeypatch, hold(tmp_path / "theirs", CONTENT))


async def test_one_is_made_at_a_time_with_a_rest_after_each(
    nursery: trio.Nursery, donor: Donor, clock: MockClock
) -> None:
    answered: list[bool] = []

    async def ask(number: int) -> None:
        answered.append(await donor.answers(bytes([number]) * 32, bytes([number]) * 32))

    async with trio.open_nursery() as newcomers:
        for number in range(100):
            newcomers.start_soon(ask, number)
    assert donor.most_at_once == 1
    began_at = [at for _, at in donor.made]
    assert [later - earlier for earlier, later in itertools.pairwise(began_at)] == [10 * (1 + REST)]
    assert answered.count(True) == len(donor.made) == 2
    nursery.cancel_scope.cancel()


async def test_one_peer_gets_so_many_and_others_get_theirs(
    nursery: trio.Nursery, donor: Donor, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketching, "REST", 0.0)
    num_answered = 0
    while await donor.answers(b"p" * 32, bytes([num_answered]) * 32):
        num_answered += 1
    assert PEER_BURST <= num_answered < 2 * PEER_BURST
    assert await donor.answers(b"q" * 32, SEED)
    nursery.cancel_scope.cancel()
