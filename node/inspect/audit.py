"""Replays rounds of a run without membership: `farandole run audit` with an invite.

A visitor reads the commitments in the run state, fetches starts from their authors, and has a trainer process of its
own replay them. It needs the run's text, as a member does, and a processor of the authors' class.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio
from blake3 import blake3

from farandole.protocol.rounds.audits import RoundClaim
from farandole.protocol.run.models import stage_parameters
from farandole.protocol.run.rules import OPTIMIZER_VECTORS, max_checkpoint_bytes
from farandole.protocol.state.entries import Kind
from farandole.protocol.trainer.trainer_messages import Prepare, Replay, Replayed, TrainerSettings
from farandole.protocol.wire.errors import ManifestError
from farandole.protocol.wire.identity import peer_id_of

from ..base.bandwidth import Shaping
from ..base.errors import PeerUnreachableError
from ..base.settings import NodeSettings
from ..store.consolidated.tensors import ConsolidatedError, open_tensors
from ..trainer.trainer import Trainer, open_trainer
from ..transfers.fetch import ask_for_index, fetch_checkpoint
from .peek import Visit, open_visit

# Entries come within this time after the first members have given theirs, in seconds.
SETTLE_SECONDS: Final = 3.0

Verdict = Literal["right", "wrong", "broken", "not given", "not comparable"]


class AuditedRound(msgspec.Struct, frozen=True):
    """The result of one round's replay."""

    peer_id: str
    round: int
    verdict: Verdict
    """``right``; ``wrong``: the replay's result differs; ``broken``: its start is not the end of the round before."""
    detail: str = ""


async def audit_run(settings: NodeSettings, author: bytes | None, say: Callable[[str], None]) -> list[AuditedRound]:
    """Replay a recent round of each member with commitments, or only of ``author``.

    Raises `JoinError`, `ManifestError` if the run has no audits, or `TrainerError`.
    """
    shaping = Shaping.of_mbit(settings.upload_mbit, settings.download_mbit)
    async with open_visit(settings, shaping, say) as visit:
        if not visit.manifest.audits:
            raise ManifestError("this run has no audits: its run file leaves out `audits`, so no round is committed to")
        await trio.sleep(SETTLE_SECONDS)
        with tempfile.TemporaryDirectory(prefix="farandole-audit-") as folder:
            return await _Audit(visit, Path(folder), settings, say).run(author)


class _Audit:
    """One visitor's audit; files go into ``folder``."""

    def __init__(self, visit: Visit, folder: Path, settings: NodeSettings, say: Callable[[str], None]) -> None:
        self._visit = visit
        self._folder = folder
        self._settings = settings
        self._say = say

    async def run(self, author: bytes | None) -> list[AuditedRound]:
        rows = []
        async with self._open_trainer() as trainer:
            for each in sorted(self._committed()) if author is None else [author]:
                rounds = self._committed().get(each, {})  # as of now: starts are not kept for long
                if rounds:
                    rows.append(await self._replay(trainer, rounds, random.choice(sorted(rounds)[-2:])))
        return rows

    def _committed(self) -> dict[bytes, dict[int, RoundClaim]]:
        """Return the commitments of each author, by round."""
        committed: dict[bytes, dict[int, RoundClaim]] = {}
        for entry in self._visit.gossip.state.entries(Kind.COMMITMENT):
            claim = RoundClaim(entry.author, entry.payload, entry.signed)
            committed.setdefault(entry.author, {})[claim.commitment.round] = claim
        return committed

    @asynccontextmanager
    async def _open_trainer(self) -> AsyncIterator[Trainer]:
        settings = self._settings
        prepare = Prepare(
            run_id=self._visit.conditions.run_id,
            author=bytes(32),
            manifest=msgspec.msgpack.encode(self._visit.manifest),
            settings=TrainerSettings(
                data=[str(path) for path in settings.data],
                data_weight=settings.data_weight,
                data_field=settings.data_field,
                tokenizer=str(settings.tokenizer) if settings.tokenizer else None,
                tokens=str(self._folder / "tokens"),
                checkpoints=str(self._folder / "checkpoints"),
                device="cpu",
            ),
        )
        self._say("starting a trainer to replay rounds with")
        async with open_trainer(prepare, None) as trainer:
            yield trainer

    async def _replay(self, trainer: Trainer, rounds: Mapping[int, RoundClaim], round_index: int) -> AuditedRound:
        claim = rounds[round_index]
        peer_id = peer_id_of(claim.author)

        def judged(verdict: Verdict, detail: str = "") -> AuditedRound:
            return AuditedRound(peer_id, round_index, verdict, detail)

        self._say(f"replaying round {round_index} of {peer_id}: {claim.commitment.steps} inner steps")
        path = self._folder / f"{claim.commitment.start.hex()[:16]}.safetensors"
        try:
            await self._fetch(claim, path)
        except PeerUnreachableError as error:
            return judged("not given", str(error))
        before = rounds.get(round_index - 1)
        if before is not None and before.commitment.end != await trio.to_thread.run_sync(optimizer_digest, path):
            return judged("broken", "the optimizer's means differ from those at the end of the round before")
        await trainer.send(Replay(str(path), claim.author, claim.commitment))
        while not isinstance(replayed := await trainer.receive(), Replayed):
            pass
        if not claim.is_comparable or (replayed.build, replayed.device, replayed.corpus) != claim.kind:
            commitment = claim.commitment
            return judged("not comparable", f"another text, or made with {commitment.build} on {commitment.device}")
        if replayed.problem:
            return judged("wrong", replayed.problem)
        is_right = (replayed.end, replayed.contribution) == (claim.commitment.end, claim.commitment.contribution)
        return judged("right" if is_right else "wrong")

    async def _fetch(self, claim: RoundClaim, path: Path) -> None:
        manifest, conditions = self._visit.manifest, self._visit.conditions
        max_bytes = max_checkpoint_bytes(manifest.outer, stage_parameters(manifest.model, 0))
        signed, index = await ask_for_index(conditions, claim.author, 0, max_bytes, claim.commitment.start)
        await fetch_checkpoint(conditions, signed, index, lambda: [claim.author], lambda name: True, path)


def optimizer_digest(path: Path) -> bytes:
    """Return BLAKE3 of AdamW's means in a checkpoint, as `Commitment.end`; empty if it has none."""
    digest = blake3()
    try:
        with open_tensors(path) as file:
            for vector in OPTIMIZER_VECTORS:
                for name in file.shapes:
                    if name.startswith(f"{vector}/"):
                        digest.update(file.read(name).tobytes())
    except ConsolidatedError:
        return b""
    return digest.digest()
