"""Lists of checkpoints: on this disk, and in the run as its members report; and both for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

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
    looked_at = map(_look_at, folder.glob("stage-*.safetensors") if folder.is_dir() else ())
    found = [each for each in looked_at if each is not None]
    return sorted(found, key=lambda each: (each.stage or 0, -(each.round or 0)))


def _look_at(path: Path) -> LocalCheckpoint | None:
    """Read its header, not its values. None: a node has just removed it."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    try:
        with open_tensors(path) as file:
            round_index, steps, tokens = (int(file.metadata.get(name, "")) for name in ("round", "steps", "tokens"))
        return LocalCheckpoint(path.name, size, int(path.name.split("-")[1]), round_index, steps, tokens)
    except (ConsolidatedError, ValueError) as error:
        return LocalCheckpoint(path.name, size, problem=str(error))


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
