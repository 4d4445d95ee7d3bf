"""Nurseries of services, whose tasks handle their own errors; and the errors that nurseries raise at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from farandole.protocol.wire.errors import FarandoleError


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
