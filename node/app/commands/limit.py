"""``farandole limit``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Home

Cap = Annotated[float | None, typer.Option(help="Mbit/s, 0.5 or more; 0: no cap.", show_default=False)]


def limit(home: Home, upload_mbit: Cap = None, download_mbit: Cap = None) -> None:
    """Change the bandwidth caps of the running node until it ends. The settings file sets them permanently.

    Examples: [cyan]farandole limit --upload-mbit 2[/cyan];
    [cyan]farandole limit --upload-mbit 0 --download-mbit 0[/cyan]
    """
    from ...base.control import call

    caps = {"upload_mbit": upload_mbit, "download_mbit": download_mbit}
    given = {name: cap for name, cap in caps.items() if cap is not None}
    if not given:
        raise typer.BadParameter("say which cap to change: --upload-mbit, --download-mbit, or both")
    typer.echo(call(home, "limit", **given))
