from __future__ import annotations

from farandole.testnet.ledger import Ledger


def test_only_what_the_machine_gave_counts() -> None:
    ledger = Ledger()
    for at, condition, share in (
        (0, "starting", 1.0),
        (10, "working", 1.0),
        (110, "starved", 0.25),
        (150, "working", 1.0),
        (200, "frozen", 1.0),
        (230, "returning", 1.0),
        (231, "working", 1.0),
        (300, "absent", 1.0),
        (320, "returning", 1.0),
        (328, "working", 1.0),
        (400, "finished", 1.0),
    ):
        ledger.enter(condition, float(at), share)  # type: ignore[arg-type]
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
    assert ledger.given == 10 + 291 + 9 + 0.25 * 40
