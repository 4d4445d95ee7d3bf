"""``farandole run metrics``: the rounds of this node that are over."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.protocol.wire.errors import FarandoleError
from farandole.training.base.errors import how_to_add

from ...base.figures import count, duration, size
from .options import Home

if TYPE_CHECKING:
    from ...base.settings import NodeSettings
    from ...status.round_log import RoundRecord


def show_metrics(
    home: Home,
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=1, metavar="N", show_default="20, or all as CSV", help="Number of rounds."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all columns as CSV, for other programs.")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write them there for TensorBoard (extra tensorboard)."),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="TRACKER:PROJECT",
            help="Send each round to an experiment tracker when it is over, until Ctrl-C: trackio:PROJECT, "
            "wandb:PROJECT (extras trackio, wandb).",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="With --report: send what is there, and end.")] = False,
) -> None:
    """Print this node's rounds: when, with whom, loss, bytes, seconds. Works while the node is stopped, too.

    Examples: [cyan]farandole run metrics[/cyan]; [cyan]farandole run metrics --csv > rounds.csv[/cyan];
    [cyan]farandole run metrics --tensorboard runs/mine[/cyan], then [cyan]tensorboard --logdir runs[/cyan];
    [cyan]farandole run metrics --report wandb:my-project[/cyan]
    """
    from ...base.settings import NodeSettings
    from ...status.round_log import figures_of, read_rounds, write_csv, write_events

    if report is not None:
        if last or as_csv or tensorboard is not None:
            raise typer.BadParameter("it sends all rounds, and does nothing else", param_hint="--report")
        _report(NodeSettings(home=home), report, is_once=once)
        return
    if once:
        raise typer.BadParameter("of what? Name a tracker with --report", param_hint="--once")
    path = NodeSettings(home=home).rounds
    records = list(read_rounds(path))
    if not records:
        raise FarandoleError(f"no round is over yet: {path} has none; name another folder with --home")
    newest = records[-last:] if last else records
    if tensorboard is not None:
        tokens_before = sum(record.tokens for record in records[: -len(newest)])
        try:
            written = write_events(figures_of(newest, tokens_before), tensorboard)
        except ImportError as error:
            command = how_to_add("tensorboard")
            raise FarandoleError(f"a file for TensorBoard needs the Python package tensorboardX: {command}") from error
        except OSError as error:
            raise FarandoleError(f"cannot write into {tensorboard}: {error.strerror}") from error
        typer.echo(f"{written} is written; look at it with: tensorboard --logdir {tensorboard}")
    elif as_csv:
        write_csv(newest, sys.stdout)
    else:
        _print_table(newest if last else records[-20:], path)


def _report(settings: NodeSettings, target: str, *, is_once: bool) -> None:
    """Send the rounds to a tracker. Raises `FarandoleError`."""
    from random import Random

    from farandole.protocol.run.manifest import decode_manifest
    from farandole.protocol.wire.identity import peer_id_of, public_bytes

    from ...base.identity import load_or_create_key
    from ...base.interrupts import interruptible
    from ...state.store import MANIFEST_FACT, read_fact
    from ...ui.metrics.report import ReportPatience, report_rounds
    from ...ui.metrics.trackers import open_tracker, reported_run

    raw = read_fact(settings.store, MANIFEST_FACT)
    if raw is None or not settings.key.exists():
        raise FarandoleError(f"{settings.home} knows no run: join one first, or name another folder with --home")
    manifest, signed = decode_manifest(raw)
    author = public_bytes(load_or_create_key(settings.key))
    run = reported_run(manifest, signed.run_id.hex(), peer_id_of(author))
    tracker = open_tracker(target)
    try:
        with interruptible(is_gentle=True) as interruption:
            patience = ReportPatience(interruption.wait, partial(typer.echo, err=True), Random(), is_once)
            num_sent = report_rounds(settings.rounds, tracker, run, patience)
    except OSError as error:
        raise FarandoleError(f"cannot report: {error}") from error
    again = "" if is_once else "; the same command goes on from there"
    typer.echo(f"{num_sent} round{'' if num_sent == 1 else 's'} sent{again}")


def _print_table(records: Sequence[RoundRecord], path: Path) -> None:
    """Print a line for each round; the last column is cut if the terminal is too narrow."""
    from rich.console import Console
    from rich.table import Column, Table

    figures = (Column(name, no_wrap=True) for name in ("at", "round", "loss", "held out", "tokens", "seconds"))
    outer_step = Column("outer step with", no_wrap=True, overflow="ellipsis")
    table = Table(*figures, outer_step, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for record in records:
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
