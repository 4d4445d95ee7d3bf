from __future__ import annotations

import pytest

from farandole.testnet.natlab.namespace import NamespaceError, require
from farandole.testnet.play.wrong_clock import NoFaketimeError, library


@pytest.fixture
def networks() -> None:
    """Skip the test if the NAT lab cannot be created."""
    try:
        require("nft")
    except NamespaceError as error:
        pytest.skip(str(error))


@pytest.fixture
def faketime() -> None:
    """Skip the test if clocks cannot be set."""
    try:
        library()
    except NoFaketimeError as error:
        pytest.skip(str(error))
