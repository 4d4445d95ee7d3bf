"""Publishes this node's admission to a run; signs invitations and, for the creator, revocations.

Entries of both kinds expire after three weeks, and their author's node renews them daily.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.invitations import (
    CREATOR_SEATS,
    MAX_SEATS,
    SECRET_BYTES,
    InviteSecret,
    Roster,
    decode_admission,
    invite_members,
)
from farandole.protocol.state.entries import REVOKED_PER_ENTRY, RULES, AdmissionProof, Kind, Revocation
from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.wire.identity import PUBLIC_KEY_BYTES, short_name

from ..base.errors import NotAdmittedError
from ..mesh.gate import Gate
from ..status.journal import Journal
from .gossip import GossipService
from .store import Store, StoreError

RENEW_INTERVAL: Final = 86_400.0
ADMISSION_FACT: Final = "admission"
# Seats that this node has given away, so that no seat is given to two invites.
SEATS_FACT: Final = "seats"
# Concatenated keys that the creator has revoked, in the order of the entries: `REVOKED_PER_ENTRY` for each. The run
# state may lag: a slot takes a new entry only every 10 s.
REVOKED_FACT: Final = "revoked"
# In the place of a restored key. If the later keys moved up, other nodes could miss one of them until they have all
# entries.
NO_KEY: Final = bytes(PUBLIC_KEY_BYTES)


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
            self.roster.admit(decode_admission(self.gate.admission))
        except RemoteProtocolError as error:
            raise NotAdmittedError(f"not admitted to this run: {error}") from error

    async def publish(self) -> None:
        """Publish how this node was admitted, before any other entry."""
        if self.gate.admission:
            await self.gossip.publish(Kind.ADMISSION, 0, AdmissionProof(self.gate.admission))
            try:
                await self.store.put_fact(ADMISSION_FACT, self.gate.admission)
            except StoreError as error:
                self.journal.warn(f"{error}; keep the invite: this node needs it at its next start")

    async def run(self) -> None:
        """Renew entries, and warn if this node is no longer a member, until cancelled."""
        renewed_at = trio.current_time()
        refused_by: set[bytes] = set()  # at most as many as this node has dialled

        def tell_refusal(peer: bytes, refusal: str) -> None:  # a revoked member may never receive the revocation
            if peer not in refused_by:
                refused_by.add(peer)
                self.journal.warn(
                    f"this node is no longer a member of the run, says {short_name(peer)}: {refusal}. If the others "
                    "say so as well, ask the run's creator for a new invite, and join again with it"
                )

        self.gate.on_refused = tell_refusal
        await self._renew_revoked()  # an earlier life may have ended before the last one could be written
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.gate.run)
            while True:
                await self.gossip.changed()
                if not self.roster.is_member(self.author):
                    self.journal.warn(
                        "this node is no longer a member of the run: its admission was revoked, or another member has "
                        "its seat. Ask the run's creator for a new invite, and join again with it"
                    )
                    await trio.sleep_forever()
                if trio.current_time() - renewed_at >= RENEW_INTERVAL:
                    renewed_at = trio.current_time()
                    await self.publish()
                    await self._renew_revoked()

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
        return invite_members(self.key, self.run_id, secret, seats, int(expires_at), quota=quota, sponsor=sponsor)

    # Revoking

    async def _revoked(self) -> list[bytes]:
        """Return the revoked keys at their places in the entries; `NO_KEY` where there is none."""
        raw = await self.store.get_fact(REVOKED_FACT)
        if raw is not None:
            return [raw[at : at + PUBLIC_KEY_BYTES] for at in range(0, len(raw), PUBLIC_KEY_BYTES)]
        places: list[bytes] = []
        for entry in sorted(self.gossip.state.entries(Kind.REVOCATION), key=lambda entry: entry.index):
            places += [NO_KEY] * (entry.index * REVOKED_PER_ENTRY - len(places))
            places += entry.payload.keys
        return places

    async def revoke(self, keys: Iterable[bytes]) -> None:
        """End these memberships, and the ones that follow from these invites.

        Raises `CredentialsError` if this node is not the creator's, and `StoreError`.
        """
        self._require_creator()
        async with self._lock:
            places = await self._revoked()
            for key in dict.fromkeys(keys):
                if key in places:
                    continue
                if NO_KEY in places:
                    places[places.index(NO_KEY)] = key
                else:
                    places.append(key)
            await self._set_revoked(places)

    async def restore(self, keys: Iterable[bytes]) -> None:
        """Undo `revoke` for these keys; raises as it does."""
        self._require_creator()
        async with self._lock:
            restored = frozenset(keys)
            await self._set_revoked([NO_KEY if key in restored else key for key in await self._revoked()])

    def _require_creator(self) -> None:
        if not self.is_creator:
            raise CredentialsError("only the run's creator can do this: run it where the creator's node runs")

    async def _renew_revoked(self) -> None:
        if self.is_creator:
            async with self._lock:
                await self._publish_revoked(await self._revoked())

    async def _set_revoked(self, places: Sequence[bytes]) -> None:
        num_entries = RULES[Kind.REVOCATION].slots
        if len(places) > num_entries * REVOKED_PER_ENTRY:
            raise CredentialsError(
                f"a run has at most {num_entries * REVOKED_PER_ENTRY} revoked keys: restore some that have expired"
            )
        await self.store.put_fact(REVOKED_FACT, b"".join(places))
        await self._publish_revoked(places)

    async def _publish_revoked(self, places: Sequence[bytes]) -> None:
        num_entries = RULES[Kind.REVOCATION].slots
        told = {entry.index for entry in self.gossip.state.entries(Kind.REVOCATION)}
        for index in range(num_entries):
            part = places[index * REVOKED_PER_ENTRY : (index + 1) * REVOKED_PER_ENTRY]
            if part or index in told:
                await self.gossip.publish(Kind.REVOCATION, index, Revocation(tuple(sorted({*part} - {NO_KEY}))))
