import torch

from farandole.protocol.run.outer_rules import CO2Config
from farandole.training.outer.rule import Meeting, OwnVectors, rule_of


def test_a_late_movement_enters_the_momentum_divided_by_the_gap() -> None:
    """The steps of the authors' code, number by number: its momentum has the other sign."""
    rule = rule_of(CO2Config(learning_rate=0.8, alpha=0.6, gap_penalty=4.0))
    start, *fast = torch.randn(9, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = OwnVectors(start.clone(), start.clone(), {"momentum": torch.zeros_like(start)})
    old, momentum = start.tolist(), [0.0] * 20

    for is_late, one, other in zip((False, True, True, False), fast[::2], fast[1::2], strict=True):
        gap = 4.0 if is_late else 1.0
        for i in range(20):
            mean = 0.75 * float(one[i]) + 0.25 * float(other[i])
            momentum[i] = 0.6 * momentum[i] - mean / gap + old[i] / gap
            old[i] -= 0.8 * momentum[i]

        rule.step(own, Meeting([one, other], [0.75, 0.25], is_late=is_late))

        torch.testing.assert_close(own.slow.tolist(), old, rtol=0, atol=1e-13)


def test_a_learning_rate_that_drives_pairs_apart_is_a_problem() -> None:
    assert CO2Config(learning_rate=1.4, alpha=0.5).problems == []
    assert "stable only for 0 < learning_rate < 2" in CO2Config(learning_rate=1.5, alpha=0.5).problems[0]
