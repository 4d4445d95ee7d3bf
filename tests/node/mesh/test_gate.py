"""The gate of an invited run, between real hosts: members pass, and strangers open no application streams."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.errors import NotAdmittedError, PeerUnreachableError
from farandole.node.base.streams import receive_frame
from farandole.node.mesh.connections import IDENTIFY_PROTOCOL
from farandole.node.mesh.gate import (
    ADMISSION_PROTOCOL,
    MAX_INTRODUCTION_BYTES,
    PUBLIC_PROTOCOLS,
    decode_introduction_answer,
)
from farandole.node.mesh.host import Host
from farandole.node.mesh.yamux import Libp2pStream
from farandole.protocol.mesh.relay import HOP_PROTOCOL
from farandole.protocol.run.invitations import InviteSecret, decode_admission, invite_members, sign_pass, sign_witness
from farandole.protocol.run.roster import Roster
from farandole.protocol.wire.errors import RemoteProtocolError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import public_bytes
from farandole.protocol.wire.messagepack import encode

from ..hosts import ECHO, assert_echo, echo, host_at_loopback, until

RUN_ID = b"r" * 32


@dataclass
class Run:
    creator: Ed25519PrivateKey
    num_seats: int = 0

    def roster(self) -> Roster:
        return Roster(RUN_ID, public_bytes(self.creator))

    def invite(self, uses: int = 1, seconds: float = 60.0, issuer: Ed25519PrivateKey | None = None) -> InviteSecret:
        seats = range(self.num_seats, self.num_seats + uses)
        self.num_seats += uses
        expires_at = int(time.time() + seconds)
        return invite_members(issuer or self.creator, RUN_ID, os.urandom(32), seats, expires_at)


@pytest.fixture
def run() -> Run:
    return Run(Ed25519PrivateKey.generate())


@asynccontextmanager
async def member_and_visitor(run: Run) -> AsyncIterator[tuple[Host, Host, list[bytes]]]:
    """Open a member behind its gate, which serves an echo and lists the peers served, and a host with its address."""
    served: list[bytes] = []
    async with host_at_loopback() as member, host_at_loopback() as visitor:
        invited = run.invite()
        member.gate.show(RUN_ID, b"", invited)
        roster = run.roster()
        roster.admit_own(invited.admit(RUN_ID, member.author, invited.invitation.first_seat))
        member.gate.close(RUN_ID, roster)
        roster.settle()

        async def serve(stream: Libp2pStream) -> None:
            served.append(stream.peer)
            await echo(stream)

        member.set_handler(ECHO, serve)
        visitor.dialler.add_addresses(member.author, member.addresses)
        yield member, visitor, served


async def forget(changed: object) -> None:
    """Stand for a disk that takes all seats."""


async def test_who_is_invited_passes_both_ways(run: Run) -> None:
    async with member_and_visitor(run) as (member, visitor, served):
        visitor.gate.show(RUN_ID, b"", run.invite())
        visitor.gate.close(RUN_ID, run.roster())
        visitor.set_handler(ECHO, echo)
        await assert_echo(visitor, member)
        assert served == [visitor.author]
        assert visitor.gate.roster is not None
        assert visitor.gate.roster.is_member(member.author)
        await assert_echo(member, visitor)


async def test_a_member_met_before_the_manifest_was_known_is_asked_for_its_admission_again(run: Run) -> None:
    """A newcomer has no roster until it has the manifest, and can check no admission without one."""
    async with member_and_visitor(run) as (member, visitor, _):
        visitor.gate.show(RUN_ID, b"", run.invite())
        await assert_echo(visitor, member)
        visitor.gate.close(RUN_ID, run.roster())
        await assert_echo(visitor, member)


async def test_a_stranger_reaches_no_protocol_but_those_of_libp2p(run: Run) -> None:
    async with member_and_visitor(run) as (member, visitor, served):
        protocols = set(member.handlers.protocols) - PUBLIC_PROTOCOLS
        assert ECHO in protocols
        for protocol in protocols:
            with pytest.raises(PeerUnreachableError):
                await visitor.open_stream(member.author, protocol)
        stream = await visitor.open_stream(member.author, IDENTIFY_PROTOCOL)
        assert await stream.receive_some()
        assert served == []


async def show_wrong(kind: str, run: Run, member: Host, visitor: Host) -> None:
    """Let the visitor show something that does not admit it."""
    invited = run.invite()
    seat = invited.invitation.first_seat
    match kind:
        case "uninvited":
            visitor.gate.show(RUN_ID, b"", None)
            visitor.gate.close(RUN_ID, run.roster())
        case "expired":
            visitor.gate.show(RUN_ID, b"", run.invite(seconds=-1.0))
        case "forged":
            visitor.gate.show(RUN_ID, b"", run.invite(issuer=Ed25519PrivateKey.generate()))
        case "another's":
            visitor.gate.show(RUN_ID, encode(invited.admit(RUN_ID, os.urandom(32), seat)), None)
        case "used":
            assert member.gate.roster is not None
            member.gate.roster.admit(invited.admit(RUN_ID, os.urandom(32), seat), time.time())
            visitor.gate.show(RUN_ID, b"", invited)
        case "of another run":
            visitor.gate.show(b"x" * 32, b"", invited)


KINDS = ["uninvited", "expired", "forged", "another's", "used", "of another run"]


@pytest.mark.parametrize("tries", [20, pytest.param(1_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_admits_nobody_opens_no_stream(kind: str, tries: int, run: Run) -> None:
    refusals: list[tuple[bytes, str]] = []
    async with member_and_visitor(run) as (member, visitor, served):
        visitor.gate.on_refused = lambda peer, refusal: refusals.append((peer, refusal))
        for _ in range(tries):
            await show_wrong(kind, run, member, visitor)
            with pytest.raises(NotAdmittedError):
                await visitor.open_stream(member.author, ECHO)
        assert served == []
        assert bool(visitor.gate.refusal) == (kind != "of another run")
        # The visitor's DHT introduces itself too, after some seconds.
        assert len(refusals) >= (0 if kind == "of another run" else tries)
        assert set(refusals) <= {(member.author, visitor.gate.refusal)}


@pytest.mark.parametrize("kind", ["uninvited", "expired", "used"])
async def test_nor_where_a_member_speaks_first(kind: str, run: Run) -> None:
    """The member's DHT does so at intervals, with all connected peers."""
    async with member_and_visitor(run) as (member, visitor, served):
        visitor.set_handler(ECHO, echo)
        await show_wrong(kind, run, member, visitor)
        await visitor.connect(member.author, member.addresses)
        with pytest.raises(NotAdmittedError):
            await member.open_stream(visitor.author, ECHO)
        with pytest.raises(NotAdmittedError):
            await visitor.open_stream(member.author, ECHO)
        assert served == []


