"""Membership of a run: signed invitations, admissions made with them, and the roster that verifies both.

    creator --signs--> Invitation (bearer key, seats, expiry) --the bearer key signs--> Admission (member, seat)

An invite contains the private half of the bearer key. Its holder signs an admission for a key of their own, and no
other node has to be online. An invitation covers seats that its issuer numbers, and a seat admits one member, so a
copied invite admits no more members than it has seats. The creator may let a member invite others (`Invitation.quota`);
that member is then their sponsor, and its seats are numbered from 0 to the quota. An admission includes the chain of
signatures, so any node that has the manifest can verify it.

The expiry ends the use of an invite, not a membership. When an admission was signed cannot be proven, so the expiry is
checked only by the members that a newcomer connects to first. Admissions in the run state do not expire with it.

A member looks into its run from another process (`farandole checkpoint pull`) under a key of that process, since two
hosts of one key would take each other's connections. The member's key signs a `VisitorPass` for that one, which takes
no seat.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..wire.errors import RemoteProtocolError
from ..wire.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, is_signed_by, public_bytes, sign
from ..wire.messagepack import MessageDecoder, encode

# The longest admission, of a member that another member invited, has 449 bytes: it fits into an entry.
MAX_ADMISSION_BYTES: Final = 480
MAX_SEATS: Final = 1_024
"""Most seats of one invitation, and of a sponsor: the members that one person may bring in."""
CREATOR_SEATS: Final = 2**31
"""The creator numbers the seats of all its invitations from 0 on."""
SECRET_BYTES: Final = 32
# A pass has 112 bytes at most.
MAX_PASS_BYTES: Final = 128
MAX_VISITORS: Final = 4
"""Visitors kept per member, the newest ones: more commands than a person runs at a time."""
_INVITATION_DOMAIN: Final = b"farandole/invitation/1"
_PASS_DOMAIN: Final = b"farandole/visitor-pass/1"
_ADMISSION_DOMAIN: Final = b"farandole/admission/1"

_Key = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
_Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
_Seat = Annotated[int, msgspec.Meta(ge=0, lt=CREATOR_SEATS)]


class InvitationError(RemoteProtocolError):
    """An admission is not valid; the message completes the sentence "not admitted: ..."."""


class SeatTakenError(InvitationError):
    """Another member has the seat: another one of the same invitation may be free."""


class RevokedError(InvitationError):
    """The member, its invite or its sponsor was revoked."""


class Invitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part that an issuer signs. The issuer is the creator, or a member that the creator lets invite."""

    bearer: _Key
    """The public half of the key that is in the invite."""
    first_seat: _Seat
    num_seats: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEATS)]
    expires_at: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    """Unix seconds."""
    quota: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEATS)]
    """Seats that each admitted member may give to others."""
    signature: _Signature = bytes(SIGNATURE_BYTES)


