"""``farandole limit``."""

from __future__ import annotations

from typing import Annotated

import typer

from ...base.config.setting import settings_of
from ...base.settings import NodeSettings
from .options import Home, number_of

_UPLOAD = next(setting for setting in settings_of(NodeSettings) if setting.name == "upload_mbit")
Cap = Annotated[
    float | None,
    typer.Option(
        help="Mbit/s, 0.5 or more; 0: no cap.", show_default=False, parser=number_of(_UPLOAD), metavar="<number>"
    ),
]


def limit(
    home: Home,
    upload_mbit: Cap = None,
    download_mbit: Cap = None,
    quiet_hours: Annotated[
        list[str] | None,
        typer.Option(help='22:00-07:30, or "Sat-Sun 09:00-18:00"; none: no quiet hours. Repeatable.'),
    ] = None,
) -> None:
    """Change the limits of the running node until it ends. The settings file sets them permanently.

    Examples: [cyan]farandole limit --upload-mbit 2[/cyan];
    [cyan]farandole limit --upload-mbit 0 --download-mbit 0[/cyan];
    [cyan]farandole limit --quiet-hours 22:00-07:30[/cyan]
    """
    from ...base.control import call

    caps = {"upload_mbit": upload_mbit, "download_mbit": download_mbit}
    given = {name: cap for name, cap in caps.items() if cap is not None}
    if not given and not quiet_hours:
        raise typer.BadParameter("say which limit to change: --upload-mbit, --download-mbit or --quiet-hours")
    if quiet_hours:
        typer.echo(call(home, "quiet", hours="" if quiet_hours == ["none"] else ", ".join(quiet_hours)))
    if given:
        typer.echo(call(home, "limit", **given))
