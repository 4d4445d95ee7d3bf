from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from farandole.testnet.natlab.groups import open_leash
from farandole.testnet.natlab.lab import Lab, open_lab
from farandole.testnet.natlab.namespace import NamespaceError, require
from farandole.testnet.play import launch, process
from farandole.testnet.play.wrong_clock import NoFaketimeError, library


@contextmanager
def skipping() -> Iterator[None]:
    """Skip the test if this machine lacks what is asked for inside."""
    try:
        yield
    except (NamespaceError, NoFaketimeError) as error:
        pytest.skip(str(error))


@pytest.fixture
def networks() -> None:
    """Skip the test if the NAT lab cannot be created."""
    with skipping():
        require("nft")


@pytest.fixture
def full_networks() -> None:
    """Skip the test if the NAT lab cannot be created with all kinds of homes."""
    with skipping():
        require("nft", "miniupnpd")


@pytest.fixture
def faketime() -> None:
    """Skip the test if clocks cannot be set."""
    with skipping():
        library()


@pytest.fixture
def lab(networks: None) -> Iterator[Lab]:
    with ExitStack() as stack:
        with skipping():
            lab = stack.enter_context(open_lab(stack.enter_context(open_leash())))
        yield lab


@pytest.fixture
def full_lab(full_networks: None, lab: Lab) -> Lab:
    return lab


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at fake nodes often."""
    monkeypatch.setattr(process, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(launch, "WATCH_INTERVAL", 0.02)
