import pytest
import torch

from farandole.training.errors import ScreeningError
from farandole.training.screening import screen, sums

OWN = torch.randn(1_000, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(1_000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("partner", [OWN, 1.5 * OWN, OWN + 0.5 * NOISE])
def test_a_replica_of_the_same_run_passes(partner: torch.Tensor) -> None:
    screen(sums(OWN, partner))


@pytest.mark.parametrize("partner", [100 * OWN, 0.01 * OWN, 0 * OWN, 1e30 * OWN, OWN * torch.nan])
def test_another_size_is_refused(partner: torch.Tensor) -> None:
    with pytest.raises(ScreeningError, match="norm"):
        screen(sums(OWN, partner))


@pytest.mark.parametrize("partner", [-OWN, NOISE])
def test_another_direction_is_refused(partner: torch.Tensor) -> None:
    with pytest.raises(ScreeningError, match="cosine"):
        screen(sums(OWN, partner))
