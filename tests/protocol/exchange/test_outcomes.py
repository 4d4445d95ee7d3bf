from __future__ import annotations

import pytest

from farandole.protocol.exchange.exchange import (
    MAX_OUTCOMES,
    Outcomes,
)
from farandole.protocol.wire.errors import RemoteProtocolError


def test_outcomes_the_first_decision_holds() -> None:
    outcomes = Outcomes()
    outcomes.begin(b"s", b"bob")
    assert outcomes.answer(b"s", b"bob") == "undecided"
    assert outcomes.decide(b"s", committed=True)
    assert outcomes.decide(b"s", committed=False)
    assert outcomes.answer(b"s", b"bob") == "committed"
    with pytest.raises(RemoteProtocolError):
        outcomes.answer(b"s", b"mallory")


def test_outcomes_what_is_unknown_was_never_committed_and_memory_is_bounded() -> None:
    outcomes = Outcomes()
    assert outcomes.answer(b"s", b"bob") == "aborted"
    assert not outcomes.decide(b"s", committed=True)
    for index in range(MAX_OUTCOMES + 1):
        outcomes.begin(index.to_bytes(16, "big"), b"bob")
        outcomes.decide(index.to_bytes(16, "big"), committed=True)
    assert outcomes.answer(bytes(16), b"bob") == "aborted"
    assert outcomes.answer(MAX_OUTCOMES.to_bytes(16, "big"), b"bob") == "committed"
