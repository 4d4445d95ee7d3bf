import torch

from farandole.protocol.run.rules import NoLoCoConfig, PlainConfig, required_bytes
from farandole.training.outer.rule import Meeting, OwnVectors, rule_of


def test_it_is_the_mean_and_noloco_without_momentum_to_the_bit() -> None:
    slow, *fast = torch.randn(3, 1_000, generator=torch.Generator().manual_seed(0))
    plain = OwnVectors(fast[0], slow.clone(), {})
    noloco = OwnVectors(fast[0], slow.clone(), {"momentum": torch.randn(1_000)})

    rule_of(PlainConfig()).step(plain, Meeting(fast, [0.5, 0.5]))
    rule_of(NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0)).step(noloco, Meeting(fast, [0.5, 0.5]))

    assert torch.equal(plain.slow, (fast[0] + fast[1]) / 2)
    assert torch.equal(plain.slow, noloco.slow)


def test_a_newcomer_downloads_half_of_what_a_rule_with_momentum_needs() -> None:
    with_momentum = NoLoCoConfig(alpha=0.0, beta=1.0, gamma=1.0)  # has the vector with any settings

    assert required_bytes(PlainConfig(), 1_000) == required_bytes(with_momentum, 1_000) / 2 == 4_000
