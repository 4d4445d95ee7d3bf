"""Keeps this node's leases of the data: passed to the trainer, published in the run state, and saved on disk.

The leases outlive trainers: a restarted trainer goes on where the last one stopped. A node whose part of the model
draws no data has no leases, and learns from the others when all epochs are over.

A slice counts as done when an inner step has been taken on it. A node that dies then loses what every round loses with
it, the inner steps since its last outer step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from farandole.protocol.epochs.lease_claims import Standing, median_epoch
from farandole.protocol.epochs.leases import Leases, Output
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.slices import parts
from farandole.protocol.state.believing import Acquaintance
from farandole.protocol.state.entries import Beat, Kind, Lease
from farandole.protocol.trainer import trainer_messages as messages

from ..state.gossip import GossipService
from ..state.membership import Membership
from ..state.store import Store, StoreError
from ..status.journal import Journal
from ..status.status import DataStatus

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
# The run state keeps the same for an hour; this is for runs from which all nodes have been away for longer.
SAVE_SECONDS: Final = 10.0
LEASES_FACT: Final = "leases"

_Saved = tuple[bytes, list[tuple[int, Lease]]]
"""The hash of the text, and what `Leases.saved` gave."""


@dataclass(eq=False)
class LeaseService:
    """One node's leases, in a run that counts epochs."""

    manifest: Manifest
    author: bytes
    gossip: GossipService
    store: Store
    journal: Journal
    membership: Membership
    over: trio.Event = field(default_factory=trio.Event)
    """Set when all epochs of the run are over."""
    _leases: Leases | None = None
    _send: Callable[[messages.DrawSlices], None] | None = None
    _unsaid: deque[tuple[int, Lease]] = field(default_factory=deque)
    _acquaintance: Acquaintance = field(default_factory=Acquaintance)
    _restored: _Saved | None = None
    _saved_at: float = 0.0

    def status(self) -> DataStatus | None:
        """Return the state of the data, for display; None at a node that has no leases."""
        leases = self._leases
        if leases is None:
            return None
        return DataStatus(
            epoch=min(leases.epoch + 1, leases.num_epochs),
            epochs=leases.num_epochs,
            slices=leases.sections.num_slices,
            done=leases.sections.num_slices if leases.is_over else leases.done.count,
            leased=leases.num_leased,
            doubted=leases.num_doubted,
            others_texts=len(leases.strangers),
        )

    async def restore(self) -> None:
        """Read what an earlier life has saved; call it before a trainer begins."""
        try:
            raw = await self.store.get_fact(LEASES_FACT)
            if raw is not None:
                self._restored = msgspec.msgpack.decode(raw, type=_Saved)
        except (StoreError, msgspec.MsgspecError) as error:
            self.journal.warn(f"what was leased of the data is not known any more: {error}")

    async def run(self) -> None:
        """Follow the run and keep the leases, until cancelled."""
        while True:
            if self._leases is None:
                # A stage that draws no data: note when the members that draw some have reached its end.
                said = (self.gossip.state.payload(author, Lease) for author in self.membership.origins())
                epoch = median_epoch(lease for lease in said if lease is not None)
                if epoch is not None and epoch >= self.manifest.data.epochs:
                    self.over.set()
            else:
                self._tick(self._leases)
            await self._say()
            if trio.current_time() - self._saved_at >= SAVE_SECONDS:
                await self._save()
            await trio.sleep(TICK_SECONDS)

    async def leave(self) -> None:
        """Give the leases back to the run, so that a next life has none of them."""
        if self._leases is not None:
            self._carry_out(self._leases.leave())
        await self._say()
        await self._save()

    # Trainers

    def begin(self, prepared: messages.Prepared, send: Callable[[messages.DrawSlices], None]) -> None:
        """Start with a ready trainer. One without slices holds a stage that draws none: the leases are given back."""
        if not prepared.num_slices:
            if self._leases is not None:
                self._carry_out(self._leases.leave())
            self._leases = None
            return
        leases = self._leases
        if leases is None or (leases.corpus, leases.sections.num_slices) != (prepared.corpus, prepared.num_slices):
            leases = self._begin_leases(prepared.corpus, prepared.num_slices)
        self._send = send
        self._carry_out([leases.assignment()])

    def _begin_leases(self, corpus: bytes, num_slices: int) -> Leases:
        self._leases = leases = Leases(
            self.author,
            corpus,
            num_slices,
            self.manifest.data.epochs,
            exchange_seconds=self.manifest.rounds.exchange_seconds,
        )
        start = self.manifest.start
        epochs = None if start is None else start.epochs
        if epochs is not None and bytes.fromhex(epochs.corpus) != corpus:
            self.journal.warn("the text is another than that of the run which this one goes on from: epoch 1 begins")
        elif epochs is not None:  # as if this node had published the progress of the run that this one goes on from
            done = [Lease(epochs.epoch, corpus, (), raw) for raw in parts(epochs.mask & leases.sections.all)]
            for index, lease in enumerate((Lease(epochs.epoch, corpus), *done)):
                leases.hear(self.author, index, lease)
            if self._restored is None:  # an earlier life of this run is further
                share = leases.done.count / leases.sections.num_slices
                where = f"epoch {epochs.epoch + 1} of {leases.num_epochs}"
                self.journal.say(f"the data goes on in {where}, {share:.0%} of it done")
        if self._restored is not None and self._restored[0] == corpus:
            for index, lease in self._restored[1]:
                leases.hear(self.author, index, lease)
        leases.follow(self.gossip.state)
        return leases

    def trained(self, report: messages.SlicesTrained) -> None:
        """Note that the trainer has trained on slices."""
        logger.debug("trained on slices of epoch %d: %s", report.epoch, report.ranges)
        if self._leases is not None:
            self._leases.trained(report)

    def end(self) -> None:
        """Note that the trainer is gone."""
        self._send = None

    # The machine

    def _tick(self, leases: Leases) -> None:
        leases.follow(self.gossip.state)
        origins = self.membership.origins()  # the live members that draw data, and what weighs their claims
        found = ((author, self.gossip.state.payload(author, Beat)) for author in origins)
        beats = {author: beat for author, beat in found if beat is not None}
        tokens = self.manifest.inner.batch_size * self.manifest.model.context
        partners = {author: beat.partner for author, beat in beats.items()}
        proven = self._acquaintance.proven(self.membership.partners.keys(), partners)
        speeds = {author: beat.tokens_per_second / tokens for author, beat in beats.items()}
        num_strangers, epoch = len(leases.strangers), leases.epoch
        own_speed = self.journal.state.tokens_per_second / tokens or None
        standing = Standing(origins, proven, speeds, self.gossip.liveness.period, own_speed)
        self._carry_out(leases.tick(standing, trio.current_time()))
        if leases.is_over:
            self.over.set()
        elif leases.epoch != epoch:
            self.journal.say(f"epoch {leases.epoch + 1} of {leases.num_epochs} begins")
        if len(leases.strangers) > num_strangers:
            self.journal.warn(
                f"{len(leases.strangers)} of {len(origins)} other nodes train on another text than this one, and "
                "share no slices with it: all should name the same files or folders with --data"
            )

    def _carry_out(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if not isinstance(output, messages.DrawSlices):
                self._unsaid.append(output)
            elif self._send is not None:
                self._send(output)

    async def _say(self) -> None:
        """Publish in order, since `leave` may be called while `run` is publishing."""
        while self._unsaid:
            await self.gossip.publish(Kind.LEASE, *self._unsaid.popleft())

    async def _save(self) -> None:
        if self._leases is None:
            return
        self._saved_at = trio.current_time()
        saved: _Saved = (self._leases.corpus, self._leases.saved())
        loss = "after a restart this node may not know which data it had leased"
        await self.store.remember(LEASES_FACT, msgspec.msgpack.encode(saved), self.journal, loss)
