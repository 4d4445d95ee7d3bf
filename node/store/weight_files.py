"""The paths of each stage's weights in a node's folder, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farandole.protocol.checkpoints.blocks import BLOCK_BYTES
from farandole.protocol.run.cut import stage_parameters
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.vectors import max_checkpoint_bytes, required_bytes
from farandole.protocol.wire.safetensors import MAX_HEADER_BYTES

from ..base.settings import NodeSettings
from .disk_space import DiskPlan, plan_disk, used_bytes
from .folder import CheckpointFolder, saved_round


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of one node, by stage. Methods that read or remove files block."""

    settings: NodeSettings
    manifest: Manifest

    @property
    def num_stages(self) -> int:
        """Return the number of the model's stages; 1: it is not cut."""
        return self.manifest.model.num_stages

    @property
    def disk(self) -> int:
        """Return the maximum bytes of the node's folder; 0: no limit."""
        return round(self.settings.disk * 1e9)

    def copied_stage(self, stage: int) -> int:
        """Return the stage of which a node of ``stage`` keeps a copy."""
        return (stage + 1) % self.num_stages

    def max_bytes(self, stage: int) -> int:
        """Return the maximum bytes of a checkpoint of a stage."""
        return max_checkpoint_bytes(self.manifest.outer, stage_parameters(self.manifest.model, stage))

    def required_bytes(self, stage: int) -> int:
        """Return the bytes that a newcomer downloads of a stage, without the header."""
        return required_bytes(self.manifest.outer, stage_parameters(self.manifest.model, stage))

    def plan(self, stage: int) -> DiskPlan:
        """Plan what a node of a stage keeps on its disk. Raises `DiskError` if the minimum exceeds the limit."""
        copy_bytes = self.required_bytes(self.copied_stage(stage)) + MAX_HEADER_BYTES + BLOCK_BYTES
        text_bytes = used_bytes(self.settings.tokens) if self.disk else 0  # of a file or two
        return plan_disk(self.disk, self.max_bytes(stage), copy_bytes, text_bytes)

    def fetched(self, stage: int) -> Path:
        """Return the path of what was fetched for the trainer of a stage."""
        return self.settings.fetched(None if self.num_stages == 1 else stage)

    def rounds(self, stage: int) -> tuple[int | None, int | None]:
        """Return the rounds of the newest own checkpoint of a stage and of what was fetched; None if unreadable."""
        files = CheckpointFolder(self.settings.checkpoints, stage).files()
        own = next((found for path in files if (found := saved_round(path)) is not None), None)
        return own, saved_round(self.fetched(stage))

    def clean(self, stage: int) -> None:
        """Remove half-written files, and what the plan has no room for; call it before a trainer of a stage starts.

        Checkpoints of stages that this node has left are not in the plan. Raises `DiskError`.
        """
        CheckpointFolder(self.settings.checkpoints, stage).clean()
        if self.disk:
            for each in range(self.num_stages):
                num_kept = self.plan(stage).num_kept if each == stage else 0
                CheckpointFolder(self.settings.checkpoints, each).trim(num_kept)
