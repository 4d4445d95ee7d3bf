"""``farandole status`` and ``farandole peers``: the status of the node that runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...base.interrupts import interruptible
from .options import AsJson, Home
from .output import node_status, print_answer, print_json

if TYPE_CHECKING:
    from ...base.interrupts import Ending


def status(
    home: Home,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Full-screen view, updated every second: q quits, p pauses.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of the node on this machine: whether it is in the run, its last exchange, its loss.

    With --json and --watch, prints a line of JSON a second, with at most 64 members, those closest to the node.

    Examples: [cyan]farandole status --watch[/cyan]; [cyan]farandole status --json | jq .loss[/cyan]
    """
    with interruptible() as is_interrupted:
        if watch and as_json:
            _watch_json(home, is_interrupted)
        elif watch:
            _watch(home, is_interrupted)
        elif as_json:
            from ...base.control import call

            print_json(call(home, "status"))
        else:
            from rich.console import Console

            from ...ui.view import status_screen

            seen = node_status(home)
            Console().print(status_screen(seen, seen.at))


def peers(home: Home, as_json: AsJson = False) -> None:
    """List the members of the run as this node sees them, and how it reaches each.

    Example: [cyan]farandole peers[/cyan]
    """
    from rich.console import Console

    from ...base.control import call
    from ...ui.view import members_table

    if as_json:
        print_json(call(home, "peers"))
    else:
        status = node_status(home)
        Console().print(members_table(status.members, status.run.providers, status.remarks))


def dashboard(
    home: Home,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the address of the page about the node that runs here; includes the access token.

    Example: [cyan]farandole dashboard --open[/cyan]
    """
    import webbrowser

    from farandole.protocol.wire.errors import FarandoleError

    from ...base.settings import NodeSettings
    from ...ui.dashboard.server import find_place

    node_status(home)  # raises an error if no node runs here
    place = find_place(NodeSettings(home=home).dashboard_place)
    if place is None:
        raise FarandoleError("this node serves no page: it was started with --no-dashboard, or is just starting")
    print_answer(as_json, {"url": place.url, "token": place.token}, place.link)
    if open_browser and not webbrowser.open(place.link):
        raise FarandoleError("no browser was found here; open the address above")


def _watch_json(home: Path, is_interrupted: Ending) -> None:
    """Print one line a second, a stream for scripts. A node that was there may go away, and come back."""
    from farandole.protocol.wire.errors import FarandoleError

    from ...base.control import call
    from ...ui.watch.feed import INTERVAL, MAX_MEMBERS, error_line

    was_there = False
    while True:
        try:
            typer.echo(json.dumps(call(home, "status", max_members=MAX_MEMBERS)))
            was_there = True
        except FarandoleError as error:
            if not was_there:
                raise
            typer.echo(error_line(error))
        if is_interrupted.wait(INTERVAL):
            return


def _watch(home: Path, is_interrupted: Ending) -> None:
    """Show the status on the whole screen if there is one, otherwise print events line by line."""
    from ...ui.watch.feed import Feed, has_screen, print_lines

    feed = Feed(home)
    if not has_screen():
        print_lines(feed, is_interrupted, typer.echo)
        return
    from ...ui.watch.app import WatchApp

    WatchApp(feed).run()
