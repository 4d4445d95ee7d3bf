"""Download of a whole model from a run: every stage's checkpoint from its members, put together in a folder.

The members of each stage are asked for their newest checkpoint, and save a new one if it is old. The newest of these
that is not far ahead of the others is fetched, from all peers that hold a copy. With ``merge``, several replicas of
each stage are fetched, and their mean is kept.
"""

from __future__ import annotations

import random
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.checkpoints.blocks import Index, SignedIndex
from farandole.protocol.epochs.lease_claims import epoch_progress
from farandole.protocol.rounds.pairing import MAX_ROUNDS_BEHIND
from farandole.protocol.run.manifest import EpochsConfig
from farandole.protocol.run.models import stage_parameters
from farandole.protocol.run.rules import max_checkpoint_bytes, required_vectors
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.identity import short_name

from ..base.errors import PeerUnreachableError
from ..base.settings import NodeSettings
from ..store.consolidated.folder import consolidate
from ..store.consolidated.tensors import ConsolidatedError, check_is_new
from ..transfers.block_file import has_begun
from ..transfers.receiver import FetchProgress, ask_for_index, fetch_checkpoint
from .peek import Visit, open_visit

# Members of a stage that are asked at once for their newest checkpoint: each may have to save one.
MAX_ASKED: Final = 8
# Number of attempts to fetch a stage that no peer serves, and the wait between them.
ATTEMPTS: Final = 5
RETRY_SECONDS: Final = 5.0

Show = Callable[[str, FetchProgress], None]


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that a peer holds."""

    signed: SignedIndex
    index: Index
    donor: bytes


async def pull(
    settings: NodeSettings,
    to: Path,
    key: Ed25519PrivateKey,
    *,
    merge: int,
    say: Callable[[str], None],
    show: Show,
) -> bytes:
    """Visit the run of the settings' invite, and pull its model; see `Pull`. Raises `JoinError` as well."""
    check_is_new(to)
    async with open_visit(settings, say) as visit:
        return await Pull(visit, to, key, say, show, merge).run()


