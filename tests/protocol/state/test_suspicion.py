"""Which suspicions count, and how many are needed."""

from __future__ import annotations

import pytest

from farandole.protocol.state.entries import MAX_SUSPECTS, Suspects
from farandole.protocol.state.suspicion import MAX_ACCUSERS, MIN_ACCUSERS, OwnSuspects, is_suspected

from ..authors import author_of

ALICE, BOB = author_of(1), author_of(2)


def lists(*names: bytes) -> list[Suspects]:
    return [Suspects((name[:8],)) for name in names]


def test_a_peer_is_on_the_list_until_it_is_found_good_again() -> None:
    own = OwnSuspects()
    assert own.note(ALICE, is_suspect=True)
    assert not own.note(ALICE, is_suspect=True), "there is nothing new to publish"
    assert own.entry == Suspects((ALICE[:8],))
    assert own.note(ALICE, is_suspect=False)
    assert own.entry == Suspects(())
    assert not own.note(BOB, is_suspect=False)


def test_the_list_is_bounded_and_keeps_the_latest() -> None:
    own = OwnSuspects()
    for number in range(MAX_SUSPECTS + 10):
        own.note(author_of(number + 1), is_suspect=True)
    assert len(own.entry.peers) == MAX_SUSPECTS
    assert author_of(MAX_SUSPECTS + 10)[:8] in own.entry.peers
    assert ALICE[:8] not in own.entry.peers


@pytest.mark.parametrize(("num_believed", "enough"), [(0, 3), (3, 3), (9, 3), (10, 4), (14, 5), (18, 6), (250, 6)])
def test_how_many_accusers_are_enough(num_believed: int, enough: int) -> None:
    assert MIN_ACCUSERS <= enough <= MAX_ACCUSERS
    assert is_suspected(ALICE, lists(*(ALICE,) * enough), num_believed)
    assert not is_suspected(ALICE, lists(*(ALICE,) * (enough - 1), BOB), num_believed)


@pytest.mark.parametrize("members", range(4, 19))
def test_a_quarter_of_liars_among_few_is_not_enough(members: int) -> None:
    """Beyond 18 members a quarter of them is more than six: then a node's own evidence alone protects the honest."""
    liars = members // 4
    assert not is_suspected(ALICE, lists(*(ALICE,) * liars), members - 2)
