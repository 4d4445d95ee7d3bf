"""Admission control for streams: in a run with a roster, only members open streams of the application.

Before a node opens a stream, it introduces itself, once for each connection: it sends its admission
(`farandole.protocol.run.invitations`) over a stream of its own and receives the peer's. Peers that are not on the
roster get only the protocols in `PUBLIC_PROTOCOLS`. This covers every protocol, relays and dial-backs included, because
the host asks the gate before it negotiates a stream's protocol.

An open run has no roster, and its gate does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Final, Literal

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.mesh.reachability import DIALBACK_PROTOCOL
from farandole.protocol.mesh.relay import HOP_PROTOCOL, STOP_PROTOCOL
from farandole.protocol.run.invitations import (
    MAX_ADMISSION_BYTES,
    MAX_PASS_BYTES,
    MAX_WITNESS_BYTES,
    InvitationError,
    InviteSecret,
    SeatTakenError,
    VisitorPass,
    check_witness,
    decode_admission,
    decode_pass,
    decode_witness,
)
from farandole.protocol.run.manifest import RUN_ID_BYTES
from farandole.protocol.run.roster import Place, Roster
from farandole.protocol.wire.errors import FarandoleError, RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import public_bytes, short_name
from farandole.protocol.wire.messagepack import PRINTABLE, MessageDecoder, encode

from ..base.errors import NotAdmittedError, PeerUnreachableError
from ..base.streams import expecting_answer, receive_frame
from .connections import IDENTIFY_PROTOCOL, Connection, ConnectionPool, ProtocolHandlers
from .yamux import Libp2pStream

logger = logging.getLogger(__name__)

ADMISSION_PROTOCOL: Final = "/farandole/admission/2"
# Served to any peer: they reveal nothing about a run. The peer at the end of a relay's circuit passes the gate itself.
PUBLIC_PROTOCOLS: Final = frozenset((ADMISSION_PROTOCOL, IDENTIFY_PROTOCOL, STOP_PROTOCOL))
# Requested from peers that need not be members: relays, and peers that dial back.
HELPERS_PROTOCOLS: Final = frozenset((HOP_PROTOCOL, DIALBACK_PROTOCOL))
INTRODUCTION_TIMEOUT: Final = 10.0
MAX_INTRODUCTION_BYTES: Final = 1_024
# A sentence that is shown to people.
MAX_REFUSAL_CHARS: Final = 200
# Seats of one's invitation that are tried before a person is asked for another invite: each costs a round trip.
MAX_SEATS_TRIED: Final = 64
# Between two checks for revoked peers.
LOOK_INTERVAL: Final = 1.0

_Why = Literal["", "seat", "run", "admission"]
_Proof = Annotated[bytes, msgspec.Meta(max_length=MAX_ADMISSION_BYTES)]


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """The message of the dialling side.

    Fields that a later release appends to it, or to the answer, are skipped: any two releases can say why one does not
    admit the other. Only the signed admission and pass admit anyone, and these have no later fields.
    """

    run_id: Annotated[bytes, msgspec.Meta(min_length=RUN_ID_BYTES, max_length=RUN_ID_BYTES)]
    admission: _Proof
    """Empty for the run's creator and for listed members, who need none."""
    visitor_pass: Annotated[bytes, msgspec.Meta(max_length=MAX_PASS_BYTES)] = b""
    """A visitor's pass, encoded. Other introductions end before this field."""


class IntroductionAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an introduction."""

    refusal: Annotated[str, msgspec.Meta(max_length=MAX_REFUSAL_CHARS, pattern=PRINTABLE)]
    """For people; empty if the peer is admitted."""
    why: Annotated[str, msgspec.Meta(max_length=16)]
    """What the refusal is about (`_Why`): the seat, and another one of the invitation may be free; the run id; the
    admission. A later release may name something else."""
    admission: _Proof
    """The answering side's; empty if it refuses, or needs none."""
    witness: Annotated[bytes, msgspec.Meta(max_length=MAX_WITNESS_BYTES)] = b""
    """The answering side's word for the admission that it was shown; empty if it gives none."""


decode_introduction: Final = MessageDecoder[Introduction](Introduction, "an introduction")
decode_introduction_answer: Final = MessageDecoder[IntroductionAnswer](
    IntroductionAnswer, "an answer to an introduction"
)