class Admission(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's place in a run, as it proves it."""

    member: _Key
    seat: _Seat
    invitation: Invitation
    sponsor: Admission | None
    """The admission of the invitation's issuer; None: the creator issued it."""
    signature: _Signature = bytes(SIGNATURE_BYTES)

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys that end this membership when revoked: the member's, the bearer's, and the ones of its sponsor."""
        sponsors = self.sponsor.keys if self.sponsor is not None else frozenset()
        return frozenset((self.member, self.invitation.bearer)) | sponsors


class InviteSecret(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of an invite to a run of invited members."""

    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    """The private half of the bearer key."""
    invitation: Invitation
    sponsor: Admission | None

    @classmethod
    def decode(cls, raw: bytes) -> InviteSecret:
        """Decode the bytes of an invite. Raises `RemoteProtocolError` if they are not an `InviteSecret`."""
        return _decode_secret(raw)

    def encode(self) -> bytes:
        """Encode for an invite."""
        return encode(self)

    def admit(self, run_id: bytes, member: bytes, seat: int) -> Admission:
        """Sign an admission of ``member`` to one of the invitation's seats."""
        key = Ed25519PrivateKey.from_private_bytes(self.secret)
        signature = sign(key, _ADMISSION_DOMAIN, run_id, member, encode(seat), self.invitation.bearer)
        return Admission(member, seat, self.invitation, self.sponsor, signature)


class VisitorPass(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's signed permission for another key, which it made, to look into the run."""

    member: _Key
    expires_at: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    """Unix seconds, until when the visitor may connect to more members."""
    signature: _Signature


_decode_admission: Final = MessageDecoder[Admission](Admission, "an admission")
_decode_pass: Final = MessageDecoder[VisitorPass](VisitorPass, "a visitor's pass")
_decode_secret: Final = MessageDecoder[InviteSecret](InviteSecret, "what an invite to a run of invited members holds")


def decode_admission(raw: bytes) -> Admission:
    """Decode an admission without checking it. Raises `RemoteProtocolError` if it is malformed."""
    if len(raw) > MAX_ADMISSION_BYTES:
        raise RemoteProtocolError(f"an admission has at most {MAX_ADMISSION_BYTES} bytes, this has {len(raw)}")
    return _decode_admission(raw)


def sign_pass(member: Ed25519PrivateKey, run_id: bytes, visitor: bytes, expires_at: int) -> VisitorPass:
    """Sign a pass that lets a visitor's key look into a run as long as the member may."""
    signature = sign(member, _PASS_DOMAIN, run_id, visitor, encode(expires_at))
    return VisitorPass(public_bytes(member), expires_at, signature)


def decode_pass(raw: bytes) -> VisitorPass:
    """Decode a visitor's pass without checking it. Raises `RemoteProtocolError` if it is malformed."""
    if len(raw) > MAX_PASS_BYTES:
        raise RemoteProtocolError(f"a visitor's pass has at most {MAX_PASS_BYTES} bytes, this has {len(raw)}")
    return _decode_pass(raw)


def invite_members(
    issuer: Ed25519PrivateKey,
    run_id: bytes,
    secret: bytes,
    seats: range,
    expires_at: int,
    *,
    quota: int = 0,
    sponsor: Admission | None = None,
) -> InviteSecret:
    """Sign an invitation for the bearer of ``secret`` (32 random bytes) to these seats.

    ``sponsor``: the issuer's own admission, None if it is the creator.
    """
    bearer = public_bytes(Ed25519PrivateKey.from_private_bytes(secret))
    unsigned = Invitation(bearer, seats.start, len(seats), expires_at, quota)
    signature = sign(issuer, _INVITATION_DOMAIN, run_id, encode(unsigned))
    return InviteSecret(secret, msgspec.structs.replace(unsigned, signature=signature), sponsor)


def check_admission(admission: Admission, run_id: bytes, creator: bytes) -> None:
    """Raise `InvitationError` unless an admission is valid for this run, at some time."""
    invitation, sponsor = admission.invitation, admission.sponsor
    seats = range(invitation.first_seat, invitation.first_seat + invitation.num_seats)
    if sponsor is not None:
        if sponsor.sponsor is not None or invitation.quota:
            raise InvitationError("who was invited by a member cannot invite others")
        check_admission(sponsor, run_id, creator)
        if seats.stop > sponsor.invitation.quota:
            raise InvitationError(f"its sponsor may give {sponsor.invitation.quota} seats, not seat {seats.stop - 1}")
    if admission.seat not in seats:
        raise InvitationError(f"seat {admission.seat} is none of its invitation's")
    issuer = creator if sponsor is None else sponsor.member
    unsigned = msgspec.structs.replace(invitation, signature=bytes(SIGNATURE_BYTES))
    if not is_signed_by(issuer, invitation.signature, _INVITATION_DOMAIN, run_id, encode(unsigned)):
        raise InvitationError("its invitation is not signed by who may invite to this run")
    signed = run_id, admission.member, encode(admission.seat), invitation.bearer
    if not is_signed_by(invitation.bearer, admission.signature, _ADMISSION_DOMAIN, *signed):
        raise InvitationError("it is not signed with the key of its invite")


class Roster:
    """The members of one run, as far as this node knows.

    ``listed``: the members that the manifest lists; None if members are admitted by invitations.
    """

    def __init__(self, run_id: bytes, creator: bytes, listed: frozenset[bytes] | None = None) -> None:
        self._run_id = run_id
        self._creator = creator
        self._listed = listed
        self._admissions: dict[bytes, Admission] = {}
        self._seats: dict[tuple[bytes, int], bytes] = {}
        self._revoked: frozenset[bytes] = frozenset()
        self._visitors: dict[bytes, bytes] = {}
        """Visitor -> the member that let it in."""

    def admits(self, key: bytes) -> bool:
        """Return whether a key belongs to a member now, or to a member's visitor."""
        return self.is_member(key) or self.is_member(self._visitors.get(key, b""))

    def is_member(self, key: bytes) -> bool:
        """Return whether a key belongs to a member now."""
        if key == self._creator:
            return True
        if self._listed is not None:
            return key in self._listed and key not in self._revoked
        return key in self._admissions and not self._admissions[key].keys & self._revoked

    def admission_of(self, key: bytes) -> Admission | None:
        """Return a member's admission; None for the creator, for listed members and for other keys."""
        return self._admissions.get(key) if self.is_member(key) else None

    def sponsor_of(self, key: bytes) -> bytes | None:
        """Return the key of the node that invited a member; None if it is not known."""
        admission = self.admission_of(key)
        if admission is None:
            return None
        return self._creator if admission.sponsor is None else admission.sponsor.member

    def check(self, admission: Admission) -> None:
        """Raise `InvitationError` unless an admission is valid for this run, at some time."""
        check_admission(admission, self._run_id, self._creator)

    def admit(self, admission: Admission) -> None:
        """Add an admission. Raises `InvitationError` if it is not valid, revoked, or its seat is another member's."""
        if self._listed is not None:
            raise InvitationError("this run's members are listed in its manifest")
        if self._admissions.get(admission.member) == admission:
            return
        self.check(admission)
        if admission.keys & self._revoked:
            raise RevokedError("it was revoked")
        place = self._place_of(admission)
        holder = self._seats.get(place, admission.member)
        if self._rank(holder) < self._rank(admission.member):
            raise SeatTakenError("its seat is another member's: ask for an invite of your own")
        self._leave(holder)
        self._leave(admission.member)
        self._seats[place] = admission.member
        self._admissions[admission.member] = admission

    def admit_newcomer(self, admission: Admission, now: float) -> None:
        """Add the admission of a peer that shows it for the first time; the first member of a seat keeps it.

        ``now``: Unix seconds. Raises `InvitationError` as `admit` does, and if the invite has expired.
        """
        if admission.invitation.expires_at < now:
            raise InvitationError("the invite has expired: ask for another one")
        if self._seats.get(self._place_of(admission), admission.member) != admission.member:
            raise SeatTakenError("the invite has been used: ask for one of your own")
        self.admit(admission)

    def admit_visitor(self, shown: VisitorPass, visitor: bytes, now: float) -> None:
        """Let a visitor in as long as its member is one. Raises `InvitationError` if its member is none now.

        ``now``: Unix seconds.
        """
        signed = self._run_id, visitor, encode(shown.expires_at)
        if not is_signed_by(shown.member, shown.signature, _PASS_DOMAIN, *signed):
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

    def _place_of(self, admission: Admission) -> tuple[bytes, int]:
        return self._creator if admission.sponsor is None else admission.sponsor.member, admission.seat

    def _leave(self, member: bytes) -> None:
        left = self._admissions.pop(member, None)
        if left is not None:
            self._seats.pop(self._place_of(left), None)

    def _rank(self, member: bytes) -> bytes:
        """Order two members of one seat, so that all nodes keep the same one whichever they receive first."""
        return hashlib.sha256(self._run_id + member).digest()

    def set_revoked(self, keys: frozenset[bytes]) -> None:
        """Replace the set of all revoked keys: members' and bearers'. Keys that it lacks are valid again."""
        self._revoked = keys
