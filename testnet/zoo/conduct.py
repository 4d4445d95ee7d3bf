"""Exchanges and losses of a play's honest members, from their own records and checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch

from farandole.node.base.identity import load_or_create_key
from farandole.node.base.settings import NodeSettings
from farandole.node.status.round_log import RoundRecord, read_rounds
from farandole.node.store.folder import CheckpointFolder
from farandole.protocol.run.manifest import decode_manifest
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.protocol.wire.identity import peer_id_of, public_bytes
from farandole.training.engine.learner import build_learner

from ..play.launch import MANIFEST_NAME
from ..play.record import REFUSED
from ..play.report import PlayReport

# 32 batches of 16 x 64 tokens measure the loss to about 0.01; both plays use the same ones, so that the error cancels.
VALIDATION_BATCHES: Final = 32


class Conduct(msgspec.Struct, frozen=True):
    """Figures of all honest members together; an exchange between two of them counts at both."""

    losses: list[float]
    """Loss of each member's own weights on held-out text, in nats per token."""
    rounds: int
    alone: int
    """Rounds whose outer step was taken alone."""
    honest_exchanges: int
    """Committed exchanges with one another."""
    honest_refused: int
    """Exchanges with one another that the screening of either refused."""
    honest_clipped: int
    hostile_met: int
    """Exchanges with hostile members that got a verdict, or failed."""
    hostile_used: int
    """Committed exchanges with hostile members."""
    hostile_clipped: int
    detected_after: list[int | None]
    """For each member, its exchanges with hostile ones until it refused one, or averaged nothing of it; None: never."""
    warnings: list[str]
    """The first warning of each member that names a hostile one."""
    processor_share: float | None
    """Share of one core, mean of the members' daemons over their lives; None where the system does not report it."""

    @property
    def loss(self) -> float:
        """Return the mean loss over members."""
        return sum(self.losses) / len(self.losses)


def conduct_of(folder: Path, report: PlayReport) -> Conduct:
    """Read the figures from a play's folder; `TrainingError` if a checkpoint cannot be read."""
    homes = [folder / "nodes" / f"{node.index:02d}" for node in report.nodes]
    honest = {node.peer_id for node in report.nodes}
    rounds = [list(read_rounds(NodeSettings(home=home).rounds)) for home in homes]
    meetings = [list(_meetings(each)) for each in rounds]
    among = [met for each in meetings for met in each if met.partner in honest]
    hostile = [[met for met in each if met.partner not in honest] for each in meetings]
    with_hostile = [met for each in hostile for met in each]
    all_rounds = [record for each in rounds for record in each]
    # The short names of the processes that are no nodes of the scenario, as logs show them.
    intruders = [
        peer_id_of(public_bytes(load_or_create_key(home / "key")))[-8:]
        for home in sorted((folder / "nodes").iterdir())[len(homes) :]
    ]
    warnings: list[str] = []
    for home in homes:
        lines = (home / "output").read_text(errors="replace").splitlines()
        named = (line for line in lines if "warning:" in line and any(name in line for name in intruders))
        warnings += itertools.islice(named, 1)
    torch.set_num_threads(1)
    manifest, signed = decode_manifest((folder / MANIFEST_NAME).read_bytes())
    learner = build_learner(manifest, run_id=signed.run_id, author=bytes(32), settings=TrainerSettings(device="cpu"))
    losses = []
    for home in homes:
        for newest in CheckpointFolder(NodeSettings(home=home).checkpoints, 0).files()[:1]:
            learner.checkpoint.load(newest)
            losses.append(learner.evaluate(VALIDATION_BATCHES))
    seconds = [node.resources.processor_seconds for node in report.nodes if node.resources is not None]
    known = [each for each in seconds if each is not None]
    return Conduct(
        losses=losses,
        rounds=len(all_rounds),
        alone=sum(record.verdict != "committed" for record in all_rounds),
        honest_exchanges=sum(met.is_committed for met in among),
        honest_refused=sum(met.is_refused for met in among),
        honest_clipped=sum(met.clip < 1.0 for met in among),
        hostile_met=len(with_hostile),
        hostile_used=sum(met.is_committed for met in with_hostile),
        hostile_clipped=sum(met.clip < 1.0 for met in with_hostile),
        detected_after=[
            next((index + 1 for index, met in enumerate(each) if met.is_refused or met.clip == 0.0), None)
            for each in hostile
        ],
        warnings=warnings,
        processor_share=sum(known) / len(known) / report.seconds if known else None,
    )


class _Meeting(NamedTuple):
    """An exchange with a partner, and its verdict."""

    partner: str
    verdict: str
    clip: float = 1.0

    @property
    def is_committed(self) -> bool:
        return self.verdict == "committed"

    @property
    def is_refused(self) -> bool:
        return self.verdict.startswith(REFUSED)


def _meetings(rounds: Iterable[RoundRecord]) -> Iterator[_Meeting]:
    for record in rounds:
        if record.failed_partner:
            yield _Meeting(record.failed_partner, record.failure)
        if record.verdict == "committed":
            yield _Meeting(record.partner, record.verdict, record.clip)
