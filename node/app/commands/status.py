"""``farandole status`` and ``farandole peers``: the status of the node that runs here."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from .options import AsJson, Home
from .output import call_node, node_status, print_answer, print_json

INTERVAL: Final = 1.0
# A screen has no room for more members, and `farandole peers` shows all: a status of a thousand members has a megabyte.
MAX_MEMBERS: Final = 64


def status(
    home: Home,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Full-screen view, updated every second: q quits, p pauses.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of the node on this machine: whether it is in the run, its last exchange, its loss.

    Examples: [cyan]farandole status --watch[/cyan]; [cyan]farandole status --json | jq .loss[/cyan]
    """
    if watch:
        if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on the latter
            raise FarandoleError("the screen of --watch needs a terminal: for a script there is --json")
        from ...ui.watch.app import WatchApp

        def ask(method: str) -> Any:
            return call_node(home, method, **({"max_members": MAX_MEMBERS} if method == "status" else {}))

        WatchApp(ask, INTERVAL).run()
    elif as_json:
        print_json(call_node(home, "status"))
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

    from ...ui.view import members_table

    if as_json:
        print_json(call_node(home, "status")["members"])
    else:
        status = node_status(home)
        Console().print(members_table(status))


def dashboard(
    home: Home,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the address of the page about the node that runs here; includes the access token.

    Example: [cyan]farandole dashboard --open[/cyan]
    """
    import webbrowser

    page = call_node(home, "dashboard")
    link = f"{page['url']}#{page['token']}"  # a browser sends the fragment to no server
    print_answer(as_json, page, link)
    if open_browser and not webbrowser.open(link):
        raise FarandoleError("no browser was found here; open the address above")
