"""Progress of downloads: a bar for each on a terminal, and lines for events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ...transfers.fetch import FetchProgress


@contextmanager
def open_progress() -> Iterator[tuple[Callable[[str], None], Callable[[str, FetchProgress], None]]]:
    """Yield two functions for standard error, to use in the block: print a line, show a named download's progress."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[how]}"))
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def show(name: str, fetch: FetchProgress) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, how="")
            progress.update(bars[name], total=fetch.total or None, completed=fetch.num_bytes, how=str(fetch))

        yield lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False), show
