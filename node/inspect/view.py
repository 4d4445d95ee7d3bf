"""Lists of checkpoints for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Column, Table

from ..base.figures import count, size
from .listing import CheckpointOffer, LocalCheckpoint


def checkpoints_screen(
    folder: Path, local: Sequence[LocalCheckpoint], offers: Sequence[CheckpointOffer] | None
) -> Group:
    """Show the checkpoints here, and the run's (None: unknown, because no node runs here)."""
    parts: list[RenderableType] = [_local_table(folder, local) if local else f"no checkpoint in {folder}"]
    if offers is None:
        parts.append("no node runs here; what a run's members hold, an invite shows: farandole checkpoint list INVITE")
    else:
        parts.append(_offers_table(offers) if offers else "no member of the run has told of a checkpoint yet")
    return Group(*parts)


def _local_table(folder: Path, local: Sequence[LocalCheckpoint]) -> Table:
    names = ("stage", "round", "inner steps", "tokens", "size")
    numbers = [Column(name, justify="right", overflow="fold") for name in names]
    table = Table(Column("file", overflow="fold"), *numbers, title=f"in {folder}", title_justify="left")
    for each in local:
        if each.problem:
            table.add_row(each.path, "damaged", "", "", "", size(each.size))
        else:
            table.add_row(each.path, *_numbers(each.stage, each.round, each.inner_steps, each.tokens), size(each.size))
    return table


def _offers_table(offers: Sequence[CheckpointOffer]) -> Table:
    numbers = [Column(name, justify="right") for name in ("stage", "round", "inner steps", "tokens", "size")]
    table = Table(*numbers, "id", Column("held by", overflow="fold"), title="in the run", title_justify="left")
    for offer in offers:
        holders = ", ".join(holder[-8:] for holder in offer.holders)
        row = _numbers(offer.stage, offer.round, offer.inner_steps, offer.tokens)
        table.add_row(*row, size(offer.size), offer.id[:16], holders)
    return table


def _numbers(stage: int | None, round_index: int | None, inner_steps: int | None, tokens: int | None) -> list[str]:
    return [str(stage), str(round_index), str(inner_steps), count(tokens or 0)]