@pytest.mark.parametrize("refusal", ["\x1b]0;title\x07", "no\n12:00:00  run verified", "\u202eon"])
async def test_a_refusal_that_a_terminal_would_obey_is_not_shown(refusal: str, run: Run) -> None:
    async with member_and_visitor(run) as (member, visitor, _):

        async def refuse(stream: Libp2pStream) -> None:
            await stream.send_all(frame(encode((refusal, "admission", b"")), MAX_INTRODUCTION_BYTES))

        member.set_handler(ADMISSION_PROTOCOL, refuse)
        visitor.gate.show(RUN_ID, b"", run.invite())
        with pytest.raises(PeerUnreachableError) as caught:
            await visitor.open_stream(member.author, ECHO)
        assert refusal not in str(caught.value)
        assert not visitor.gate.refusal


async def test_a_witness_that_others_do_not_trust_is_replaced(run: Run) -> None:
    """The attack: a member lets a newcomer in with a word that no other takes, and the newcomer is stuck with it."""
    async with member_and_visitor(run) as (member, visitor, _):
        invited, liar = run.invite(), Ed25519PrivateKey.generate()
        roster, of_liar = run.roster(), run.invite()
        roster.admit_own(of_liar.admit(RUN_ID, public_bytes(liar), of_liar.invitation.first_seat))
        own = invited.admit(RUN_ID, visitor.author, invited.invitation.first_seat)
        for since in (2**40, 0):
            sign_late = sign_witness(liar, RUN_ID, own, since)
            visitor.gate.show(RUN_ID, encode(msgspec.structs.replace(own, witness=sign_late)), None)
            if visitor.gate.roster is None:
                visitor.gate.close(RUN_ID, roster)
            visitor.gate.introduce_again()
            member.gate.store = forget
            await assert_echo(visitor, member)
            witness = decode_admission(visitor.gate.admission).witness
            assert witness is not None
            assert witness.key == (member.author if since else public_bytes(liar))


async def test_a_newcomer_speaks_to_members_whose_invites_have_expired_since(run: Run) -> None:
    async with member_and_visitor(run) as (member, visitor, _):
        expired = run.invite(seconds=-1.0)
        seat = expired.invitation.first_seat
        member.gate.show(RUN_ID, encode(expired.admit(RUN_ID, member.author, seat)), None)
        visitor.gate.show(RUN_ID, b"", run.invite())
        visitor.gate.close(RUN_ID, run.roster())
        await assert_echo(visitor, member)


async def test_a_member_may_ask_a_relay_that_is_in_no_run(run: Run) -> None:
    async with member_and_visitor(run) as (member, relay, _):
        relay.set_handler(HOP_PROTOCOL, echo)
        member.dialler.add_addresses(relay.author, relay.addresses)
        stream = await member.open_stream(relay.author, HOP_PROTOCOL)
        await stream.send_all(b"reserve")
        assert await stream.receive_some() == b"reserve"
        assert not member.gate.refusal


