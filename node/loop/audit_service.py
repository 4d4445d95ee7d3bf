"""Keeps this node's audits: publishes its commitments, gives their starts, has other nodes' rounds replayed.

`farandole.protocol.rounds.audits` decides which, and what follows; this module does the I/O.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.protocol.checkpoints.blocks import Index, SignedIndex
from farandole.protocol.rounds import audits as machine
from farandole.protocol.rounds.audits import Audits, RoundClaim, name_of
from farandole.protocol.rounds.pairing_events import ExchangeEnded
from farandole.protocol.state.entries import RULES, Accusation, Entry, Kind, Signed
from farandole.protocol.trainer.trainer_messages import Recorded, Replay, Replayed
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.identity import peer_id_of

from ..base.errors import PeerUnreachableError
from ..state.gossip import GossipService
from ..status.status import AuditStatus
from ..transfers.giver import Provider
from ..transfers.receiver import DonorBusyError, Downloads, fetch_checkpoint
from .rest_service import Rest

logger = logging.getLogger(__name__)

# Rounds that wait for their commitment. More means that the disk hangs; the excess gets no commitment.
MAX_QUEUED: Final = 16
FAULT: Final = "fault"
"""The name of the reason (`Rest`) for a machine that computes wrongly."""


@dataclass(eq=False)
class AuditService:
    """One node's audits, in a run that audits ``rate`` of all rounds; ``rest`` begins if this machine errs."""

    author: bytes
    rate: float
    gossip: GossipService
    downloads: Downloads
    provider: Provider
    rest: Rest
    _ask: Callable[[Replay], None] | None = None
    _fetched: tuple[SignedIndex, Index] | None = None
    _accusations: dict[bytes, Accusation] = field(default_factory=dict)  # own ones that must be published
    _avoided: dict[bytes, machine.Avoid] = field(default_factory=dict)
    avoided_changed: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    """Where to wait until another member is avoided."""

    def __post_init__(self) -> None:
        self._audits = Audits(self.author, self.rate)
        self._recorded, self._to_commit = trio.open_memory_channel[Recorded](MAX_QUEUED)
        self._wanted, self._to_fetch = trio.open_memory_channel[machine.FetchStart](1)
        self._counts = {True: 0, False: 0}  # whether the round is an own one -> number of correct replays

    def status(self) -> AuditStatus:
        """Return the counts of replayed rounds and the avoided peers, for display."""
        avoided = {peer_id_of(peer): self._avoided[peer].reason for peer in self.avoided}
        return AuditStatus(self._counts[True], self._counts[False], avoided)

    @property
    def avoided(self) -> frozenset[bytes]:
        """Return the members that must not be paired with."""
        return frozenset(peer for peer, avoid in self._avoided.items() if avoid.until > trio.current_time())

    # The trainer

    def begin(self, ask: Callable[[Replay], None]) -> None:
        """Note that a trainer is ready; ``ask`` has it replay a round."""
        self._ask = ask

    def note_recorded(self, recorded: Recorded) -> None:
        """Queue a round that the trainer has recorded."""
        try:
            self._recorded.send_nowait(recorded)
        except trio.WouldBlock:
            logger.warning("round %d is not committed to: others wait already", recorded.commitment.round)

    def note_replayed(self, replayed: Replayed) -> None:
        """Judge by the result of a replay that the trainer was asked for."""
        self._carry_out(self._audits.judge(replayed))

    def note_exchange(self, ended: ExchangeEnded) -> None:
        """Note the end of an exchange."""
        self._audits.note_exchange(ended, trio.current_time())

    def end(self) -> None:
        """Note that there is no trainer any more."""
        self._ask = None
        self._carry_out(self._audits.end_trainer())

    # The run

    async def run(self) -> None:
        """Publish, fetch, and process accusations, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit)
            nursery.start_soon(self._fetch)
            nursery.start_soon(self._hear)

    async def _commit(self) -> None:
        async for recorded in self._to_commit:
            start = await self.provider.open_start(recorded.start)
            if start is None:
                continue
            commitment = msgspec.structs.replace(recorded.commitment, start=start)
            slot = commitment.round % RULES[Kind.COMMITMENT].slots
            await self.gossip.publish(Kind.COMMITMENT, slot, commitment)
            own = RoundClaim(self.author, commitment)
            self._carry_out(self._audits.note_own(own, recorded.start.path, list(self._claims())))
            for index, accusation in enumerate(self._accusations.values()):
                await self.gossip.publish(Kind.ACCUSATION, index, accusation)

    def _claims(self) -> Iterator[RoundClaim]:
        """Yield the commitments of the other live members."""
        live = self.downloads.membership.live - {self.author}
        for entry in self.gossip.state.entries(Kind.COMMITMENT):
            if entry.author in live:
                yield RoundClaim(entry.author, entry.payload, entry.signed)

    async def _fetch(self) -> None:
        """Fetch the starts that are wanted, one after the other."""
        async for wanted in self._to_fetch:
            path, is_excused = "", False
            try:
                path = str(await self._fetch_from(wanted))
            except DonorBusyError:
                is_excused = True
            except PeerUnreachableError as error:
                self.downloads.journal.note(f"no start of {name_of(wanted.claim)}, to replay it: {error}")
                is_excused = not any(claim.id == wanted.claim.id for claim in self._claims())  # it was replaced
            self._carry_out(self._audits.take_start(path, trio.current_time(), is_excused=is_excused))

    async def _fetch_from(self, wanted: machine.FetchStart) -> Path:
        """Fetch a start from one of its donors. Raises `PeerUnreachableError` if none gives it."""
        checkpoint_id, conditions = wanted.claim.commitment.start, self.downloads.conditions
        path = await self.provider.make_room(checkpoint_id)
        for donor in wanted.donors:
            try:
                signed, index = await self.downloads.ask(donor, 0, checkpoint_id)
                break
            except PeerUnreachableError:
                if donor == wanted.donors[-1]:
                    raise
        self._fetched = signed, index
        await fetch_checkpoint(conditions, signed, index, lambda: wanted.donors, lambda name: True, path)
        return path

    async def _hear(self) -> None:
        """Process commitments, and each accusation once."""
        heard: set[bytes] = set()
        while True:
            live = self.downloads.membership.live
            self._carry_out(self._audits.compare_received(list(self._claims()), live, trio.current_time()))
            entries = [entry for entry in self.gossip.state.entries(Kind.ACCUSATION) if entry.author != self.author]
            for accuser, accusation in [(entry.author, entry.payload) for entry in entries if entry.id not in heard]:
                signed = Signed(accusation.author, accusation.body, accusation.signature)
                with contextlib.suppress(RemoteProtocolError):  # it is not genuine
                    entry: Entry = self.gossip.state.checker.check(signed)
                    if entry.kind is Kind.COMMITMENT:
                        claim = RoundClaim(entry.author, entry.payload, signed)
                        self._carry_out(self._audits.hear_accusation(accuser, claim))
            heard = {entry.id for entry in entries}
            await self.gossip.changed.park()

    # Outputs

    def _carry_out(self, outputs: Iterable[machine.Output]) -> None:
        journal = self.downloads.journal
        for output in outputs:
            match output:
                case Replay():
                    if self._ask is not None:
                        self._ask(output)
                case machine.FetchStart():
                    self._wanted.send_nowait(output)
                case machine.Audited(claim):
                    self._counts[claim.author == self.author] += 1
                    journal.note(f"replayed {name_of(claim)}: it gives what was committed to")
                case machine.Avoid(author, until, reason):
                    if author in self._avoided and self._avoided[author].until >= until:
                        continue
                    self._avoided[author] = output
                    journal.blame(author, "accused", reason)
                    self.avoided_changed.unpark_all()
                case machine.Denounce(claim, path):
                    if claim.signed is not None and self._fetched is not None:
                        self.provider.keep_proof(Path(path), *self._fetched)
                        newest = Accusation(claim.author, claim.signed.body, claim.signed.signature)
                        others = {author: each for author, each in self._accusations.items() if author != claim.author}
                        kept = [(claim.author, newest), *others.items()][: RULES[Kind.ACCUSATION].slots]
                        self._accusations = dict(kept)
                case machine.Distrust(reason):
                    journal.warn(reason)
                    self.rest.set(FAULT, reason)
