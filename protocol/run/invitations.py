"""Membership of a run: signed invitations, admissions made with them, and the witnesses of these.

    creator --signs--> Invitation (bearer key, seats, expiry) --the bearer key signs--> Admission (member, seat)
    member that admits it --signs--> Witness (member, seat, since)

An invite contains the private half of the bearer key. Its holder signs an admission for a key of their own, and shows
it to any member. An invitation covers seats that its issuer numbers, and a seat admits one member, so a copied invite
admits no more members than it has seats. The creator may let a member invite others (`Invitation.quota`); that member
is then their sponsor, and its seats are numbered from 0 to the quota. An admission includes the chain of signatures, so
any node that has the manifest can verify it.

The bearer may sign any number of keys into a seat, and nothing in their admissions tells who came first. So the member
that a newcomer shows its admission to checks the invite's expiry and that the seat is free, and signs what it saw. By
that witness all others take the newcomer in; `farandole.protocol.run.roster` has the rules.

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

# The longest admission, of a member that another member invited, has 560 bytes with its witness: it fits into an entry.
MAX_ADMISSION_BYTES: Final = 576
MAX_SEATS: Final = 1_024
"""Most seats of one invitation, and of a sponsor: the members that one person may bring in."""
CREATOR_SEATS: Final = 2**31
"""The creator numbers the seats of all its invitations from 0 on."""
MAX_SINGLE_BEARERS: Final = 8
"""Most seats of an invite with a bearer key for each: they add 800 characters, and the text still fits in a message of
2,000, as chats limit them."""
SECRET_BYTES: Final = 32
# A pass has 112 bytes at most.
MAX_PASS_BYTES: Final = 128
_INVITATION_DOMAIN: Final = b"farandole/invitation/1"
PASS_DOMAIN: Final = b"farandole/visitor-pass/1"
_ADMISSION_DOMAIN: Final = b"farandole/admission/1"
_BEARER_DOMAIN: Final = b"farandole/bearer/1"
_WITNESS_DOMAIN: Final = b"farandole/witness/1"
MAX_WITNESS_BYTES: Final = 128
"""A witness has 112 bytes at most."""

_Key = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
_Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
_Seat = Annotated[int, msgspec.Meta(ge=0, lt=CREATOR_SEATS)]


class InvitationError(RemoteProtocolError):
    """An admission is not valid; the message completes the sentence "not admitted: ..."."""


class SeatTakenError(InvitationError):
    """Another member has the seat: another one of the same invitation may be free."""


class UnwitnessedError(InvitationError):
    """No member that this node trusts has admitted it; others may know one."""


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


class Witness(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's word that it knows a member in its seat."""

    key: _Key
    since: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    """When the member was admitted, in Unix seconds; later witnesses pass on the first one's word."""
    signature: _Signature


class Admission(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's place in a run, as it proves it."""

    member: _Key
    seat: _Seat
    invitation: Invitation
    sponsor: Admission | None
    """The admission of the invitation's issuer; None: the creator issued it."""
    signature: _Signature = bytes(SIGNATURE_BYTES)
    witness: Witness | None = None
    """None where the member has been admitted by no other yet, and in a sponsor's admission."""

    def place(self, creator: bytes) -> tuple[bytes, int]:
        """Return the key that numbers the seat, and its number."""
        return creator if self.sponsor is None else self.sponsor.member, self.seat

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys that end this membership when revoked: the member's, the bearer's, and the ones of its sponsor."""
        sponsors = self.sponsor.keys if self.sponsor is not None else frozenset()
        return frozenset((self.member, self.invitation.bearer)) | sponsors


class InviteSecret(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of an invite to a run of invited members."""

    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    """The private half of the bearer key, or the secret from which each seat's follows."""
    invitation: Invitation
    """Not signed if each seat has one of its own."""
    sponsor: Admission | None
    signatures: Annotated[tuple[_Signature, ...], msgspec.Meta(max_length=MAX_SINGLE_BEARERS)] = ()
    """Signatures of the seats' own invitations; empty if all seats have one bearer."""

    @property
    def bearers(self) -> list[bytes]:
        """Return the public halves of its bearer keys: revoked, they admit nobody."""
        of_seats = [self._of_seat(number)[1].bearer for number in range(len(self.signatures))]
        return of_seats or [self.invitation.bearer]

    def admit(self, run_id: bytes, member: bytes, seat: int) -> Admission:
        """Sign an admission of ``member`` to one of the invitation's seats."""
        key, invitation = self._of_seat(seat - self.invitation.first_seat)
        signature = sign(key, _ADMISSION_DOMAIN, run_id, member, encode(seat), invitation.bearer)
        return Admission(member, seat, invitation, self.sponsor, signature)

    def _of_seat(self, number: int) -> tuple[Ed25519PrivateKey, Invitation]:
        if not 0 <= number < len(self.signatures):
            return Ed25519PrivateKey.from_private_bytes(self.secret), self.invitation
        key, invitation = _single(self.secret, self.invitation, number)
        return key, msgspec.structs.replace(invitation, signature=self.signatures[number])


def _single(secret: bytes, whole: Invitation, number: int) -> tuple[Ed25519PrivateKey, Invitation]:
    """Return the bearer's key of one seat of an invite, and the seat's invitation without its signature."""
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(_BEARER_DOMAIN + secret + bytes((number,))).digest())
    seat = whole.first_seat + number
    return key, Invitation(public_bytes(key), seat, 1, whole.expires_at, whole.quota)


