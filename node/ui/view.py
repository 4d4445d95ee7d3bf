"""``farandole status`` and ``farandole peers`` at the terminal: rows and members as rich draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ..base.figures import count, duration, loss
from ..status.status import MemberStatus, NodeStatus
from .headline import headline
from .rows import Emphasis, member_state, status_rows

STYLES: Final[dict[Emphasis, str]] = {
    "": "",
    "faint": "dim",
    "strong": "bold",
    "good": "green",
    "warning": "yellow",
    "well": "bold green",
    "busy": "bold cyan",
    "trouble": "bold red",
}


def status_screen(status: NodeStatus, now: float) -> RenderableType:
    """Return the whole status: health, activity, last exchanges, loss curve.

    ``now`` is Unix time.
    """
    grid = Table.grid(Column(style="dim", no_wrap=True), Column(), padding=(0, 2))
    for row in status_rows(status, now):
        grid.add_row(row.label, Text(row.value, STYLES[row.emphasis]))
    found = headline(status, now)
    first = Text(found.text, STYLES[found.level])
    if found.remedy:
        first.append(f". {found.remedy}", "not bold default")
    return Group(first, _title(status), grid)


def _title(status: NodeStatus) -> Text:
    part = "member" if status.is_member else "relay" if status.phase == "relaying" else "not a member yet"
    style = "bold yellow" if part == "not a member yet" else STYLES["well"]
    run = f"  run {status.run.run_id[:16]}" if status.run.run_id else ""
    return Text.assemble((status.run.name or "farandole", "bold"), (run, "dim"), "  ", (part, style))


def members_table(members: list[MemberStatus], providers: Sequence[int] = ()) -> Table:
    """Make the table of `farandole peers`: a line for each member, and one with several stages' ``providers``."""
    has_stages = len(providers) > 1
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    has_versions = len({member.version for member in members}) > 1
    texts, numbers = ("peer", "state", "link", "version", "device"), ("round", "steps", "tokens", "tokens/s", "loss")
    first, last = ["peer", "state", *(["stage"] if has_stages else [])], ["link", "seen"]
    for column in (*first, *numbers, *last, *(["version"] if has_versions else []), "device"):
        table.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    for member in members:
        state, emphasis = member_state(member)
        table.add_row(
            member.peer_id[-8:],
            Text(state, STYLES[emphasis]),
            *((str(member.stage),) if has_stages else ()),
            str(member.round),
            f"{member.inner_steps:,}",
            count(member.tokens),
            count(member.tokens_per_second),
            loss(member.loss),
            "this node" if member.is_self else member.path if member.is_connected else "-",
            "-" if member.last_seen_seconds is None else duration(member.last_seen_seconds),
            *((member.version or "-",) if has_versions else ()),
            Text(member.device),
        )
    if has_stages:
        live = ", ".join(f"{number} in {stage}" for stage, number in enumerate(providers))
        table.caption, table.caption_justify = f"live in each stage: {live}", "left"
    return table
