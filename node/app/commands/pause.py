"""``farandole pause`` and ``farandole resume``."""

from __future__ import annotations

import typer

from .options import Home


def pause(home: Home) -> None:
    """Stop training on this machine until `farandole resume`, also after a restart: its memory and GPU are free then.

    The node stays in the run, and goes on helping others to reach each other. It saves first if that takes at most
    three seconds; otherwise what it has learnt since its last checkpoint is lost.

    Example: [cyan]farandole pause[/cyan]
    """
    from ...base.control import call

    typer.echo(call(home, "pause"))


def resume(home: Home) -> None:
    """Train again after `farandole pause`.

    Example: [cyan]farandole resume[/cyan]
    """
    from ...base.control import call

    typer.echo(call(home, "resume"))
