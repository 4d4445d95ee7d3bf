from __future__ import annotations

from farandole.protocol.state.acquaintance import NUM_VOUCHERS, Acquaintance
from farandole.protocol.state.entries import PARTNER_BYTES

MET = [bytes([number]) * 32 for number in range(1, 9)]
STRANGER, GHOST = b"s" * 32, b"g" * 32


def partners(of: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the partners of the live members; members not named in ``of`` have averaged with no peer."""
    return {author: of.get(author, b"")[:PARTNER_BYTES] for author in (*MET, STRANGER, GHOST)}


def test_who_was_met_is_proven_and_a_key_is_not() -> None:
    assert Acquaintance().proven(frozenset(MET), partners({})) == frozenset(MET)


def test_several_whom_this_node_has_met_vouch_for_a_stranger_one_round_after_the_other() -> None:
    acquaintance = Acquaintance()
    for number, voucher in enumerate(MET[:NUM_VOUCHERS], 1):
        proven = acquaintance.proven(frozenset(MET), partners({voucher: STRANGER}))
        assert (STRANGER in proven) == (number == NUM_VOUCHERS)
    assert GHOST not in proven


def test_liars_prove_nobody_by_saying_it_often_or_without_having_been_met() -> None:
    acquaintance = Acquaintance()
    liars = dict.fromkeys((*MET[: NUM_VOUCHERS - 1], STRANGER), GHOST) | {GHOST: STRANGER}
    for _ in range(100):
        proven = acquaintance.proven(frozenset(MET), partners(liars))
    assert proven == frozenset(MET)


def test_who_is_away_has_to_be_vouched_for_again() -> None:
    acquaintance = Acquaintance()
    vouching = partners(dict.fromkeys(MET[:NUM_VOUCHERS], STRANGER))
    assert STRANGER in acquaintance.proven(frozenset(MET), vouching)
    gone = {author: partner for author, partner in vouching.items() if author != STRANGER}
    assert STRANGER not in acquaintance.proven(frozenset(MET), gone)
    assert STRANGER not in acquaintance.proven(frozenset(MET), partners({}))
