"""SparseLoCo, with what it sends: the rule alone does not choose that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.testnet.methods.sparseloco import SparseLoCo, SparseLoCoConfig, few_of
from farandole.training.outer.rule import Meeting, OwnVectors

BLOCKS, BLOCK = 2, 256
SETTINGS = SparseLoCoConfig(learning_rate=0.9, beta=0.8)


class Replica:
    """The outer state of one replica, whose fast weights are its slow ones and a round's progress."""

    def __init__(self, start: Tensor) -> None:
        self.slow, self.rule, self.residual = start.clone(), SparseLoCo(SETTINGS), torch.zeros_like(start)

    def contribute_after(self, progress: Tensor) -> None:
        self.own = OwnVectors(self.slow + progress, self.slow, {"residual": self.residual})
        self.sent = few_of(self.rule.contribution(self.own), self.slow)

    def step_with(self, senders: Sequence[Replica]) -> None:
        received = [torch.where(each.sent.isnan(), self.slow, each.sent) for each in senders]
        own_place = senders.index(self)
        self.rule.step(self.own, Meeting(received, [1 / len(received)] * len(received), own_place))


def largest(block: list[float], k: int) -> list[int]:
    return sorted(range(len(block)), key=lambda place: -abs(block[place]))[:k]


def sent_of(unsent: Tensor, phi: Tensor, k: int) -> Tensor:
    """Q(Top-k(e)): the quantizer sees the weights that e leads to, 127 levels for the largest one sent of a block."""
    sent = torch.zeros_like(unsent)
    for start in range(0, len(unsent), BLOCK):
        places = [start + place for place in largest(unsent[start : start + BLOCK].tolist(), k)]
        scale = float((phi + unsent)[places].abs().max()) / 127
        sent[places] = ((phi + unsent)[places] / scale).round() * scale - phi[places]
    return sent


def test_with_shared_slow_weights_it_is_the_papers_algorithm() -> None:
    """Four replicas that all meet: the formulas with error feedback, by each replica's own memory."""
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(BLOCKS * BLOCK, generator=generator)
    replicas = [Replica(phi) for _ in range(4)]
    unsent = torch.zeros(4, len(phi), dtype=torch.float64)
    phi = phi.double()

    for _ in range(6):
        progress = 0.1 * torch.randn(4, len(phi), generator=generator)
        unsent = 0.8 * unsent + progress.double()
        sent = torch.stack([sent_of(each, phi, 8) for each in unsent])
        unsent -= sent
        phi = phi + 0.9 * sent.mean(0)

        for replica, each in zip(replicas, progress, strict=True):
            replica.contribute_after(each)
        for replica in replicas:
            replica.step_with(replicas)

        for replica, each in zip(replicas, unsent, strict=True):
            torch.testing.assert_close(replica.slow.double(), phi, rtol=0, atol=1e-5)
            torch.testing.assert_close(replica.residual.double(), each, rtol=0, atol=1e-5)


def test_pairs_pull_their_slow_weights_together_where_they_send() -> None:
    generator = torch.Generator().manual_seed(1)
    replicas = [Replica(start) for start in torch.randn(8, BLOCK, generator=generator)]

    def spread() -> float:
        return float(torch.stack([replica.slow for replica in replicas]).std(0).mean())

    before = spread()
    for _ in range(300):
        order = torch.randperm(8, generator=generator).tolist()
        for first, second in zip(order[::2], order[1::2], strict=True):
            pair = [replicas[first], replicas[second]]
            for each in pair:
                each.contribute_after(0.01 * torch.randn(BLOCK, generator=generator))
            for each in pair:
                each.step_with(pair)

    assert spread() < 0.2 * before  # differences alone would leave all of it


def test_a_replica_that_is_alone_keeps_nothing_back() -> None:
    replica = Replica(torch.randn(BLOCK, generator=torch.Generator().manual_seed(2)))
    start = replica.slow.clone()
    progress = torch.full((BLOCK,), 0.1)
    replica.contribute_after(progress)

    replica.rule.step(replica.own, Meeting([replica.rule.contribution(replica.own)], [1.0]))

    torch.testing.assert_close(replica.slow, start + 0.9 * progress)
    assert not bool(replica.residual.any())
