from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.lab import Lab, open_lab
from farandole.testnet.natlab.namespace import NamespaceError, require


@pytest.fixture
def lab() -> Iterator[Lab]:
    yield from made()


@pytest.fixture
def full_lab() -> Iterator[Lab]:
    yield from made("miniupnpd")


def made(*tools: str) -> Iterator[Lab]:
    with ExitStack() as stack:
        try:
            require("nft", *tools)
            lab = stack.enter_context(open_lab(stack.enter_context(open_leash())))
        except NamespaceError as error:
            pytest.skip(str(error))
        yield lab
