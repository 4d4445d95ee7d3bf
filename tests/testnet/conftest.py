from __future__ import annotations

import pytest

from farandole.testnet.namespace import NamespaceError, require


@pytest.fixture
def networks() -> None:
    """Skips the test where the NAT lab cannot be made."""
    try:
        require("nft")
    except NamespaceError as error:
        pytest.skip(str(error))
