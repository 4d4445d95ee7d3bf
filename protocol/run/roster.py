"""The members of a run as one node knows them: who has which seat, who was revoked, who visits.

Several keys may be signed into one seat, by anybody that has seen the invite. Who is its member must not depend on
what a stranger can compute or send later, so **the first holder that a node knew keeps the seat at that node**, across
restarts, also against an earlier witness. A seat that is free here is given to a key that shows its admission to this
node itself, while the invite is valid, or that has a *witness*: the creator, or a member of this roster, that admitted
it before the invite expired. Others' clocks are not trusted further than this: a member that lies about the time admits
to free seats after the expiry, and to no seat that is held.

A newcomer knows nobody, so while it joins it takes what members give it. Where they name two holders, it chooses the
one that the creator witnessed, or else the one with the earlier witness among its members; no witness counts as earlier
than its own admission. From then on it keeps its choice as others do.

So two keys share a seat only where neither side had heard of the other's, at most one for each part of a divided run;
each part keeps its own. A witness that signs for both is known to lie, or to have lost its disk: it is not believed
again. The creator's word decides (`hear_creator`): a revoked key is out, and a readmitted one is in, with any seat.

The alternatives: the lower hash of a key lets anybody with an invite grind keys and replace every member; the earlier
witness, if it counted against holders, would let any member do so with an invented time; a vote would need to know who
may vote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..wire.errors import RemoteProtocolError
from ..wire.identity import is_signed_by, public_bytes
from ..wire.messagepack import encode
from .invitations import (
    PASS_DOMAIN,
    Admission,
    InvitationError,
    RevokedError,
    SeatTakenError,
    UnwitnessedError,
    VisitorPass,
    Witness,
    check_admission,
    decode_admission,
    sign_witness,
)

MAX_HELD: Final = 8_192
"""Seats that a node remembers, twice the authors of a run state: 5 MB on disk. No holder is forgotten for another, so
eight sponsors with 1,024 seats each can fill them; the creator frees their seats by revoking them."""
MAX_VISITORS: Final = 4
"""Visitors kept per member, the newest ones: more commands than a person runs at a time."""

Place = tuple[bytes, int]
"""Who numbers a seat (the creator or a sponsor), and its number."""
NO_KEYS: Final[frozenset[bytes]] = frozenset()


class Roster:
    """The members of one run, as far as this node knows.

    ``listed``: the members that the manifest lists; None if members are admitted by invitations.
    """

    def __init__(self, run_id: bytes, creator: bytes, listed: frozenset[bytes] | None = None) -> None:
        self._run_id = run_id
        self._creator = creator
        self._listed = listed
        self._held: dict[Place, Admission] = {}
        self.admissions: dict[bytes, Admission] = {}
        """Member -> its latest admission, also if it was revoked; another seat that it had before stays its own."""
        self._unsettled: set[Place] = set()
        """Seats whose holder may still be another one, until `settle`."""
        self.is_settled = False
        """Whether this node has heard of the members; then a peer that is not on the roster is a newcomer."""
        self.unsaved: set[Place] = set()
        """Seats that have changed and are to be stored."""
        self._words: dict[int, tuple[int, frozenset[bytes], frozenset[bytes]]] = {}
        """The creator's newest words: index -> tick, revoked and readmitted keys."""
        self._revoked = self._readmitted = NO_KEYS
        self.false_witnesses: set[bytes] = set()
        """Members that have witnessed two holders of one seat."""
        self._visitors: dict[bytes, bytes] = {}
        """Visitor -> the member that let it in."""

    # Who is a member

    def admits(self, key: bytes) -> bool:
        """Return whether a key belongs to a member now, or to a member's visitor."""
        return self.is_member(key) or self.is_member(self._visitors.get(key, b""))

    def is_member(self, key: bytes) -> bool:
        """Return whether a key belongs to a member now."""
        if key == self._creator:
            return True
        if self._listed is not None:
            return key in self._listed and key not in self._revoked
        admission = self.admissions.get(key)
        return key in self._readmitted or (admission is not None and not self._is_revoked(admission))

    def _is_revoked(self, admission: Admission) -> bool:
        return admission.member not in self._readmitted and not self._revoked.isdisjoint(admission.keys)

    def admission_of(self, key: bytes) -> Admission | None:
        """Return a member's admission; None for the creator, for listed members and for other keys."""
        return self.admissions.get(key) if self.is_member(key) else None

    def sponsor_of(self, key: bytes) -> bytes | None:
        """Return the key of the node that invited a member; None if it is not known."""
        admission = self.admission_of(key)
        return None if admission is None else admission.place(self._creator)[0]

    def has_admitted(self, bearer: bytes) -> bool:
        """Return whether a member has come by a bearer key."""
        return any(each.invitation.bearer == bearer for each in self._held.values())

    def invited_by(self, bearer: bytes, without: Collection[bytes]) -> frozenset[bytes]:
        """Return the members that came by a bearer key, with those that they invited, and by no key in ``without``."""
        found = (each for each in self.admissions.values() if bearer in each.keys and each.keys.isdisjoint(without))
        return frozenset(each.member for each in found if self.is_member(each.member))

    # Admitting

    def check(self, admission: Admission) -> None:
        """Raise `InvitationError` unless an admission is valid for this run, at some time."""
        check_admission(admission, self._run_id, self._creator)

    def admit(self, admission: Admission, shown_at: float | None = None) -> None:
        """Add an admission.

        ``shown_at``: Unix seconds, if its member shows it to this node itself; None: others have passed it on. Raises
        `InvitationError` if it is not valid, revoked, or expired, if its seat is another member's, or (passed on) if
        no member is its witness.
        """
        if self._listed is not None:
            raise InvitationError("this run's members are listed in its manifest")
        place = admission.place(self._creator)
        held = self._held.get(place)
        if admission != held:
            self.check(admission)
        if self._is_revoked(admission):
            raise RevokedError("it was revoked")
        if held is None:
            if (shown_at is not None or self.is_settled) and not self.is_witnessed(admission):
                if shown_at is None:
                    raise UnwitnessedError("no member has admitted it")
                if admission.invitation.expires_at < shown_at:
                    raise InvitationError("the invite has expired: ask for another one")
            self._make_room()
        elif held.member != admission.member:
            signed = {each.witness.key for each in (held, admission) if each.witness is not None} - {self._creator}
            if held.witness is not None and admission.witness is not None and len(signed) == 1:
                self.false_witnesses |= signed
            if place not in self._unsettled or self._rank(held) <= self._rank(admission):
                raise SeatTakenError("the invite has been used: ask for one of your own")
            if self.admissions.get(held.member) is held:
                del self.admissions[held.member]
        elif self.is_witnessed(held) or not self.is_witnessed(admission):
            admission = held
        self._hold(place, admission)

    def admit_own(self, admission: Admission) -> None:
        """Add this node's own admission, which no other takes its seat from. Raises as `admit` does."""
        self.admit(admission, 0.0)
        self._unsettled.discard(admission.place(self._creator))

    def _hold(self, place: Place, admission: Admission) -> None:
        if self._held.get(place) != admission:
            self.unsaved.add(place)
        if place not in self._held and not self.is_settled:
            self._unsettled.add(place)
        self._held[place] = self.admissions[admission.member] = admission

    def is_witnessed(self, admission: Admission) -> bool:
        """Return whether a member that is trusted has admitted it before the invite expired."""
        witness = admission.witness
        if witness is None or witness.since > admission.invitation.expires_at:
            return False
        return witness.key not in self.false_witnesses and self.is_member(witness.key)

    def _rank(self, admission: Admission) -> tuple[int, int]:
        """Order the holders of one seat for a node that knew neither; the lower one stays."""
        if admission.witness is None or not self.is_witnessed(admission):
            return 2, 0
        of_witness = self.admissions.get(admission.witness.key)
        admitted_at = 0 if of_witness is None or of_witness.witness is None else of_witness.witness.since
        return int(admission.witness.key != self._creator), max(admission.witness.since, admitted_at)

    def _make_room(self) -> None:
        if len(self._held) < MAX_HELD:
            return
        for place, held in list(self._held.items()):
            if not self._revoked.isdisjoint(held.keys - {held.member}):  # nobody can be admitted to it
                del self._held[place]
                self.unsaved.add(place)
        if len(self._held) >= MAX_HELD:
            raise InvitationError(f"the run has had {MAX_HELD} members, as many as its nodes remember")

    def settle(self) -> None:
        """End the joining: this node has heard of the members, and keeps the holders that it knows."""
        self.is_settled = True
        self._unsettled.clear()

    # Witnesses

    def witness(self, admission: Admission, key: Ed25519PrivateKey, now: float) -> Witness | None:
        """Sign for a member that shows its admission; None if this node does not know it in that seat for sure.

        After the invite's expiry it signs only where witnesses lead to the creator or to itself: while it joined, it
        may have been told of anybody by somebody with an expired invite, and its word makes members elsewhere. Before
        the witness leaves this node, the seat must be stored (`take_unsaved`). ``now``: Unix seconds.
        """
        place = admission.place(self._creator)
        held = self._held.get(place)
        if held is None or held.member != admission.member or place in self._unsettled or self._is_revoked(held):
            return None
        if held.invitation.expires_at < now and not self._is_traced(held, public_bytes(key)):
            return None
        since = min(int(now), held.invitation.expires_at) if held.witness is None else held.witness.since
        signed = sign_witness(key, self._run_id, held, since)
        if not self.is_witnessed(held):
            self._hold(place, msgspec.structs.replace(held, witness=signed))
        return signed

    def _is_traced(self, admission: Admission, own: bytes) -> bool:
        """Return whether witnesses lead from an admission to the creator, or to this node, whose key is ``own``."""
        passed = set[bytes]()
        following: Admission | None = admission
        while following is not None and following.witness is not None and following.witness.key not in passed:
            witness = following.witness
            if witness.since > following.invitation.expires_at:
                return False
            if witness.key in (self._creator, own):
                return True
            passed.add(witness.key)
            following = self.admissions.get(witness.key)
        return False

    def needs_witness(self, key: bytes) -> bool:
        """Return whether a member's admission has no witness that others trust."""
        admission = self.admission_of(key)
        return admission is not None and not self.is_witnessed(admission)

    # Storing

    def take_unsaved(self) -> dict[Place, bytes | None]:
        """Return the seats that have changed since the last call -> admission; None: forgotten. Empty while joining."""
        if not self.is_settled:
            return {}
        places, self.unsaved = self.unsaved, set()
        return {place: encode(self._held[place]) if place in self._held else None for place in places}

    def load(self, stored: Iterable[bytes]) -> None:
        """Take the holders that an earlier life has stored; ones of another run, or damaged ones, are left out."""
        admissions = []
        for raw in stored:
            with contextlib.suppress(RemoteProtocolError):
                admission = decode_admission(raw)
                self.check(admission)
                admissions.append(admission)
        if self._listed is not None or not admissions:
            return
        for admission in sorted(admissions, key=lambda each: 0 if each.witness is None else each.witness.since):
            self._held[admission.place(self._creator)] = self.admissions[admission.member] = admission
        self.settle()

    # The creator

    def hear_creator(
        self, index: int, tick: int, revoked: frozenset[bytes], readmitted: frozenset[bytes] = NO_KEYS
    ) -> None:
        """Take a revocation of the creator; the newest of each ``index`` counts until a newer one comes.

        ``revoked``: keys of members and of bearers. ``readmitted``: members that stay, or come back, whatever became
        of their bearers and seats.
        """
        if tick < self._words.get(index, (0, NO_KEYS, NO_KEYS))[0]:
            return
        self._words[index] = tick, revoked, readmitted
        self._readmitted = NO_KEYS.union(*(word[2] for word in self._words.values()))
        self._revoked = NO_KEYS.union(*(word[1] for word in self._words.values()))

    # Visitors

    def admit_visitor(self, shown: VisitorPass, visitor: bytes, now: float) -> None:
        """Let a visitor in as long as its member is one. Raises `InvitationError` if its member is none now.

        ``now``: Unix seconds.
        """
        signed = self._run_id, visitor, encode(shown.expires_at)
        if not is_signed_by(shown.member, shown.signature, PASS_DOMAIN, *signed):
            raise InvitationError("the visitor's pass is not signed with its member's key")
        if shown.expires_at < now:
            raise InvitationError("the visitor's pass has expired: is this machine's clock right?")
        if not self.is_member(shown.member):
            who = "invited members" if self._listed is None else "the members that its manifest lists"
            other = ", or ask for an invite of your own" if self._listed is None else ""
            raise InvitationError(
                f"this run is for {who}, and the key of this data directory is no member's: run the command with "
                f"--home of a member's node{other}"
            )
        of_member = [each for each, member in self._visitors.items() if member == shown.member and each != visitor]
        for oldest in of_member[: max(0, len(of_member) + 1 - MAX_VISITORS)]:
            del self._visitors[oldest]
        self._visitors[visitor] = shown.member
