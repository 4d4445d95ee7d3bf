from __future__ import annotations

from farandole.testnet.play.record import Ledger


def test_only_the_time_in_which_it_was_alive_counts() -> None:
    ledger = Ledger()
    for at, condition in (
        (0, "starting"),
        (10, "working"),
        (110, "starved"),
        (150, "working"),
        (200, "frozen"),
        (230, "returning"),
        (231, "working"),
        (300, "absent"),
        (320, "returning"),
        (328, "working"),
        (400, "finished"),
    ):
        ledger.enter(condition, float(at))  # type: ignore[arg-type]  # the literals of the list above
    ledger.settle(500.0)
    assert ledger.seconds == {
        "starting": 10,
        "working": 100 + 50 + 69 + 72,
        "starved": 40,
        "frozen": 30,
        "returning": 1 + 8,
        "absent": 20,
        "finished": 100,
    }
    assert ledger.given == 10 + 291 + 9 + 40
