"""``farandole run metrics``: the rounds of this node that are over."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.errors import how_to_add

from ...base.figures import count, duration, size
from .options import Home


def show_metrics(
    home: Home,
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=1, metavar="N", show_default="20, or all as CSV", help="Number of rounds."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns as CSV, for other programs.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write them there for TensorBoard (extra tensorboard).")
    ] = None,
) -> None:
    """Print this node's rounds: when, with whom, loss, bytes, seconds. Works while the node is stopped, too.

    Examples: [cyan]farandole run metrics[/cyan]; [cyan]farandole run metrics --csv > rounds.csv[/cyan];
    [cyan]farandole run metrics --tensorboard runs/mine[/cyan], then [cyan]tensorboard --logdir runs[/cyan]
    """
    from ...base.settings import NodeSettings
    from ...status.round_log import read_rounds, write_csv, write_events

    path = NodeSettings(home=home).rounds
    records = list(read_rounds(path))
    if not records:
        raise FarandoleError(f"no round is over yet: {path} has none; name another folder with --home")
    newest = records[-last:] if last else records
    if tensorboard is not None:
        tokens_before = sum(record.tokens for record in records[: -len(newest)])
        try:
            written = write_events(newest, tokens_before, tensorboard)
        except ImportError as error:
            command = how_to_add("tensorboard")
            raise FarandoleError(f"a file for TensorBoard needs the Python package tensorboardX: {command}") from error
        except OSError as error:
            raise FarandoleError(f"cannot write into {tensorboard}: {error.strerror}") from error
        typer.echo(f"{written} is written; look at it with: tensorboard --logdir {tensorboard}")
        return
    if as_csv:
        write_csv(newest, sys.stdout)
        return
    from rich.console import Console
    from rich.table import Column, Table

    figures = (Column(name, no_wrap=True) for name in ("at", "round", "loss", "held out", "tokens", "seconds"))
    outer_step = Column("outer step with", no_wrap=True, overflow="ellipsis")
    table = Table(*figures, outer_step, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for record in newest if last else records[-20:]:
        partner = f"{record.partner[-8:]}, {size(record.contribution_bytes)}, {duration(record.exchange_seconds)}"
        table.add_row(
            f"{datetime.fromtimestamp(record.at):%m-%d %H:%M}",
            str(record.round),
            "" if record.loss is None else f"{record.loss:.3f}",
            "" if record.validation is None else f"{record.validation:.3f}",
            count(record.tokens),
            f"{record.seconds:.1f}",
            partner if record.verdict == "committed" else record.verdict,
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"from {path}; --csv prints all columns", soft_wrap=True)