@dataclass(frozen=True)
class Pull:
    """One pull of a run's model to a folder. ``say`` prints progress for people, ``show`` a download's progress."""

    visit: Visit
    to: Path
    key: Ed25519PrivateKey
    say: Callable[[str], None]
    show: Show
    merge: int = 1

    @property
    def parts(self) -> Path:
        """Folder of the downloads; removed when the model is complete."""
        return self.to.with_name(f".{self.to.name}.parts")

    async def run(self) -> bytes:
        """Fetch and write everything; return the checkpoint's id. Downloads resume after an interruption.

        Raises `FarandoleError`.
        """
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConsolidatedError(f"cannot write {self.parts}: {error.strerror}") from error
        epochs = self._epochs()  # before the weights, which then cover all of this progress
        stages = [await self.fetch_stage(stage) for stage in range(self.visit.manifest.model.num_stages)]
        self.say("putting the stages together" if len(stages) > 1 or self.merge > 1 else "writing the model")
        vectors = required_vectors(self.visit.manifest.outer)
        checkpoint_id = await trio.to_thread.run_sync(
            consolidate, self.to, self.key, self.visit.raw_manifest, stages, vectors, epochs
        )
        shutil.rmtree(self.parts, ignore_errors=True)
        return checkpoint_id

    def _epochs(self) -> EpochsConfig | None:
        """Return the run's progress in its data, as its members report it."""
        visit = self.visit
        if not visit.manifest.data.epochs:
            return None
        progress = epoch_progress(visit.gossip.state, visit.live())
        if progress is None:
            return None
        corpus, epoch, done = progress
        return EpochsConfig(
            run_id=visit.manifest.slice_order(visit.conditions.run_id).hex(),
            corpus=corpus.hex(),
            epoch=min(epoch, visit.manifest.data.epochs),  # whatever they say, all are over then
            done=done.to_bytes(-(-done.bit_length() // 8), "little").hex(),
        )

    async def fetch_stage(self, stage: int) -> list[Path]:
        """Download one stage's checkpoints into `parts`; return their files. Raises `FarandoleError`."""
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await trio.sleep(RETRY_SECONDS)
            found, problem = await self.find(stage)
            if not found:
                continue
            if len(found) < self.merge:
                self.say(f"{self._name(stage)}: {len(found)} of {self.merge} replicas are available")
            try:
                return [await self._fetch(each) for each in found]
            except PeerUnreachableError as error:
                problem = str(error)
        raise FarandoleError(
            f"{self._name(stage)}: no member gives its checkpoint ({problem or 'none is live'}). Try again when a node "
            "that holds it is there"
        )

    def _name(self, stage: int) -> str:
        return "the model" if self.visit.manifest.model.num_stages == 1 else f"stage {stage}"

    async def find(self, stage: int) -> tuple[list[_Found], str]:
        """Find up to ``merge`` checkpoints of different replicas; return them, and the failures of other peers.

        A checkpoint of which an earlier attempt has some blocks comes first, if a peer still holds it; then the newest.
        """
        manifest = self.visit.manifest
        max_bytes = max_checkpoint_bytes(manifest.outer, stage_parameters(manifest.model, stage))
        found: list[_Found] = []
        problems: list[str] = []

        async def ask(donor: bytes, wanted: Sequence[bytes | None]) -> None:
            for checkpoint_id in wanted:
                try:
                    signed, index = await ask_for_index(self.visit.conditions, donor, stage, max_bytes, checkpoint_id)
                except PeerUnreachableError as error:
                    problems.append(f"{short_name(donor)}: {error}")
                else:
                    found.append(_Found(signed, index, donor))
                    return

        members = list(self.visit.members_of(stage))
        held = [(holder, notice.id) for holder, notice in self.visit.notices() if notice.stage == stage]
        copies = [(holder, checkpoint_id) for holder, checkpoint_id in held if holder not in members]
        begun = [(holder, checkpoint_id) for holder, checkpoint_id in held if has_begun(self.parts, checkpoint_id)]
        asked = [(member, None) for member in random.sample(members, min(MAX_ASKED, len(members)))]
        questions: dict[bytes, list[bytes | None]] = {}  # a donor answers one at a time
        for donor, checkpoint_id in (*begun[:MAX_ASKED], *asked, *copies[:MAX_ASKED]):
            questions.setdefault(donor, []).append(checkpoint_id)
        async with trio.open_nursery() as nursery:
            for donor, wanted in questions.items():
                nursery.start_soon(ask, donor, wanted)
        return self._choose(found), "; ".join(problems)

    def _choose(self, found: Sequence[_Found]) -> list[_Found]:
        begun = {each.signed.id for each in found if has_begun(self.parts, each.signed.id)}
        sound = []
        for each in found:
            rounds = self.visit.rounds_of(each.index.stage)
            usual = statistics.median_low(rounds) if rounds else each.index.round
            # Otherwise the peer that reports the highest number would stand for the whole run.
            if each.signed.id in begun or each.index.round <= usual + MAX_ROUNDS_BEHIND:
                sound.append(each)
                continue
            self.say(
                f"{self._name(each.index.stage)}: not the checkpoint of {short_name(each.index.author)}, which would "
                f"be of round {each.index.round}: the run is in round {usual}, say most"
            )
        newest = max((each.index.round for each in sound), default=0)
        chosen: dict[bytes, _Found] = {}
        for each in sorted(sound, key=lambda each: (each.signed.id not in begun, -each.index.round)):
            if each.signed.id in begun or each.index.round >= newest - MAX_ROUNDS_BEHIND:
                chosen.setdefault(each.index.author, each)
        return list(chosen.values())[: self.merge]

    async def _fetch(self, found: _Found) -> Path:
        index = found.index
        prefixes = tuple(f"{vector}/" for vector in required_vectors(self.visit.manifest.outer))
        path = self.parts / f"stage-{index.stage}-{index.author.hex()[:16]}.safetensors"
        name = f"{self._name(index.stage)}, round {index.round} of {short_name(index.author)}"

        def donors() -> list[bytes]:
            holders = [holder for holder, notice in self.visit.notices() if notice.id == found.signed.id]
            return [found.donor, *(holder for holder in holders if holder != found.donor)]

        fetched = await fetch_checkpoint(
            self.visit.conditions,
            found.signed,
            index,
            donors,
            lambda tensor: tensor.startswith(prefixes),
            path,
            lambda progress: self.show(name, progress),
        )
        given = len(fetched.num_by_donor)
        self.say(f"{name}: from {given} {'member' if given == 1 else 'members'}, hashes right")
        return path
