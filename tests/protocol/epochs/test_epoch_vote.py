from __future__ import annotations

import pytest

from farandole.protocol.epochs.lease_claims import EpochVote, Standing

HONEST = [bytes([number]) * 32 for number in range(1, 5)]
GHOSTS = [bytes([number]) * 32 for number in range(100, 160)]
NUM_EPOCHS = 9


def decide(vote: EpochVote, own: int, said: dict[bytes, int], proven: list[bytes]) -> int:
    return vote.decide(own, said, Standing(frozenset(said), frozenset(proven)), NUM_EPOCHS)


def at(epoch: int, authors: list[bytes]) -> dict[bytes, int]:
    return dict.fromkeys(authors, epoch)


@pytest.mark.parametrize("lie", [5, NUM_EPOCHS, 2**31 - 1])
def test_ghosts_move_nobody_that_has_trained(lie: int) -> None:
    vote = EpochVote()
    vote.is_new = False
    said = at(1, HONEST) | at(lie, GHOSTS)
    assert decide(vote, 1, said, []) == 1
    assert decide(vote, 1, said, HONEST) == 1


def test_most_of_those_who_were_met_are_followed_and_never_back() -> None:
    vote = EpochVote()
    vote.is_new = False
    said = at(3, HONEST[:3]) | at(2**31 - 1, HONEST[3:])
    assert decide(vote, 1, said, HONEST) == 3
    assert decide(vote, 5, said, HONEST) == 5


def test_a_newcomer_begins_where_the_run_seems_to_be_and_is_corrected() -> None:
    vote = EpochVote()
    said = at(2, HONEST) | at(7, GHOSTS)
    assert decide(vote, 0, said, []) == 7
    vote.is_new = False  # it has begun to train in that epoch
    assert decide(vote, 7, said, HONEST[:2]) == 7
    assert decide(vote, 7, said, HONEST) == 2
    assert decide(vote, 3, said, HONEST) == 3


def test_one_honest_member_keeps_ghosts_from_ending_a_newcomers_run() -> None:
    said = at(2, HONEST[:1]) | at(NUM_EPOCHS, GHOSTS)
    assert decide(EpochVote(), 0, said, []) == NUM_EPOCHS - 1
    assert decide(EpochVote(), 0, at(NUM_EPOCHS, HONEST), []) == NUM_EPOCHS, "the run is over"


def test_alone_a_node_stays_where_it_is() -> None:
    assert decide(EpochVote(), 4, {}, HONEST) == 4
