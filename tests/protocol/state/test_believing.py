"""Partners are believed before others, and a peer with false claims is not believed."""

from __future__ import annotations

import pytest

from farandole.protocol.state import believing
from farandole.protocol.state.entries import MAX_SUSPECTS, PARTNER_BYTES, Suspects
from farandole.protocol.state.state import MAX_AHEAD

from ..authors import author_of

PEERS = [number.to_bytes(32, "big") for number in range(believing.MAX_DOUBTED + 1)]
ANN, BOB = PEERS[:2]


def test_the_latest_partners_are_remembered_and_outlive_the_process() -> None:
    partners = believing.Partners()
    for peer in PEERS[: believing.MAX_PARTNERS]:
        partners.note(peer)
    partners.note(ANN)
    partners.note(PEERS[believing.MAX_PARTNERS])
    assert ANN in partners
    assert BOB not in partners, "that was the longest ago"
    again = believing.Partners()
    again.restore(b"".join(partners) + b"torn")
    assert list(again) == list(partners)
    assert len(again) == believing.MAX_PARTNERS


def test_a_vain_claim_costs_its_claimant_its_credit_for_longer_each_time_within_a_bounded_memory() -> None:
    credit, now = believing.Credit(), 0.0
    for number in range(12):
        credit.lose([ANN], now)
        credit.lose([ANN], now + 1.0)  # the same claim again
        doubt = min(believing.FIRST_DOUBT * 2**number, believing.MAX_DOUBT)
        assert not credit.is_good(ANN, now + doubt - 1.0)
        assert credit.is_good(BOB, now)
        now += doubt
        assert credit.is_good(ANN, now)
    credit = believing.Credit()
    credit.lose(PEERS, 0.0)
    assert credit.is_good(ANN, 1.0)
    assert not credit.is_good(PEERS[-1], 1.0)


MET = [bytes([number]) * 32 for number in range(1, 9)]
STRANGER, GHOST = b"s" * 32, b"g" * 32