class VisitorPass(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's signed permission for another key, which it made, to look into the run."""

    member: _Key
    expires_at: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    """Unix seconds, until when the visitor may connect to more members."""
    signature: _Signature


# They check nothing but the form; each raises `RemoteProtocolError`.
decode_admission: Final = MessageDecoder[Admission](Admission, "an admission", MAX_ADMISSION_BYTES)
decode_pass: Final = MessageDecoder[VisitorPass](VisitorPass, "a visitor's pass", MAX_PASS_BYTES)
decode_witness: Final = MessageDecoder[Witness](Witness, "a witness", MAX_WITNESS_BYTES)
decode_secret: Final = MessageDecoder[InviteSecret](InviteSecret, "what an invite to a run of invited members holds")


def sign_witness(key: Ed25519PrivateKey, run_id: bytes, admission: Admission, since: int) -> Witness:
    """Sign that a member has had its seat since then, in Unix seconds."""
    return Witness(public_bytes(key), since, sign(key, _WITNESS_DOMAIN, *_witnessed(run_id, admission, since)))


def _witnessed(run_id: bytes, admission: Admission, since: int) -> tuple[bytes, ...]:
    issuer = b"" if admission.sponsor is None else admission.sponsor.member
    return run_id, admission.member, issuer, encode(admission.seat), encode(since)


def check_witness(admission: Admission, run_id: bytes) -> None:
    """Raise `InvitationError` if an admission has a witness that did not sign for it, or is the member itself."""
    witness = admission.witness
    if witness is None:
        return
    if witness.key == admission.member:
        raise InvitationError("its member is its own witness")
    signed = _witnessed(run_id, admission, witness.since)
    if not is_signed_by(witness.key, witness.signature, _WITNESS_DOMAIN, *signed):
        raise InvitationError("it is not signed by its witness")


def sign_pass(member: Ed25519PrivateKey, run_id: bytes, visitor: bytes, expires_at: int) -> VisitorPass:
    """Sign a pass that lets a visitor's key look into a run as long as the member may."""
    signature = sign(member, PASS_DOMAIN, run_id, visitor, encode(expires_at))
    return VisitorPass(public_bytes(member), expires_at, signature)


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

    Where the creator invites a few members, each seat has a bearer of its own, and can be revoked alone.
    ``sponsor``: the issuer's own admission, None if it is the creator.
    """
    bearer = public_bytes(Ed25519PrivateKey.from_private_bytes(secret))
    sponsor = None if sponsor is None else msgspec.structs.replace(sponsor, witness=None)
    whole = Invitation(bearer, seats.start, len(seats), expires_at, quota)
    if sponsor is None and 1 < len(seats) <= MAX_SINGLE_BEARERS:
        singles = (_single(secret, whole, number)[1] for number in range(len(seats)))
        signatures = tuple(sign(issuer, _INVITATION_DOMAIN, run_id, encode(single)) for single in singles)
        return InviteSecret(secret, whole, sponsor, signatures)
    signature = sign(issuer, _INVITATION_DOMAIN, run_id, encode(whole))
    return InviteSecret(secret, msgspec.structs.replace(whole, signature=signature), sponsor)


def check_admission(admission: Admission, run_id: bytes, creator: bytes) -> None:
    """Raise `InvitationError` unless an admission is valid for this run, at some time."""
    invitation, sponsor = admission.invitation, admission.sponsor
    seats = range(invitation.first_seat, invitation.first_seat + invitation.num_seats)
    if sponsor is not None:
        if sponsor.witness is not None:
            raise InvitationError("a sponsor's admission needs no witness")
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
    check_witness(admission, run_id)
