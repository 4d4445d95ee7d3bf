"""A process of a benchmark that answers requests (`farandole.testnet.bench.process`).

    python -m farandole.testnet.bench.worker PART PIPE

A part is a module here, whose functions are the actions, or with ``:CLASS`` a class in it, whose methods are. Requests
arrive on the pipe, and each is a call of an action. A class is called with a stack that ends with the requests.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from importlib import import_module
from multiprocessing.connection import Connection

import trio

from farandole.node.base.system.tuning import importing_for_good


async def serve(part: str, descriptor: int) -> None:
    """Answer requests until the other end closes; an action's error is sent as its answer."""
    module, _, name = part.partition(":")
    async with contextlib.AsyncExitStack() as stack:
        control = stack.enter_context(Connection(descriptor))
        with importing_for_good():  # as daemons and trainers do
            served = import_module(f".{module}", __package__)
        if name:
            served = getattr(served, name)(stack)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                request = await trio.to_thread.run_sync(control.recv)
                try:
                    answer = getattr(served, request.pop("do"))(**request)
                    if inspect.isawaitable(answer):
                        answer = await answer
                except Exception as error:  # the benchmark shows any error, and continues
                    answer = {"error": f"{type(error).__name__}: {error}"}
                control.send(answer or {})  # the benchmark may have been interrupted while it was due


if __name__ == "__main__":
    part, descriptor = sys.argv[1:]
    trio.run(serve, part, int(descriptor))