async def test_a_member_that_relays_does_so_for_members(run: Run) -> None:
    async with member_and_visitor(run) as (member, visitor, _):
        member.set_handler(HOP_PROTOCOL, echo)
        with pytest.raises(PeerUnreachableError):
            await visitor.open_stream(member.author, HOP_PROTOCOL)
        visitor.gate.show(RUN_ID, b"", run.invite())
        assert await visitor.open_stream(member.author, HOP_PROTOCOL)


@pytest.mark.parametrize(("is_visitor", "is_at_once"), [(False, False), (True, False), (False, True)])
async def test_who_is_revoked_is_disconnected_and_so_are_its_visitors(
    is_visitor: bool, is_at_once: bool, run: Run
) -> None:
    async with member_and_visitor(run) as (member, visitor, _), trio.open_nursery() as nursery:
        key, invited, roster = Ed25519PrivateKey.generate(), run.invite(), member.gate.roster
        assert roster is not None
        if is_visitor:
            roster.admit(invited.admit(RUN_ID, public_bytes(key), invited.invitation.first_seat), time.time())
            show_pass(visitor, key)
        else:
            visitor.gate.show(RUN_ID, b"", invited)
        if is_at_once:  # between two looks for revoked peers
            nursery.start_soon(member.gate.run)
            await trio.testing.wait_all_tasks_blocked(0.05)
        await assert_echo(visitor, member)
        if not is_at_once:
            nursery.start_soon(member.gate.run)
            await trio.testing.wait_all_tasks_blocked(0.05)
        conns = visitor.connections.of(member.author)
        assert conns
        roster.hear_creator(0, 1, frozenset((public_bytes(key) if is_visitor else visitor.author,)))
        await until(lambda: all(conn.muxed.is_closing for conn in conns))  # it may dial again, and gets no stream
        with pytest.raises(PeerUnreachableError):
            await visitor.open_stream(member.author, ECHO)
        nursery.cancel_scope.cancel()


# Visitors


def show_pass(visitor: Host, signer: Ed25519PrivateKey, secret: InviteSecret | None = None) -> None:
    visitor.gate.show(RUN_ID, b"", secret, sign_pass(signer, RUN_ID, visitor.author, int(time.time()) + 60))


async def test_a_visitor_passes_with_its_members_word_and_takes_no_seat(run: Run) -> None:
    async with member_and_visitor(run) as (member, visitor, served):
        invited = run.invite()
        show_pass(visitor, run.creator, invited)
        await assert_echo(visitor, member)
        assert served == [visitor.author]
        assert member.gate.roster is not None
        assert not member.gate.roster.is_member(visitor.author)
        visitor.set_handler(ECHO, echo)
        await assert_echo(member, visitor)  # as bulk channels need it
        async with host_at_loopback() as newcomer:
            newcomer.gate.show(RUN_ID, b"", invited)
            newcomer.dialler.add_addresses(member.author, member.addresses)
            await assert_echo(newcomer, member)
        async with host_at_loopback() as stranger:  # without a member's word it takes a seat
            show_pass(stranger, Ed25519PrivateKey.generate(), run.invite())
            stranger.dialler.add_addresses(member.author, member.addresses)
            await assert_echo(stranger, member)


async def test_a_visitor_speaks_to_anybody_where_the_run_is_open_or_the_peer_in_none() -> None:
    async with host_at_loopback() as alice, host_at_loopback() as relay, host_at_loopback() as visitor:
        alice.gate.show(RUN_ID, b"", None)
        show_pass(visitor, Ed25519PrivateKey.generate())
        for host in (alice, relay):
            host.set_handler(ECHO, echo)
            visitor.dialler.add_addresses(host.author, host.addresses)
            await assert_echo(visitor, host)
            await assert_echo(visitor, host)


async def test_what_a_later_release_appends_admits_nobody_and_keeps_nobody_out(run: Run) -> None:
    """The attack: a stranger adds fields to an introduction, or a member's answer names a reason that is not known."""
    async with member_and_visitor(run) as (member, visitor, served):
        await visitor.connect(member.author)
        secret = run.invite()
        proof = encode(secret.admit(RUN_ID, visitor.author, secret.invitation.first_seat))
        for admission, is_admitted in ((b"", False), (proof, True)):
            stream = await visitor.open_stream(member.author, ADMISSION_PROTOCOL)
            later = encode([RUN_ID, admission, b"", "later", {"is_admitted": True}])
            await stream.send_all(frame(later, MAX_INTRODUCTION_BYTES))
            raw = await receive_frame(stream, FrameParser(MAX_INTRODUCTION_BYTES))
            assert bool(decode_introduction_answer(raw).refusal) is not is_admitted
            assert member.gate.admits(visitor.author, ECHO) is is_admitted
        assert not served
    answer = decode_introduction_answer(encode(["too old", "release", b"", b"", 5]))
    assert (answer.refusal, answer.why) == ("too old", "release")
    with pytest.raises(RemoteProtocolError):
        decode_introduction_answer(encode(["too old", "release", b"a" * 1_000]))
