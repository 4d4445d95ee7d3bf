"""Lists of checkpoints: on this disk, and in the run as its members report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from farandole.protocol.state.entries import CheckpointNotice
from farandole.protocol.wire.identity import peer_id_of

from ..base.bandwidth import Shaping
from ..base.control import NoNodeError, call
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
