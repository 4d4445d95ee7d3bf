"""Nurseries of services, whose tasks handle their own errors; and a command that ends with its task or by Ctrl-C."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from farandole.protocol.wire.errors import FarandoleError

from .system.processes import STOP_SIGNALS

T = TypeVar("T")


@asynccontextmanager
async def open_service_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery that raises its block's own error without a group, if it is the only one.

    When the block ends, so do the tasks.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:  # nurseries wrap even a single error
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None


def own_error(group: BaseExceptionGroup[BaseException]) -> FarandoleError | None:
    """Return the first `FarandoleError` in nested groups; None if the groups contain other errors."""
    ours, others = group.split(FarandoleError)
    if ours is None or others is not None:
        return None
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FarandoleError)
    return error


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
