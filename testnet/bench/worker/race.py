"""A member of DiLoCo with a barrier, over `torch.distributed` and gloo: the baseline of `bench race`.

    theta   <- inner steps of AdamW from phi
    delta   <- mean over all members of phi - theta        all-reduce, fp32
    m       <- 0.9 m + delta
    phi     <- phi - 0.7 (delta + 0.9 m)                   Nesterov (DiLoCo, arXiv 2311.08105, section 3.2)

Where all members have one phi, this is a node's outer step with their mean. The rest is a node's, too.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from farandole.node.base.system.tuning import TRAINING_NICENESS
from farandole.protocol.run.manifest import manifest_from_dict
from farandole.protocol.run.rules import NoLoCoConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.engine.learner import build_learner

OUTER: Final = NoLoCoConfig(momentum="nesterov", alpha=0.9, beta=0.7, gamma=0.7, codec="fp32")
# A contribution takes some seconds on these lines; a member that is gone is not waited for (`race`).
GLOO_TIMEOUT: Final = timedelta(seconds=120)
RUN_ID: Final = bytes(32)


class DiLoCoMember:
    """One member; its process runs in a home of its own."""

    def __init__(self, stack: AsyncExitStack) -> None:
        os.nice(TRAINING_NICENESS)  # as trainers are
        torch.set_num_threads(1)
        self._group = ""

    def begin(self, manifest: dict[str, Any], author: int, step_seconds: float) -> None:
        """Build a node's learner from the run's seed, with DiLoCo's outer step; ``author`` draws the batches."""
        run = msgspec.structs.replace(manifest_from_dict(manifest), outer=OUTER)
        who, settings = author.to_bytes(32, "little"), TrainerSettings(device="cpu")
        self._learner = build_learner(run, run_id=RUN_ID, author=who, settings=settings)
        self._memory = bytearray(self._learner.round_end.contribution_bytes)
        self._step_seconds = step_seconds

    def load(self, path: str) -> None:
        """Take over what another member has saved."""
        self._learner.checkpoint.load(Path(path))

    def learn(self, steps: int) -> None:
        """Take inner steps, each at least as long as this member's."""
        for _ in range(steps):
            began_at = time.monotonic()
            self._learner.learn()
            # The rest of the step of a slower machine: there is nothing to wait for but the time.
            time.sleep(max(0.0, self._step_seconds - (time.monotonic() - began_at)))

    @torch.no_grad()
    def average(self, rank: int, world: int, group: str, device: str) -> None:
        """Average with all members and take the outer step; another ``group`` has other members.

        ``group``: a file where its members meet; ``device``: the network interface.
        """
        if group != self._group:
            if self._group:
                dist.destroy_process_group()
            os.environ["GLOO_SOCKET_IFNAME"] = device
            dist.init_process_group(
                "gloo", init_method=f"file://{group}", rank=rank, world_size=world, timeout=GLOO_TIMEOUT
            )
            self._group = group
        round_end = self._learner.round_end
        round_end.contribute(self._memory)
        assert round_end.ended is not None, "it has contributed"
        made = round_end.ended.contribution
        dist.all_reduce(made.sent)
        made.sent.div_(world)
        round_end.outer.step(made, [made.sent], [1.0], is_late=False)

    def save(self, path: str) -> None:
        """Save a checkpoint."""
        partial = Path(path).with_suffix(".partial")
        self._learner.checkpoint.save(partial)
        partial.rename(path)
