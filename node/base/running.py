"""Runs commands that do something in the mesh and end: in trio, with a clean stop on Ctrl-C."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from .nurseries import own_error
from .system.children import STOP_SIGNALS

T = TypeVar("T")


def run_to_end(task: Callable[[], Awaitable[T]]) -> T:
    """Run a task to its end, and return what it returns.

    Raises the `FarandoleError` that ended it, wherever it arose, and `KeyboardInterrupt` after Ctrl-C or SIGTERM, when
    all that the task had opened is closed.
    """

    async def run() -> T:
        results: list[T] = []
        with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
                        return

                nursery.start_soon(watch)
                results.append(await task())
                nursery.cancel_scope.cancel()
        if not results:
            raise KeyboardInterrupt
        return results[0]

    try:
        return trio.run(run)
    except BaseExceptionGroup as group:  # nurseries wrap even a single error
        error = own_error(group)
        if error is None:
            raise
        raise error from None