class Gate:
    """The gate of one host; open until `close`."""

    def __init__(self, key: Ed25519PrivateKey, handlers: ProtocolHandlers, connections: ConnectionPool) -> None:
        """``key``: this node's; it signs for those that the node admits."""
        self.admission = b""
        """How this node was admitted, encoded; empty if it needs no admission, or has none yet."""
        self.refusal = ""
        """Why a member did not admit this node, if none has since."""
        self.on_refused: Callable[[bytes, str], None] = lambda peer, refusal: None
        """Called with the peer that does not admit this node, and the reason that it gives."""
        self._key = key
        self._author = public_bytes(key)
        self._connections = connections
        self._run_id = b""
        self.roster: Roster | None = None
        """The members; None: any peer may open streams to this node."""
        self.stored: Iterable[bytes] = ()
        """The holders of seats that an earlier life has stored; for the roster, once there is one."""
        self.store: Callable[[dict[Place, bytes | None]], Awaitable[None]] | None = None
        """Stores changed seats. Until it is set, this node is nobody's witness."""
        self._secret: InviteSecret | None = None
        self._pass = b""
        self._admitted: set[bytes] = set()
        """The peers that were admitted since the last look for revoked ones."""
        handlers.admits = self.admits
        handlers.set(ADMISSION_PROTOCOL, self._serve, MAX_INTRODUCTION_BYTES)

    def show(
        self, run_id: bytes, admission: bytes, secret: InviteSecret | None, visitor_pass: VisitorPass | None = None
    ) -> None:
        """Set what this node introduces itself with: its admission, or a new one if the invite is another.

        A visitor shows the ``visitor_pass`` that a member has signed; if that is refused, it takes a seat of the
        invite.
        """
        self._run_id, self.admission, self._secret = run_id, admission, secret
        self._pass = b"" if visitor_pass is None else encode(visitor_pass)
        if secret is None or visitor_pass is not None:
            return
        if not admission or decode_admission(admission).invitation.bearer not in secret.bearers:
            self.admission = self._at_seat(0)

    def close(self, run_id: bytes, roster: Roster) -> None:
        """Serve application protocols to members only.

        Connected peers are asked for their admissions again: without a roster, none could be checked.
        """
        self._run_id, self.roster = run_id, roster
        roster.load(self.stored)
        self.introduce_again()

    def introduce_again(self) -> None:
        """Introduce this node again to each connected peer, before its next stream."""
        for conn in self._connections.live:
            conn.is_introduced = False

    def admits(self, peer: bytes, protocol: str) -> bool:
        """Return whether a peer may open a stream of this protocol; note who may, in case it is revoked (`run`)."""
        if self.roster is None or protocol in PUBLIC_PROTOCOLS:
            return True
        if is_admitted := self.roster.admits(peer):
            self._admitted.add(peer)
        return is_admitted

    async def open_stream(self, conn: Connection, protocol: str) -> Libp2pStream:
        """Open a stream on a connection; if the protocol needs it, exchange admissions with the peer before.

        Raises `NotAdmittedError` if either side refuses, `PeerUnreachableError` if the exchange or the stream fails.
        """
        shown = self.roster is not None or self.admission or self._secret or self._pass
        if protocol in PUBLIC_PROTOCOLS or not shown:
            return await conn.open_stream(protocol)
        try:
            async with conn.introducing:
                if not conn.is_introduced:
                    await self._introduce(conn)
                    conn.is_introduced = True
        except PeerUnreachableError:  # not admitted, or the helper knows nothing of admissions
            # A visitor does not know whether the run has a roster; in one that has none its peers need not be members.
            is_open_to_all = self._pass and not self.refusal
            if protocol not in HELPERS_PROTOCOLS and not is_open_to_all:
                raise
        if not self.admits(conn.peer, protocol) and protocol not in HELPERS_PROTOCOLS:
            raise NotAdmittedError(f"{short_name(conn.peer)} is no member of this run")
        return await conn.open_stream(protocol)

    async def _introduce(self, conn: Connection) -> None:
        """Try the admission or the pass, and then seat after seat of the invite."""
        shown = self.admission
        answer = await self._ask(conn, shown)
        if self._secret is not None:
            num_tried, num_seats = int(bool(shown)), min(self._secret.invitation.num_seats, MAX_SEATS_TRIED)
            while num_tried < num_seats and (answer.why == "seat" or (answer.why == "admission" and not num_tried)):
                shown = self._at_seat(num_tried)
                num_tried += 1
                answer = await self._ask(conn, shown)
        if not answer.refusal:
            self.refusal = ""
            self._take_witness(shown, answer.witness)
            if self.roster is not None and answer.admission and not self.roster.is_member(conn.peer):
                try:  # with expired and used invites, too, only before the members are known
                    _admit(self.roster, conn.peer, answer.admission, is_newcomer=self.roster.is_settled)
                except RemoteProtocolError as error:
                    raise NotAdmittedError(f"{short_name(conn.peer)} is no member of this run: {error}") from error
            return
        if answer.why != "run":
            self.refusal = answer.refusal
            self.on_refused(conn.peer, answer.refusal)
        raise NotAdmittedError(f"{short_name(conn.peer)} does not admit this node: {answer.refusal}")

    async def refusal_of(self, peer: bytes) -> str:
        """Return why a connected peer admits nobody that has nothing to show; empty if it does not say so."""
        try:
            answer = await self._ask(self._connections.best(peer), b"")
        except PeerUnreachableError:
            return ""
        return answer.refusal if answer.why == "admission" else ""

    async def _ask(self, conn: Connection, shown: bytes) -> IntroductionAnswer:
        with expecting_answer(conn.peer, INTRODUCTION_TIMEOUT):
            stream = await conn.open_stream(ADMISSION_PROTOCOL)
            try:
                fields = self._run_id, shown, self._pass
                introduction = encode(fields if self._pass else fields[:2])  # the latter as older releases write it
                await stream.send_all(frame(introduction, MAX_INTRODUCTION_BYTES))
                return decode_introduction_answer(await receive_frame(stream, FrameParser(MAX_INTRODUCTION_BYTES)))
            finally:
                stream.reset()

    def _at_seat(self, number: int) -> bytes:
        """Return an admission for the ``number``-th try; members of one invite begin at different seats."""
        assert self._secret is not None
        invitation = self._secret.invitation
        seat = invitation.first_seat + (self._author[0] + number) % invitation.num_seats
        return encode(self._secret.admit(self._run_id, self._author, seat))

    def _take_witness(self, shown: bytes, raw: bytes) -> None:
        """Keep the admission that a peer has accepted, with its word for it unless there is one that others trust."""
        if not shown:
            return
        admission = decode_admission(shown)
        own = decode_admission(self.admission) if self.admission else admission
        if own is admission or (own.seat, own.invitation) != (admission.seat, admission.invitation):
            self.admission = shown
        if not raw:
            return
        admission = decode_admission(self.admission)  # another peer may have given a witness since
        witness = admission.witness
        if witness is None or (self.roster is not None and not self.roster.is_witnessed(admission)):
            with contextlib.suppress(RemoteProtocolError):
                witnessed = msgspec.structs.replace(admission, witness=decode_witness(raw))
                check_witness(witnessed, self._run_id)
                self.admission = encode(witnessed)

    # The other side

    async def _serve(self, stream: Libp2pStream) -> None:
        refusal, peer, witness = "", stream.peer, b""
        why: _Why = ""
        with trio.fail_after(INTRODUCTION_TIMEOUT):
            introduction = decode_introduction(await receive_frame(stream, FrameParser(MAX_INTRODUCTION_BYTES)))
            if introduction.run_id != self._run_id:
                refusal, why = "this node is in another run", "run"
            elif self.roster is not None and not self.roster.admits(peer):
                try:
                    _admit_stranger(self.roster, peer, introduction)
                except RemoteProtocolError as error:
                    refusal = str(error)[:MAX_REFUSAL_CHARS]
                    why = "seat" if isinstance(error, SeatTakenError) else "admission"
                    logger.info("%s is not admitted: %s", short_name(peer), refusal)
            elif self.roster is not None and introduction.admission:
                with contextlib.suppress(RemoteProtocolError):  # a member may have another seat now
                    _admit(self.roster, peer, introduction.admission, is_newcomer=True)
            if not refusal and introduction.admission and self.roster is not None and self.store is not None:
                try:  # if this node knows the admission, and remembers it from now on
                    given = self.roster.witness(decode_admission(introduction.admission), self._key, time.time())
                    await self.save()
                    witness = b"" if given is None else encode(given)
                except FarandoleError as error:
                    logger.warning("no witness of an admission: %s", error)
            answer = IntroductionAnswer(refusal, why, b"" if refusal else self.admission, witness)
            await stream.send_all(frame(encode(answer), MAX_INTRODUCTION_BYTES))

    async def save(self) -> None:
        """Store the seats that have changed. Raises `FarandoleError` if the disk does not take them."""
        if self.roster is None or self.store is None:
            return
        changed = self.roster.take_unsaved()
        if not changed:
            return
        try:
            await self.store(changed)
        except BaseException:  # also a cancellation
            self.roster.unsaved.update(changed)
            raise

    async def run(self) -> None:
        """Disconnect members whose admission is revoked, and their visitors; store changed seats. Until cancelled."""
        roster = self.roster
        if roster is None:
            return
        while True:
            self._admitted |= {peer for peer in self._connections.connected if roster.admits(peer)}
            await trio.sleep(LOOK_INTERVAL)
            try:
                await self.save()
            except FarandoleError as error:
                logger.warning("the members' seats are not on disk: %s", error)
            admitted, self._admitted = self._admitted, set()
            for peer in admitted & self._connections.connected:
                if not roster.admits(peer):
                    await self._connections.disconnect(peer)


def _admit(roster: Roster, peer: bytes, raw: bytes, *, is_newcomer: bool) -> None:
    """Admit a peer by its admission; raise `RemoteProtocolError` if it is another peer's, or forged."""
    admission = decode_admission(raw)
    if admission.member != peer:
        raise InvitationError("this is another member's admission")
    roster.admit(admission, time.time() if is_newcomer else None)


def _admit_stranger(roster: Roster, peer: bytes, introduction: Introduction) -> None:
    """Admit a peer by its pass, else by its admission; raise `RemoteProtocolError` if neither does."""
    if introduction.visitor_pass:
        try:
            return roster.admit_visitor(decode_pass(introduction.visitor_pass), peer, time.time())
        except RemoteProtocolError:
            if not introduction.admission:
                raise
    if not introduction.admission:
        raise InvitationError("this run is for invited members: ask one of them for an invite")
    _admit(roster, peer, introduction.admission, is_newcomer=True)
