from __future__ import annotations

import pytest

from farandole.protocol.exchange.pipe import BULK_FROM

from .sides import Side, share_offers


@pytest.fixture
def alice() -> Side:
    return Side(is_initiator=True)


@pytest.fixture
def bob() -> Side:
    return Side(is_initiator=False)


@pytest.fixture
def large() -> tuple[Side, Side]:
    """Return Alice and Bob with contributions large enough for a channel; both have offered."""
    alice, bob = Side(True, BULK_FROM), Side(False, BULK_FROM)
    share_offers(alice, bob)
    return alice, bob
