"""Python's garbage collector, which need not traverse objects that live as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_for_good() -> Iterator[None]:
    """Freeze the objects of imports within the block: the garbage collector never traverses them.

    Importing torch makes 170,000 objects that stay. The collector traverses them again and again as their number grows,
    and at each full collection later: a trainer that avoids this has imported after 1.3 s, not 2.0.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
