"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal

from hypothesis import settings

from farandole.node.base.system.features import WITHOUT_VARIABLE

# Tests compare bits: of two processes, of a model and its stages. torch's results depend on the number of threads and
# on how MKL divides a product, so every process of the tests has one thread and MKL's reproducible mode. Both are read
# when torch is loaded, which is later than this, and inherited by the processes that tests start.
os.environ.update(OMP_NUM_THREADS="1", MKL_CBWR="AUTO")

# Tests assert behaviour, not time: a busy machine may let any one example wait for a second.
settings.register_profile("farandole", deadline=None)
settings.load_profile("farandole")


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs under test: a shell has background jobs ignore it, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What holds for processes that tests start, and for all objects that are there before them."""
    # A test waits for its trainers, which must not give way to other tests: four at once on two cores left them a
    # seventh of one. A process that runs tests reads the variable at its start, which is earlier.
    os.environ.setdefault(WITHOUT_VARIABLE, "priorities")
    # Tests and what they import stay until the end: the garbage collector need not look through them each time.
    gc.freeze()
