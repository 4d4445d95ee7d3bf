from __future__ import annotations

import pytest

from farandole.testnet.namespace import NamespaceError, require
from farandole.testnet.wrong_clock import NoFaketimeError, library


@pytest.fixture
def networks() -> None:
    """Skips the test where the NAT lab cannot be made."""
    try:
        require("nft")
    except NamespaceError as error:
        pytest.skip(str(error))


@pytest.fixture
def faketime() -> None:
    """Skips the test where clocks cannot be set."""
    try:
        library()
    except NoFaketimeError as error:
        pytest.skip(str(error))