def partners(of: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the partners of the live members; members not named in ``of`` have averaged with no peer."""
    return {author: of.get(author, b"")[:PARTNER_BYTES] for author in (*MET, STRANGER, GHOST)}


def test_who_was_met_is_proven_and_a_key_is_not() -> None:
    assert believing.Acquaintance().proven(frozenset(MET), partners({})) == frozenset(MET)


def test_several_whom_this_node_has_met_vouch_for_a_stranger_one_round_after_the_other() -> None:
    acquaintance = believing.Acquaintance()
    for number, voucher in enumerate(MET[: believing.NUM_VOUCHERS], 1):
        proven = acquaintance.proven(frozenset(MET), partners({voucher: STRANGER}))
        assert (STRANGER in proven) == (number == believing.NUM_VOUCHERS)
    assert GHOST not in proven


def test_liars_prove_nobody_by_saying_it_often_or_without_having_been_met() -> None:
    acquaintance = believing.Acquaintance()
    liars = dict.fromkeys((*MET[: believing.NUM_VOUCHERS - 1], STRANGER), GHOST) | {GHOST: STRANGER}
    for _ in range(100):
        proven = acquaintance.proven(frozenset(MET), partners(liars))
    assert proven == frozenset(MET)


def test_who_is_away_has_to_be_vouched_for_again() -> None:
    acquaintance = believing.Acquaintance()
    vouching = partners(dict.fromkeys(MET[: believing.NUM_VOUCHERS], STRANGER))
    assert STRANGER in acquaintance.proven(frozenset(MET), vouching)
    gone = {author: partner for author, partner in vouching.items() if author != STRANGER}
    assert STRANGER not in acquaintance.proven(frozenset(MET), gone)
    assert STRANGER not in acquaintance.proven(frozenset(MET), partners({}))


# Which suspicions count, and how many are needed.

ALICE, BOB = author_of(1), author_of(2)


def lists(*names: bytes) -> list[Suspects]:
    return [Suspects((name[:8],)) for name in names]


def test_a_peer_is_on_the_list_of_the_latest_until_it_is_found_good_again() -> None:
    own = believing.OwnSuspects()
    assert own.note(ALICE, is_suspect=True)
    assert not own.note(ALICE, is_suspect=True), "there is nothing new to publish"
    assert own.entry == Suspects((ALICE[:8],))
    assert own.note(ALICE, is_suspect=False)
    assert own.entry == Suspects(())
    assert not own.note(BOB, is_suspect=False)
    for number in range(MAX_SUSPECTS + 10):
        own.note(author_of(number + 1), is_suspect=True)
    assert len(own.entry.peers) == MAX_SUSPECTS
    assert author_of(MAX_SUSPECTS + 10)[:8] in own.entry.peers
    assert ALICE[:8] not in own.entry.peers


@pytest.mark.parametrize(("num_believed", "enough"), [(0, 3), (3, 3), (9, 3), (10, 4), (14, 5), (18, 6), (250, 6)])
def test_how_many_accusers_are_enough(num_believed: int, enough: int) -> None:
    assert believing.MIN_ACCUSERS <= enough <= believing.MAX_ACCUSERS
    assert believing.is_suspected(ALICE, lists(*(ALICE,) * enough), num_believed)
    assert not believing.is_suspected(ALICE, lists(*(ALICE,) * (enough - 1), BOB), num_believed)


@pytest.mark.parametrize("members", range(4, 19))
def test_a_quarter_of_liars_among_few_is_not_enough(members: int) -> None:
    """Beyond 18 members a quarter of them is more than six: then only a node's own losses protect the honest."""
    liars = members // 4
    assert not believing.is_suspected(ALICE, lists(*(ALICE,) * liars), members - 2)


HOUR = 3_600.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_enough_votes_that_agree_show_that_this_clock_is_wrong(sign: float) -> None:
    skew = believing.judge_clock([sign * (HOUR + error) for error in (0.0, 5.0, -5.0)])
    assert skew is not None
    assert (skew.seconds, skew.num_members) == (sign * HOUR, 3)
    assert skew.is_agreed
    assert skew.is_harmful


def test_fewer_votes_only_show_that_one_of_the_clocks_is_wrong() -> None:
    for number in range(1, believing.NUM_AGREEING):
        skew = believing.judge_clock([HOUR] * number)
        assert skew is not None
        assert (skew.is_agreed, skew.num_members) == (False, number)


@pytest.mark.parametrize(
    "votes",
    [
        [],
        [0.0],
        [1.0, -2.0, 3.0],
        [HOUR, 0.0],
        [HOUR, HOUR, 0.0],
        [HOUR, HOUR, HOUR, 0.0, 1.0, 2.0],  # liars are no more than half
        [HOUR, 2 * HOUR, 3 * HOUR, 0.0],  # they do not agree, and one member confirms the clock
        [believing.MAX_FINE_SKEW - 1.0] * 5,
        [MAX_AHEAD - 1.0],
    ],
)
def test_a_clock_that_members_confirm_or_that_is_good_enough_is_not_reported(votes: list[float]) -> None:
    assert believing.judge_clock(votes) is None


def test_members_that_lie_in_different_ways_do_not_agree_and_a_drift_is_reported_before_it_harms() -> None:
    skew = believing.judge_clock([HOUR, 2 * HOUR, 3 * HOUR])
    assert skew is not None
    assert (skew.is_agreed, skew.seconds) == (False, HOUR)
    skew = believing.judge_clock([believing.MAX_FINE_SKEW + 5.0] * believing.NUM_AGREEING)
    assert skew is not None
    assert (skew.is_agreed, skew.is_harmful) == (True, False)


def test_the_members_of_one_public_network_and_all_relayed_ones_have_one_vote() -> None:
    local = [(bytes([index]), "192.168.1.0/24", 1.0) for index in range(3)]
    public = [(bytes([index]), "5.1.1.0/24", HOUR + index) for index in range(3, 6)]
    wide = [(bytes([index]), "2a00:1::/48", 3.0) for index in range(6, 9)]
    relayed = [(bytes([index]), "", 4.0) for index in range(9, 12)]
    assert believing.votes_of([*local, *public, *wide, *relayed]) == [1.0, 1.0, 1.0, HOUR + 4, 3.0, 4.0]
