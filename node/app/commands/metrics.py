"""``farandole run metrics``: the rounds of this node that are over."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from farandole.protocol.errors import FarandoleError

from .options import Home

if TYPE_CHECKING:
    from ...status.round_log import RoundRecord

_INSTALL: Final = "pip install 'farandole[tensorboard]'"


def show_metrics(
    home: Home,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=1, metavar="N", show_default="20, or all as CSV", help="So many.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table with all columns, for other programs.")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write them there for TensorBoard (extra tensorboard)."),
    ] = None,
) -> None:
    """Print this node's rounds: when, with whom, loss, bytes, seconds. No node need run for that.

    Examples: [cyan]farandole run metrics[/cyan]; [cyan]farandole run metrics --csv > rounds.csv[/cyan];
    [cyan]farandole run metrics --tensorboard runs/mine[/cyan], then [cyan]tensorboard --logdir runs[/cyan]
    """
    from ...base.settings import NodeSettings
    from ...status.round_log import read_rounds, write_csv

    path = NodeSettings(home=home).rounds
    records = list(read_rounds(path))
    if not records:
        raise FarandoleError(f"no round is over yet: {path} has none; name another folder with --home")
    newest = records[-last:] if last else records
    if tensorboard is not None:
        _write_events(newest, tensorboard)
    elif as_csv:
        write_csv(newest, sys.stdout)
    else:
        _print_table(newest if last else records[-20:], path)


def _write_events(records: Iterable[RoundRecord], folder: Path) -> None:
    try:
        from ...ui.metrics.tensorboard import write_events

        path = write_events(records, folder)
    except ImportError as error:
        raise FarandoleError(f"a file for TensorBoard needs the Python package tensorboardX: {_INSTALL}") from error
    except OSError as error:
        raise FarandoleError(f"cannot write into {folder}: {error.strerror}") from error
    typer.echo(f"{path} is written; look at it with: tensorboard --logdir {folder}")


def _print_table(records: Iterable[RoundRecord], path: Path) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    figures = (Column(name, no_wrap=True) for name in ("at", "round", "loss", "held out", "tokens", "seconds"))
    table = Table(*figures, "outer step", box=None)
    for record in records:
        partner = (
            f"with {record.partner[-8:]}, {record.contribution_bytes / 1e6:.2f} MB in {record.exchange_seconds:.2f} s"
        )
        table.add_row(
            f"{datetime.fromtimestamp(record.at):%Y-%m-%d %H:%M:%S}",
            str(record.round),
            "" if record.loss is None else f"{record.loss:.3f}",
            "" if record.validation is None else f"{record.validation:.3f}",
            str(record.tokens),
            f"{record.seconds:.1f}",
            partner if record.verdict == "committed" else record.verdict,
        )
    console = Console(markup=False)
    console.print(table)
    console.print(f"from {path}", soft_wrap=True)
