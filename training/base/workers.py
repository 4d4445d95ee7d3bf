"""Work on pieces of flat vectors on the CPU: each operation in one thread, several pieces at a time.

PyTorch divides every operation among its threads and waits for the slowest. On a busy machine each wait lasts until the
system runs the last thread again, some milliseconds, and the end of a round has thousands of short operations. With two
threads beside other busy processes on two cores, encoding 125 M parameters took 26 s instead of 0.9 s. Threads that
have whole pieces wait for each other only at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Let PyTorch use one thread for each operation of this thread; yields how many it used before.

    Threads that begin meanwhile use one as well.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def each_piece(work: Callable[[slice], object], pieces: Iterable[slice], vector: Tensor) -> None:
    """Call ``work(piece)`` for each piece of ``vector`` (n,): one after another, or `in_order` on the CPU."""
    if vector.device.type == "cpu":
        for _ in in_order(work, pieces):
            pass
    else:
        for piece in pieces:
            work(piece)


def in_order(work: Callable[[slice], Result], pieces: Iterable[slice]) -> Iterator[Result]:
    """Yield ``work(piece)`` for each piece, in order; as many pieces at a time as PyTorch has threads.

    Gradients are not recorded. Raises what ``work`` raises for the first piece for which it does.
    """
    listed = list(pieces)
    with one_thread() as num_threads:
        if min(num_threads, len(listed)) < 2:
            with torch.no_grad():
                yield from map(work, listed)
            return
        with ThreadPoolExecutor(min(num_threads, len(listed))) as pool:
            try:
                yield from pool.map(torch.no_grad()(work), listed)
            except BaseException:  # the rest is of no use
                pool.shutdown(wait=True, cancel_futures=True)
                raise
