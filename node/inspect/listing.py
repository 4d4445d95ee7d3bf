"""Lists of checkpoints: on this disk, and in the run as its members report; and both for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Column, Table

from farandole.protocol.state.entries import CheckpointNotice
from farandole.protocol.wire.identity import peer_id_of

from ..base.bandwidth import Shaping
from ..base.control import NoNodeError, call
from ..base.figures import count, size
from ..base.settings import NodeSettings
from ..store.consolidated.tensors import ConsolidatedError, open_tensors
from .peek import open_visit

_NUMBERS: Final = ("stage", "round", "inner steps", "tokens", "size")
_OF_OFFERS: Final = (Column("id"), Column("held by", overflow="fold"))


class LocalCheckpoint(msgspec.Struct, frozen=True):
    """A file in a node's folder."""

    path: str
    size: int
    """Bytes."""
    stage: int | None = None
    round: int | None = None
    inner_steps: int | None = None
    tokens: int | None = None
    problem: str = ""
    """Why it cannot be read."""


class CheckpointOffer(msgspec.Struct, frozen=True):
    """A checkpoint that live members of the run hold."""

    id: str
    """In hexadecimal."""
    stage: int
    round: int
    inner_steps: int
    tokens: int
    size: int
    """Bytes."""
    holders: tuple[str, ...]
    """Peer ids."""


def local_checkpoints(folder: Path) -> list[LocalCheckpoint]:
    """List the files in a node's folder of checkpoints, the newest of each stage first."""
    found = []
    for path in folder.glob("stage-*.safetensors") if folder.is_dir() else ():
        try:
            size = path.stat().st_size
            with open_tensors(path) as file:  # reads its header, not its values
                found.append(LocalCheckpoint(path.name, size, int(path.name.split("-")[1]), *file.counters))
        except FileNotFoundError:  # a node has just removed it
            continue
        except (ConsolidatedError, ValueError) as error:
            found.append(LocalCheckpoint(path.name, size, problem=str(error)))
    return sorted(found, key=lambda each: (each.stage or 0, -(each.round or 0)))


def offers_of(notices: Iterable[tuple[bytes, CheckpointNotice]]) -> list[CheckpointOffer]:
    """Group members' notices by checkpoint; the newest of each stage first."""
    told: dict[tuple[int, int, bytes], tuple[CheckpointNotice, list[str]]] = {}
    for holder, notice in notices:
        _, holders = told.setdefault((notice.stage, -notice.round, notice.id), (notice, []))
        holders.append(peer_id_of(holder))
    return [
        CheckpointOffer(
            notice.id.hex(),
            notice.stage,
            notice.round,
            notice.inner_steps,
            notice.total_tokens,
            notice.size,
            tuple(sorted(holders)),
        )
        for _, (notice, holders) in sorted(told.items(), key=lambda item: item[0])
    ]


def node_offers(home: Path) -> list[CheckpointOffer] | None:
    """Return the offers that the node that runs here knows; None if no node runs here."""
    try:
        return msgspec.convert(call(home, "checkpoints"), list[CheckpointOffer])
    except NoNodeError:
        return None


async def visit_offers(settings: NodeSettings, say: Callable[[str], None]) -> list[CheckpointOffer]:
    """Return the offers of the members of the invite's run. Raises `JoinError` if none can be reached."""
    async with open_visit(settings, Shaping(), say) as visit:
        return offers_of(visit.notices())


def checkpoints_screen(
    folder: Path, local: Sequence[LocalCheckpoint], offers: Sequence[CheckpointOffer] | None
) -> Group:
    """Show the checkpoints here, and the run's (None: unknown, because no node runs here)."""
    here, elsewhere = _table(f"in {folder}", Column("file", overflow="fold")), _table("in the run", *_OF_OFFERS)
    for each in local:
        numbers = ["", "damaged", "", "", size(each.size)] if each.problem else _numbers(each)
        here.add_row(*numbers, each.path)
    for offer in offers or ():
        elsewhere.add_row(*_numbers(offer), offer.id[:16], ", ".join(holder[-8:] for holder in offer.holders))
    parts: list[RenderableType] = [here if local else f"no checkpoint in {folder}"]
    if offers is None:
        parts.append("no node runs here; what a run's members hold, an invite shows: farandole checkpoint list INVITE")
    else:
        parts.append(elsewhere if offers else "no member of the run has told of a checkpoint yet")
    return Group(*parts)


def _table(title: str, *others: Column) -> Table:
    """Make a table with the columns that checkpoints here and elsewhere share, and these."""
    numbers = [Column(name, justify="right", overflow="fold") for name in _NUMBERS]
    return Table(*numbers, *others, title=title, title_justify="left")


def _numbers(each: LocalCheckpoint | CheckpointOffer) -> list[str]:
    return [str(each.stage), str(each.round), str(each.inner_steps), count(each.tokens or 0), size(each.size)]
