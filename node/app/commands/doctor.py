"""``farandole doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from ...base.exits import Exit
from ...base.settings import NodeSettings
from .options import AsJson, takes_settings
from .output import print_json


@takes_settings(
    *("invite", "port", "listen", "announce", "bootstrap", "device", "stage", "data", "tokenizer", "stream"),
    "allow_model",
    *("upload_mbit", "download_mbit"),
    must_exist=False,
)
def doctor(
    settings: NodeSettings,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show a line for every check, not only for those that did not pass.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find what keeps this machine from joining or from being reached; exit code 1 if a check failed.

    Takes an invite, and those settings of join that it can check. Failures come first, each with its remedy, then
    warnings; the last line is the verdict, with the checks that could not be made, and why.

    Examples: [cyan]farandole doctor farandole1...[/cyan]; [cyan]farandole doctor --json | jq .findings[/cyan]
    """
    import msgspec
    import trio
    from rich.console import Console

    from ..doctor.examination import Examination
    from ..doctor.view import diagnosis_screen

    diagnosis = trio.run(Examination(settings).run)
    if as_json:
        print_json(msgspec.to_builtins(diagnosis))
    else:
        Console().print(diagnosis_screen(diagnosis, is_verbose=verbose))
    raise typer.Exit(Exit.OK if diagnosis.is_well else Exit.NOT_WELL)
