"""``farandole status`` and ``farandole peers``: what the node that runs here says of itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..interrupts import interruptible
from .options import AsJson, Home
from .output import node_status, print_json

if TYPE_CHECKING:
    from threading import Event

WATCH_INTERVAL: Final = 1.0


def status(
    home: Home,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what the node that runs here is doing: in or not, with whom it exchanged, whether the loss falls.

    Examples: [cyan]farandole status --watch[/cyan]; [cyan]farandole status --json | jq .loss[/cyan]
    """
    if not watch:
        _print_status(home, as_json)
        return
    with interruptible() as is_interrupted:
        if as_json:
            _watch_json(home, is_interrupted)
        else:
            _watch_screen(home, is_interrupted)


def peers(home: Home, as_json: AsJson = False) -> None:
    """List the members of the run as this node sees them, and how it reaches each.

    Example: [cyan]farandole peers[/cyan]
    """
    from rich.console import Console

    from ..control import call
    from ..status.view import members_table

    if as_json:
        print_json(call(home, "peers"))
    else:
        status = node_status(home)
        Console().print(members_table(status.members, status.run.providers))


def dashboard(
    home: Home,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the address of the page about the node that runs here; it bears the token that its buttons need.

    Example: [cyan]farandole dashboard --open[/cyan]
    """
    import webbrowser

    from farandole.protocol.errors import FarandoleError

    from ..dashboard.place import find_place
    from ..settings import NodeSettings

    node_status(home)  # or the error that says that no node runs here
    place = find_place(NodeSettings(home=home).dashboard_place)
    if place is None:
        raise FarandoleError("this node serves no page: it was started with --no-dashboard, or is just starting")
    if as_json:
        print_json({"url": place.url, "token": place.token})
    else:
        typer.echo(place.link)
    if open_browser and not webbrowser.open(place.link):
        raise FarandoleError("no browser is to be had here; open the address above")


def _print_status(home: Path, as_json: bool) -> None:
    from rich.console import Console

    from ..control import call
    from ..status.view import status_screen

    if as_json:
        print_json(call(home, "status"))
    else:
        Console().print(status_screen(node_status(home), time.time()))


def _watch_json(home: Path, is_interrupted: Event) -> None:
    """One line a second: a stream for scripts."""
    from ..control import call

    while True:
        typer.echo(json.dumps(call(home, "status")))
        if is_interrupted.wait(WATCH_INTERVAL):
            return


def _watch_screen(home: Path, is_interrupted: Event) -> None:
    from rich.live import Live

    from ..status.view import status_screen

    with Live(status_screen(node_status(home), time.time()), auto_refresh=False) as live:
        while not is_interrupted.wait(WATCH_INTERVAL):
            live.update(status_screen(node_status(home), time.time()), refresh=True)
