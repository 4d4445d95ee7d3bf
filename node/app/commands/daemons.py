"""``farandole join`` and ``farandole relay``: a daemon in the foreground."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ...base.settings import NodeSettings
from ...base.system.tuning import importing_for_good
from .options import stray_variables, takes_settings
from .output import say_warnings, split_source, unquoted


@takes_settings()
def join(settings: NodeSettings) -> None:
    """Join a run and train until Ctrl-C (or `farandole leave`), and print each step.

    Examples: [cyan]farandole join farandole1...[/cyan]; [cyan]farandole join run.manifest[/cyan] (a run's first node);
    [cyan]farandole join[/cyan] (comes back to the run of this folder);
    [cyan]farandole join farandole1... --stage 2[/cyan] (holds stage 2; otherwise the node chooses)
    """
    invite, manifest = split_source(settings.invite)
    settings = replace(settings, invite=invite, manifest=manifest)
    with importing_for_good():
        from ...daemon import run_node

    say_warnings(stray_variables(os.environ))
    _run(settings, run_node, settings)


@takes_settings(
    *("port", "listen", "announce", "bootstrap", "upload_mbit", "download_mbit", "monthly_traffic", "mdns", "upnp"),
    *("dashboard", "dashboard_port", "log_level"),
)
def relay(
    settings: NodeSettings,
    invites: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE...", help="An invite to each run; none: the runs that this folder knows."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write a public page of the run into this folder, twice a minute: loss, members, tokens of each. A "
            "web server, or a host of static pages, can serve it.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Help a run without training: introduce newcomers, and relay traffic between peers behind NAT.

    For a machine that others can dial, with a port that stays the same; it needs neither GPU nor memory.

    Examples: [cyan]farandole relay farandole1... --port 4001[/cyan];
    [cyan]farandole relay farandole1... --port 4001 --page /var/www/run[/cyan]
    """
    from farandole.protocol.run.invite import decode_invite

    given = [invite for text in invites or [] if (invite := unquoted(text))]  # compose.yaml passes an empty one
    for invite in given:
        decode_invite(invite)  # reports a mistyped invite at once
    with importing_for_good():
        from ...relay_node import run_relay

    say_warnings(stray_variables(os.environ))
    _run(settings, run_relay, settings, given, page)


def _run(settings: NodeSettings, daemon: Callable[..., Awaitable[int]], *arguments: object) -> NoReturn:
    """Run ``daemon(*arguments)`` until it ends, and exit with the code that it returns."""
    import trio

    from ...base.identity import keep_private
    from ...base.logs import logging_to_file
    from ...base.system.tuning import give_memory_back

    give_memory_back()
    keep_private(settings.home)
    with logging_to_file(settings):
        code = trio.run(daemon, *arguments)
    raise typer.Exit(code)
