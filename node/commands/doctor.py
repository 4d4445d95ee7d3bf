"""``farandole doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..exits import Exit
from ..settings import NodeSettings
from .options import AsJson, Bootstrap, Device, Home, Listen
from .output import print_json


def doctor(
    home: Home,
    listen: Listen,
    invite: Annotated[
        str | None, typer.Argument(metavar="INVITE", envvar="FARANDOLE_INVITE", help="The invite that does not work.")
    ] = None,
    bootstrap: Bootstrap = None,
    device: Device = "auto",
    data: Annotated[
        list[Path] | None, typer.Option(help="File or folder of text; repeatable.", envvar="FARANDOLE_DATA")
    ] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure the line to a peer too: a few megabytes each way.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find out what keeps this machine from joining or from being reached; exit code 1 if something must be mended.

    Examples: [cyan]farandole doctor farandole1...[/cyan]; [cyan]farandole doctor --json | jq .findings[/cyan]
    """
    import msgspec
    import trio
    from rich.console import Console

    from ..doctor.examination import Examination
    from ..doctor.view import diagnosis_screen

    settings = NodeSettings(
        home=home, invite=invite, listen=listen, bootstrap=bootstrap or [], device=device, data=data or []
    )
    diagnosis = trio.run(Examination(settings, is_speed_wanted=bandwidth).run)
    if as_json:
        print_json(msgspec.to_builtins(diagnosis))
    else:
        Console().print(diagnosis_screen(diagnosis))
    raise typer.Exit(Exit.OK if diagnosis.is_well else Exit.NOT_WELL)
