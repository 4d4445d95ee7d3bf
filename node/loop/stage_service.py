"""Assigns this node its stage, and moves it: carries out what `farandole.protocol.stages.stage_choice` decides.

A move costs the run as little as possible: the weights are fetched while training runs, then the node announces its new
stage and restarts its trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio

from farandole.protocol.rounds.training_events import Signal
from farandole.protocol.stages.stage_choice import LEASE_SECONDS, StageChoice, View, first_stage
from farandole.protocol.state.entries import Member

from ..base.errors import JoinError
from ..base.settings import NodeSettings
from ..state.membership import Membership
from ..state.store import Store
from ..status.journal import Journal
from ..transfers.weights import Weights
from .training import Training

STAGE_FACT: Final = "stage"

DECIDE_INTERVAL: Final = 1.0
# A lease lives for three minutes (`protocol.entries`).
RENEW_INTERVAL: Final = 60.0
# A move must have been worth it for this many heartbeats.
PATIENT_BEATS: Final = 6.0
# A newcomer's trainer starts when nothing has changed for `QUIET_SECONDS`, or after `MAX_QUIET_SECONDS`.
QUIET_SECONDS: Final = 3.0
MAX_QUIET_SECONDS: Final = 20.0


@dataclass(eq=False)
class StageService:
    """One node's stage of a model that is cut into several: held, and stored for the node's next start.

    ``settings.stage`` is the stage that the volunteer has fixed.
    """

    membership: Membership
    weights: Weights
    author: bytes
    store: Store
    journal: Journal
    settings: NodeSettings
    training: Training

    def __post_init__(self) -> None:
        last, wanted = self.membership.num_stages - 1, self.settings.stage
        if wanted is not None and wanted > last:
            raise JoinError(f"--stage {wanted}: the run's model has {'no stage but 0' if not last else f'0 to {last}'}")
        self._choice = StageChoice(self.author, PATIENT_BEATS * self.settings.heartbeat_seconds)

    async def begin(self) -> None:
        """Take the first stage: the volunteer's, or an earlier life's, or the one that the run needs most."""
        membership, stage = self.membership, self.settings.stage
        if stage is None and (stored := await self.store.get_fact(STAGE_FACT)) is not None:
            stage = int(stored)
        if stage is None or stage >= membership.num_stages:
            stage = first_stage(self._view(), self.author)
        await self._hold(stage)

    async def run(self) -> None:
        """Decide on moves and carry them out, until cancelled."""
        membership = self.membership
        while True:
            await trio.sleep(DECIDE_INTERVAL)
            if self.weights.provider.trainer_stage not in (None, membership.stage):
                self.training.handle(Signal.RESTART)  # it was still being started when this node moved
            if self.settings.stage is not None:
                continue
            match self._choice.decide(self._view(), trio.current_time()):
                case ("claim", target):
                    await membership.lease(target, is_settled=False)
                case ("give back", _):
                    await membership.lease(membership.stage, is_settled=False)
                case ("move", target) if membership.is_newcomer:
                    await self._hold(target)
                    self.training.handle(Signal.RESTART)
                case ("move", target):
                    await self._move(target)

    def _view(self) -> View:
        membership = self.membership
        own = {self.author: Member(membership.stage, speed=int(membership.speed))}
        stages = range(membership.num_stages)
        return View(
            membership.providers() | own,
            membership.num_stages,
            membership.leases(),
            membership.newcomers(),
            download_seconds=max(self.weights.download_seconds(stage) for stage in stages),
        )

    async def _move(self, target: int) -> None:
        """Move with a lease: fetch the weights while the trainer works on, then switch stages."""
        membership, source = self.membership, self.membership.stage
        self.journal.say(f"moving from stage {source} to stage {target}, which needs it more")

        async def renew_lease() -> None:
            while True:
                await membership.lease(target, is_settled=True)
                await trio.sleep(RENEW_INTERVAL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(renew_lease)
            if await self.weights.fetch_ahead(target):
                await self._hold(target)
                self.training.handle(Signal.RESTART)
                await trio.sleep(LEASE_SECONDS)  # so that all know that this node is there before others may follow
            else:
                self.journal.warn(f"nobody gave the weights of stage {target}: staying in stage {source}")
            nursery.cancel_scope.cancel()
        await membership.lease(membership.stage, is_settled=False)

    async def _hold(self, stage: int) -> None:
        membership = self.membership
        self.weights.provider.forget_own()
        await membership.hold(stage)
        self.journal.say(f"this node holds stage {stage} (of 0 to {membership.num_stages - 1})")
        loss = "after a restart this node may take another stage"
        await self.store.remember(STAGE_FACT, b"%d" % stage, self.journal, loss)


async def wait_quiet(membership: Membership, journal: Journal) -> None:
    """Wait, before this node trains, until the nodes that began with it have spread over the stages."""
    seen, since = membership.nodes_of_stages(), trio.current_time()
    with trio.move_on_after(MAX_QUIET_SECONDS):
        while membership.is_newcomer and trio.current_time() - since < QUIET_SECONDS:
            journal.enter("preparing", f"stage {membership.stage}; others choose theirs", "other nodes' stages")
            await trio.sleep(DECIDE_INTERVAL / 2)
            if membership.nodes_of_stages() != seen:
                seen, since = membership.nodes_of_stages(), trio.current_time()
