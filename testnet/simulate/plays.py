"""Simulations of a benchmark, each in a process of its own, one per core at a time."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Outcome = TypeVar("Outcome")


def play_all(
    say: Callable[[str], None],
    plays: Sequence[tuple[Name, Callable[[], Outcome]]],
    keep: Callable[[Name, Outcome], object] = lambda name, outcome: None,
) -> dict[Name, list[Outcome]]:
    """Run all plays; return the outcomes by name, in the order of ``plays``.

    Plays are pickled, so use a `functools.partial` of a module's function. If this process is killed, they end too.
    After each play, ``say`` gets the progress, and ``keep`` the play's outcome.
    """
    with ProcessPoolExecutor(os.cpu_count(), initializer=_end_with_parent) as processes:
        asked = [(name, processes.submit(play)) for name, play in plays]
        names = {future: name for name, future in asked}
        try:
            for done, future in enumerate(as_completed(names), 1):
                keep(names[future], future.result())
                say(f"{done} of {len(plays)} plays, the last: {names[future]}")
        except BaseException:  # otherwise all the others are played before the error is seen
            processes.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes: dict[Name, list[Outcome]] = {name: [] for name, _ in plays}
    for name, future in asked:
        outcomes[name].append(future.result())
    return outcomes


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a process of the pool"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
