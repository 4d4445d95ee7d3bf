"""The benchmark of greedy members: one that does not follow through gains less, and honest members stay."""

from __future__ import annotations

import pytest
import typer

from farandole.testnet.bench.greedy import GreedyCrowd, numbers, play


def test_greedy_members_that_exchange_are_met_and_those_that_do_not_are_not() -> None:
    met, left = (play(GreedyCrowd(16, 3, do_follow_through), 10, seed=1) for do_follow_through in (True, False))
    assert 0 < met.in_all < 0.5
    assert met.alone < left.alone
    assert met.honest_pairs > 0.5


@pytest.mark.parametrize("text", ["", "16,", "-1", "some", "0"])
def test_sizes_that_are_none_are_refused_with_the_option(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="--members takes whole numbers"):
        numbers(text, "--members")
