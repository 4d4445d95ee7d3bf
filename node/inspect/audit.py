"""Replays rounds of a run without membership: `farandole run audit` with an invite.

A visitor reads the commitments in the run state, fetches starts from their authors, and has a trainer process of its
own replay them. It needs the run's text, as a member does, and a processor of the authors' class.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio
from blake3 import blake3

from farandole.protocol.rounds.audits import RoundClaim
from farandole.protocol.run.models import stage_parameters
from farandole.protocol.run.rules import OPTIMIZER_VECTORS, max_checkpoint_bytes
from farandole.protocol.state.entries import Kind
from farandole.protocol.trainer.trainer_messages import Prepare, Replay, Replayed
from farandole.protocol.wire.errors import ManifestError
from farandole.protocol.wire.identity import peer_id_of

from ..base.errors import PeerUnreachableError
from ..base.settings import NodeSettings
from ..store.consolidated.tensors import ConsolidatedError, open_tensors
from ..trainer.trainer import Trainer, open_trainer, settings_of
from ..transfers.receiver import ask_for_index, fetch_checkpoint
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


async def audit_run(settings: NodeSettings, say: Callable[[str], None]) -> list[AuditedRound]:
    """Replay a recent round of each member with commitments.

    Raises `JoinError`, `ManifestError` if the run has no audits, or `TrainerError`.
    """
    async with open_visit(settings, say) as visit:
        if not visit.manifest.audits:
            raise ManifestError("this run has no audits: its run file leaves out `audits`, so no round is committed to")
        await trio.sleep(SETTLE_SECONDS)

        def committed() -> dict[bytes, dict[int, RoundClaim]]:
            """Return the commitments of each author, by round."""
            found: dict[bytes, dict[int, RoundClaim]] = {}
            for entry in visit.gossip.state.entries(Kind.COMMITMENT):
                claim = RoundClaim(entry.author, entry.payload, entry.signed)
                found.setdefault(entry.author, {})[claim.commitment.round] = claim
            return found

        with tempfile.TemporaryDirectory(prefix="farandole-audit-") as name:
            folder = Path(name)
            prepare = Prepare(
                run_id=visit.conditions.run_id,
                author=bytes(32),
                manifest=msgspec.msgpack.encode(visit.manifest),
                settings=settings_of(replace(settings, home=folder), device="cpu", microbatch=0),
            )
            say("starting a trainer to replay rounds with")
            rows = []
            async with open_trainer(prepare) as trainer:
                for each in sorted(committed()):
                    rounds = committed().get(each, {})  # as of now: starts are not kept for long
                    if rounds:
                        round_index = random.choice(sorted(rounds)[-2:])
                        steps = rounds[round_index].commitment.steps
                        say(f"replaying round {round_index} of {peer_id_of(each)}: {steps} inner steps")
                        verdict, detail = await _replay(visit, trainer, rounds, round_index, folder)
                        rows.append(AuditedRound(peer_id_of(each), round_index, verdict, detail))
            return rows


async def _replay(
    visit: Visit, trainer: Trainer, rounds: Mapping[int, RoundClaim], round_index: int, folder: Path
) -> tuple[Verdict, str]:
    """Fetch a round's start into ``folder`` and replay the round; return the verdict, and its reason."""
    claim, before = rounds[round_index], rounds.get(round_index - 1)
    commitment = claim.commitment
    path = folder / f"{commitment.start.hex()[:16]}.safetensors"
    manifest, conditions = visit.manifest, visit.conditions
    max_bytes = max_checkpoint_bytes(manifest.outer, stage_parameters(manifest.model, 0))
    try:
        signed, index = await ask_for_index(conditions, claim.author, 0, max_bytes, commitment.start)
        await fetch_checkpoint(conditions, signed, index, lambda: [claim.author], lambda name: True, path)
    except PeerUnreachableError as error:
        return "not given", str(error)
    if before is not None and before.commitment.end != await trio.to_thread.run_sync(optimizer_digest, path):
        return "broken", "the optimizer's means differ from those at the end of the round before"
    await trainer.send(Replay(str(path), claim.author, commitment))
    while not isinstance(replayed := await trainer.receive(), Replayed):
        pass
    if not claim.is_comparable or (replayed.build, replayed.device, replayed.corpus) != claim.kind:
        return "not comparable", f"another text, or made with {commitment.build} on {commitment.device}"
    if replayed.problem:
        return "wrong", replayed.problem
    is_right = (replayed.end, replayed.contribution) == (commitment.end, commitment.contribution)
    return "right" if is_right else "wrong", ""


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
