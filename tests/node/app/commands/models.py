"""Models that have trained a little, where commands find them: folders of `checkpoint pull`, and nodes' own."""

from __future__ import annotations

from pathlib import Path

from farandole.node.state.store import MANIFEST_FACT, open_store
from farandole.node.store.consolidated.folder import consolidate
from farandole.node.store.folder import CheckpointFolder
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.run.rules import NoLoCoConfig, required_vectors
from farandole.training.engine.learner import Learner

from ...store.consolidated.runs import KEY, learner_of, save_stages


def folder_of(learner: Learner, signed: SignedManifest, to: Path) -> Path:
    """Write a learner's weights as `checkpoint pull` does."""
    stages = save_stages(learner, signed, to.with_name("run"), "replica")
    consolidate(to, KEY, signed.encode(), [[stage] for stage in stages], required_vectors(NoLoCoConfig()))
    return to


async def node_of(home: Path, signed: SignedManifest, rounds: int) -> Learner:
    """Make a node's data directory with the checkpoints of this many rounds; return what trained them."""
    folder = CheckpointFolder(home / "checkpoints", 0)
    folder.path.mkdir(parents=True)
    async with open_store(home / "store.sqlite") as store:
        await store.put_fact(MANIFEST_FACT, signed.encode())
    learner = learner_of(signed)
    for round_index in range(1, rounds + 1):
        learner.learn()
        learner.round_end.apply(None)
        learner.checkpoint.save(folder.file(round_index))
    return learner
