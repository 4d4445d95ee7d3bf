import pytest
import torch
from torch import Tensor

from farandole.protocol.run.screening_rules import ScreeningConfig, SimilarityConfig
from farandole.training.screening.history import History
from farandole.training.screening.rule import Accept, Encounter, Partner, Refuse, Verdict, rule_of

SIMILARITY = SimilarityConfig()
OWN = torch.randn(1_000, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(1_000, generator=torch.Generator().manual_seed(1))


def no_loss(share: float) -> None:
    return None


def judged(contribution: Tensor, settings: ScreeningConfig = SIMILARITY) -> Verdict:
    rule = rule_of(settings)
    for piece in (slice(0, 300), slice(300, 1_000)):
        rule.feed(OWN[piece], contribution[piece])
    encounter = Encounter(b"p" * 32, own_tokens=300, partner_tokens=100)
    told = (lambda: 1.0, lambda: 0.0, no_loss, lambda: None, lambda: None)
    return rule.judge(Partner(encounter, OWN, contribution, History(), History(), 0, *told))


def reason(verdict: Verdict) -> str:
    assert isinstance(verdict, Refuse)
    return verdict.reason


@pytest.mark.parametrize("contribution", [OWN, 1.5 * OWN, OWN + 0.5 * NOISE])
def test_a_replica_of_the_same_run_is_accepted_with_its_share_of_the_tokens(contribution: Tensor) -> None:
    assert judged(contribution) == Accept(weight=0.25)


@pytest.mark.parametrize("contribution", [100 * OWN, 0.01 * OWN, 0 * OWN, 1e30 * OWN, OWN * torch.nan])
def test_another_size_is_refused(contribution: Tensor) -> None:
    assert "norm" in reason(judged(contribution))


@pytest.mark.parametrize("contribution", [-OWN, NOISE])
def test_another_direction_is_refused(contribution: Tensor) -> None:
    assert "cosine" in reason(judged(contribution))


def test_limits_are_the_manifests() -> None:
    assert judged(3 * OWN) == Accept(weight=0.25)
    assert "norm" in reason(judged(3 * OWN, SimilarityConfig(max_norm_ratio=2.0)))
    assert "cosine" in reason(judged(OWN + 0.5 * NOISE, SimilarityConfig(min_cosine=0.99)))
