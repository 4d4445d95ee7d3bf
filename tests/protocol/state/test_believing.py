"""Partners are believed before others, and a peer with false claims is not believed."""

from __future__ import annotations

from farandole.protocol.state.believing import FIRST_DOUBT, MAX_DOUBT, MAX_DOUBTED, MAX_PARTNERS, Credit, Partners

PEERS = [number.to_bytes(32, "big") for number in range(MAX_DOUBTED + 1)]
ANN, BOB = PEERS[:2]


def test_the_latest_partners_are_remembered_and_outlive_the_process() -> None:
    partners = Partners()
    for peer in PEERS[:MAX_PARTNERS]:
        partners.note(peer)
    partners.note(ANN)
    partners.note(PEERS[MAX_PARTNERS])
    assert ANN in partners
    assert BOB not in partners, "that was the longest ago"
    again = Partners()
    again.restore(partners.encode() + b"torn")
    assert again.encode() == partners.encode()
    assert len(again.encode()) == 32 * MAX_PARTNERS


def test_a_vain_claim_costs_its_claimant_its_credit_for_longer_each_time() -> None:
    credit, now = Credit(), 0.0
    for number in range(12):
        credit.lose([ANN], now)
        credit.lose([ANN], now + 1.0)  # the same claim again
        doubt = min(FIRST_DOUBT * 2**number, MAX_DOUBT)
        assert not credit.is_good(ANN, now + doubt - 1.0)
        assert credit.is_good(BOB, now)
        now += doubt
        assert credit.is_good(ANN, now)


def test_what_is_remembered_of_liars_is_bounded() -> None:
    credit = Credit()
    credit.lose(PEERS, 0.0)
    assert credit.is_good(ANN, 1.0)
    assert not credit.is_good(PEERS[-1], 1.0)
