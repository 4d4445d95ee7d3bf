"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import settings

from farandole.node.base.system.tuning import KEEP_PRIORITY_VARIABLE

from . import template

LONGEST = ("test_epoch.py", "test_nanochat.py", "test_real_nodes.py", "test_two_homes.py")
# Tests compare bits: of two processes, or of a whole model and its stages. torch's results depend on the number of
# threads and on how MKL divides a product, so every process of the tests has one thread and MKL's reproducible mode.
# Both are read when torch is loaded, which is later than this, and inherited by the processes that tests start.
os.environ.update(OMP_NUM_THREADS="1", MKL_CBWR="AUTO")

# Tests check behaviour, not time: on a busy machine any example may take a second longer.
settings.register_profile("farandole", deadline=None)
settings.load_profile("farandole")


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs under test: a shell makes background jobs ignore it, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, most of which is waiting: else one tester ends a minute after the others."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Set up what processes started by tests inherit, and hide all present objects from the garbage collector."""
    # A test waits for its trainers, which must not yield to other tests: with four tests at once on two cores they got
    # a seventh of a core. A process that runs tests reads the variable at its start, which is earlier.
    os.environ.setdefault(KEEP_PRIORITY_VARIABLE, "1")
    template.install()
    # Tests and their imports stay until the end: the garbage collector need not scan them each time.
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the processes of tests that are marked so started, not forked."""
    template.is_enabled = item.get_closest_marker("started") is None
