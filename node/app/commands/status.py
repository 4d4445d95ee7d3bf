"""``farandole status`` and ``farandole peers``: the status of the node that runs here."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from .options import AsJson, Home
from .output import node_status, print_answer, print_json

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

    With --json and --watch, prints a line of JSON a second, with at most 64 members, those closest to the node.

    Examples: [cyan]farandole status --watch[/cyan]; [cyan]farandole status --json | jq .loss[/cyan]
    """
    if watch:
        _watch(home, as_json=as_json)
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
        print_json(call(home, "status")["members"])
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

    from farandole.protocol.wire.errors import FarandoleError

    from ...base.control import call

    page = call(home, "dashboard")
    link = f"{page['url']}#{page['token']}"  # a browser sends the fragment to no server
    print_answer(as_json, page, link)
    if open_browser and not webbrowser.open(link):
        raise FarandoleError("no browser was found here; open the address above")


def _watch(home: Path, *, as_json: bool) -> None:
    """Show the status on the whole screen, or print a line of JSON a second. The node may go away, and come back."""
    from farandole.protocol.wire.errors import FarandoleError

    from ...base.control import NoNodeError, call

    def ask(method: str) -> Any:
        return call(home, method, **({"max_members": MAX_MEMBERS} if method == "status" else {}))

    if not as_json:
        if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on the latter
            raise FarandoleError("the screen of --watch needs a terminal; with --json it is a line a second")
        from ...ui.watch.app import WatchApp

        WatchApp(ask, INTERVAL).run()
        return
    was_there = False
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                typer.echo(json.dumps(ask("status")))
                was_there = True
            except FarandoleError as error:
                if not was_there:
                    raise
                code = "no_node" if isinstance(error, NoNodeError) else getattr(error, "code", "internal")
                typer.echo(json.dumps({"error": {"code": code, "message": str(error)}}))
            time.sleep(INTERVAL)
