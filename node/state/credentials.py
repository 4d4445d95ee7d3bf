"""Publishes this node's admission to a run; signs invitations and, for the creator, revocations.

An admission expires after three weeks, and its author's node renews it daily. A revocation stays for the run's life.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.invitations import (
    CREATOR_SEATS,
    MAX_SEATS,
    SECRET_BYTES,
    Admission,
    InviteSecret,
    decode_admission,
    invite_members,
)
from farandole.protocol.run.roster import Roster
from farandole.protocol.state.entries import REVOKED_PER_ENTRY, RULES, AdmissionProof, Kind, Revocation
from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.wire.identity import short_name
from farandole.protocol.wire.messagepack import encode

from ..base.errors import NotAdmittedError
from ..mesh.gate import Gate
from ..status.journal import Journal
from .gossip import GossipService
from .store import Store

RENEW_INTERVAL: Final = 86_400.0
ADMISSION_FACT: Final = "admission"
# Seats that this node has given away, so that no seat is given to two invites.
SEATS_FACT: Final = "seats"
# The creator's revocations as they are published. The run state may lag: a slot takes a new entry only every 10 s.
REVOCATIONS_FACT: Final = "revocations"
# Bearer keys of the creator's invites with several, the newest invites: who has an invite's text has all of them.
BEARERS_FACT: Final = "bearers"
MAX_INVITES_REMEMBERED: Final = 1_024
# Between two requests for another witness, after this node's own was revoked.
WITNESS_INTERVAL: Final = 30.0

_Words = list[tuple[set[bytes], set[bytes]]]
"""Revoked and readmitted keys of each entry. A key stays in its entry: if it moved to another one, other nodes could
miss it until they have both."""


class CredentialsError(FarandoleError):
    """This node cannot invite or revoke; the message says why and who can."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Handles this node's admission, invitations and revocations in an invited run; ``gate`` has the roster."""

    key: Ed25519PrivateKey
    run_id: bytes
    creator: bytes
    author: bytes
    gate: Gate
    roster: Roster
    gossip: GossipService
    store: Store
    journal: Journal
    _lock: trio.Lock = field(default_factory=trio.Lock)
    """Held while seats are given, and while the set of revoked keys changes."""
    _published: list[bytes] = field(default_factory=list)
    """The admission as it was published last."""

    @property
    def is_creator(self) -> bool:
        """Return whether this node's key made the run."""
        return self.author == self.creator

    def admit_self(self) -> None:
        """Put this node on its own roster. Raises `NotAdmittedError` if its admission is not to this run."""
        if self.roster.is_member(self.author):
            return
        try:
            if not self.gate.admission:
                raise NotAdmittedError(
                    "this run is for invited members: join it with an invite that is for you; if you made this run, "
                    "with the data directory that signed it (--home)"
                )
            self.roster.admit_own(decode_admission(self.gate.admission))
        except RemoteProtocolError as error:
            raise NotAdmittedError(f"not admitted to this run: {error}") from error

    async def publish(self) -> None:
        """Publish how this node was admitted, before any other entry."""
        if self.gate.admission:
            self._published[:] = [self.gate.admission]
            await self.gossip.publish(Kind.ADMISSION, 0, AdmissionProof(self.gate.admission))
            loss = "keep the invite: this node needs it at its next start"
            await self.store.remember(ADMISSION_FACT, self.gate.admission, self.journal, loss)

    async def run(self) -> None:
        """Renew entries, and warn if this node is no longer a member, until cancelled."""
        renewed_at = asked_at = trio.current_time()
        told_of: set[bytes] = set()  # at most as many as there are members
        refused_by: set[bytes] = set()  # at most as many as this node has dialled

        def tell_refusal(peer: bytes, refusal: str) -> None:  # a revoked member may never receive the revocation
            if peer not in refused_by:
                refused_by.add(peer)
                self.journal.warn(
                    f"this node is no longer a member of the run, says {short_name(peer)}: {refusal}. If the others "
                    "say so as well, ask the run's creator for a new invite, and join again with it"
                )

        self.gate.on_refused = tell_refusal
        if self.is_creator:  # an earlier life may have ended before the last one could be written
            async with self._lock:
                await self._publish_words(await self._words())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.gate.run)
            while True:
                await self.gossip.changed.park()
                while not self.roster.is_member(self.author):  # until the creator readmits it
                    self.journal.warn(
                        "this node is no longer a member of the run: its admission was revoked, or another member has "
                        "its seat. Ask the run's creator for a new invite, and join again with it",
                        "membership",
                    )
                    await self.gossip.changed.park()
                self.journal.over("membership")
                for peer in self.roster.false_witnesses - told_of:
                    told_of.add(peer)
                    self.journal.warn(
                        f"{short_name(peer)} has admitted two members to one seat: no admission of its own counts from "
                        "now on. If it is no mistake, the run's creator can revoke it (`farandole run revoke`)"
                    )
                now = trio.current_time()
                if self.roster.needs_witness(self.author) and now - asked_at >= WITNESS_INTERVAL:
                    asked_at = now
                    self.gate.introduce_again()
                if now - renewed_at >= RENEW_INTERVAL or self._published != [self.gate.admission]:
                    renewed_at = now
                    await self.publish()

    # Inviting

    async def invite(self, uses: int, expires_at: float, quota: int) -> InviteSecret:
        """Sign an invitation for ``uses`` members, who may each invite ``quota`` others.

        Raises `CredentialsError` if this node may not, and `StoreError`.
        """
        admission = self.roster.admission_of(self.author)
        num_seats = CREATOR_SEATS if self.is_creator else 0 if admission is None else admission.invitation.quota
        if not self.is_creator and (admission is None or admission.sponsor is not None or not num_seats):
            raise CredentialsError("this node may not invite: ask the run's creator, or for an invite with a quota")
        if quota and not self.is_creator:
            raise CredentialsError("only the run's creator can let those whom it invites invite others (--quota)")
        if not 1 <= uses <= MAX_SEATS or not 0 <= quota <= MAX_SEATS:
            raise CredentialsError(f"an invite is for 1 to {MAX_SEATS} members, with a quota of at most {MAX_SEATS}")
        async with self._lock:
            first = int((await self.store.get_fact(SEATS_FACT)) or 0)
            if first + uses > num_seats:
                raise CredentialsError(f"this node may give {num_seats - first} more seats, not {uses}")
            await self.store.put_fact(SEATS_FACT, b"%d" % (first + uses))
        sponsor = None if self.is_creator else admission
        seats, secret = range(first, first + uses), secrets.token_bytes(SECRET_BYTES)
        invite = invite_members(self.key, self.run_id, secret, seats, int(expires_at), quota=quota, sponsor=sponsor)
        if len(invite.bearers) > 1:
            async with self._lock:
                known = [*await self._bearers(), invite.bearers][-MAX_INVITES_REMEMBERED:]
                await self.store.put_fact(BEARERS_FACT, encode(known))
        return invite

    async def _bearers(self) -> list[list[bytes]]:
        raw = await self.store.get_fact(BEARERS_FACT)
        return [] if raw is None else msgspec.msgpack.decode(raw, type=list[list[bytes]])

    # Revoking

    async def _words(self) -> _Words:
        raw = await self.store.get_fact(REVOCATIONS_FACT)
        if raw is not None:
            return msgspec.msgpack.decode(raw, type=_Words)
        told = {entry.index: entry.payload for entry in self.gossip.state.entries(Kind.REVOCATION)}
        payloads = (told.get(index, Revocation(())) for index in range(max(told, default=-1) + 1))
        return [(set(payload.keys), set(payload.readmitted)) for payload in payloads]

    async def revoke(self, keys: Iterable[bytes], *, keeps_invites: bool = False) -> list[tuple[bytes, Admission, int]]:
        """End these memberships, and the ones that follow from these invites.

        The invite that a member came by admits nobody any more, unless ``keeps_invites``; others that came by it stay.
        Returns each such member, with its admission and the number of these others.

        Raises `CredentialsError` if this node is not the creator's, and `StoreError`.
        """
        self._require_creator()
        async with self._lock:
            ended, told = list(dict.fromkeys(keys)), []
            revoked = frozenset(ended)
            staying: set[bytes] = set()
            for key in list(ended):
                admission = self.roster.admission_of(key)
                if admission is None:
                    continue
                bearer = admission.invitation.bearer
                others = self.roster.invited_by(bearer, revoked)
                told.append((key, admission, len(others)))
                if keeps_invites:
                    continue
                together = next((each for each in await self._bearers() if bearer in each), [bearer])
                ended += [each for each in together if each == bearer or not self.roster.has_admitted(each)]
                staying |= others
            words = await self._words()
            going = frozenset().union(*(self.roster.invited_by(each, ()) for each in revoked))
            for _, readmitted in words:
                readmitted.difference_update(ended, going)
            await self._set_words(words, ended, sorted(staying - going))
        return told

    async def restore(self, keys: Iterable[bytes]) -> None:
        """Undo `revoke` for these keys; a member is in again whatever else keeps it out. Raises as `revoke` does."""
        self._require_creator()
        async with self._lock:
            words, restored = await self._words(), frozenset(keys)
            revoked = frozenset().union(*(entry[0] for entry in words))
            for entry in words:
                entry[0].difference_update(restored)
            to_readmit = []
            for key in sorted(restored):
                admission = self.roster.admissions.get(key)
                is_kept_out = admission is not None and not admission.keys.isdisjoint(revoked - restored)
                if is_kept_out or key not in revoked:
                    to_readmit.append(key)
            await self._set_words(words, [], to_readmit)

    def _require_creator(self) -> None:
        if not self.is_creator:
            raise CredentialsError("only the run's creator can do this: run it where the creator's node runs")

    async def _set_words(self, words: _Words, to_revoke: Iterable[bytes], to_readmit: Iterable[bytes]) -> None:
        """Add keys where there is room, and publish. Raises `CredentialsError` if there is none, and `StoreError`."""
        for wanted, which in ((to_revoke, 0), (to_readmit, 1)):
            for key in wanted:
                if any(key in entry[which] for entry in words):
                    continue
                room = next((entry for entry in words if len(entry[0]) + len(entry[1]) < REVOKED_PER_ENTRY), None)
                if room is None:
                    room = set(), set()
                    words.append(room)
                room[which].add(key)
        num_slots = RULES[Kind.REVOCATION].slots
        if len(words) > num_slots:
            num_places = num_slots * REVOKED_PER_ENTRY
            raise CredentialsError(f"a run has room for {num_places} revoked keys: restore some that have expired")
        await self.store.put_fact(REVOCATIONS_FACT, encode(words))
        await self._publish_words(words)

    async def _publish_words(self, words: _Words) -> None:
        for index, (revoked, readmitted) in enumerate(words):
            payload = Revocation(tuple(sorted(revoked)), tuple(sorted(readmitted)))
            await self.gossip.publish(Kind.REVOCATION, index, payload)
