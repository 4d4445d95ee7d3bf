"""Invitations and revocations signed by a node: none is lost, and no seat is given twice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.state.credentials import Credentials, CredentialsError
from farandole.node.status.journal import Journal
from farandole.protocol.run.invitations import InvitationError
from farandole.protocol.run.roster import Roster
from farandole.protocol.state.entries import REVOKED_PER_ENTRY, AdmissionProof, Kind, Payload, Revocation
from farandole.protocol.wire.identity import public_bytes

RUN_ID = b"r" * 32
CREATOR = Ed25519PrivateKey.generate()
ANNA, BEN = b"a" * 32, b"b" * 32


class Disk:
    """Keeps facts from one process to the next. The real store has a thread, for which virtual time does not wait."""

    def __init__(self) -> None:
        self.facts: dict[str, bytes] = {}

    async def get_fact(self, name: str) -> bytes | None:
        await trio.lowlevel.checkpoint()
        return self.facts.get(name)

    async def put_fact(self, name: str, value: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.facts[name] = bytes(value)

    async def remember(self, name: str, value: bytes, journal: Journal, loss: str) -> None:
        await self.put_fact(name, value)


class PostponingGossip:
    """Keeps the newest payload of a slot, and does not write it yet."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(entries=lambda kind: iter(()))
        self.postponed: dict[tuple[Kind, int], Payload] = {}
        self.changed = trio.lowlevel.ParkingLot()

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        self.postponed[kind, index] = payload


def credentials_of(key: Ed25519PrivateKey, store: Disk, gossip: PostponingGossip) -> Credentials:
    creator, gate, journal = public_bytes(CREATOR), SimpleNamespace(run=trio.sleep_forever), SimpleNamespace()
    parts: Any = (gate, Roster(RUN_ID, creator), gossip, store, journal)
    return Credentials(key, RUN_ID, creator, public_bytes(key), *parts)


async def test_revocations_in_a_row_are_all_published() -> None:
    store, gossip = Disk(), PostponingGossip()
    credentials = credentials_of(CREATOR, store, gossip)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(credentials.revoke, [ANNA])
        nursery.start_soon(credentials.revoke, [BEN])
    assert gossip.postponed[Kind.REVOCATION, 0] == Revocation((ANNA, BEN))
    restarted = credentials_of(CREATOR, store, gossip)
    await restarted.restore([ANNA])
    assert gossip.postponed[Kind.REVOCATION, 0] == Revocation((BEN,))


async def test_a_revocation_that_was_not_written_before_the_node_ended_is_published_by_its_next_life() -> None:
    store, gossip = Disk(), PostponingGossip()
    await credentials_of(CREATOR, store, PostponingGossip()).revoke([ANNA])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(credentials_of(CREATOR, store, gossip).run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert gossip.postponed == {(Kind.REVOCATION, 0): Revocation((ANNA,))}


async def test_a_revoked_key_stays_in_its_entry() -> None:
    """Otherwise nodes that have received one of two new entries would miss a key that has moved to the other."""
    store, gossip = Disk(), PostponingGossip()
    credentials = credentials_of(CREATOR, store, gossip)
    newest, *keys = (bytes([number]) * 32 for number in range(1, REVOKED_PER_ENTRY + 2))

    def published() -> list[set[bytes]]:
        return [set(payload.keys) for _, payload in sorted(gossip.postponed.items()) if isinstance(payload, Revocation)]

    await credentials.revoke(keys)
    await credentials.revoke([newest])
    assert published() == [set(keys), {newest}]
    await credentials.restore(keys[3:5])
    assert published() == [{*keys} - {*keys[3:5]}, {newest}]
    await credentials_of(CREATOR, store, gossip).revoke([ANNA, newest])
    assert published() == [{*keys, ANNA} - {*keys[3:5]}, {newest}]
    await credentials.restore([newest])
    assert published() == [{*keys, ANNA} - {*keys[3:5]}, set()]


async def test_a_member_that_is_readmitted_renews_its_admission_and_warns_no_longer() -> None:
    gossip, journal = PostponingGossip(), Journal(lambda text: None)
    plain = credentials_of(Ed25519PrivateKey.generate(), Disk(), gossip)
    gate: Any = SimpleNamespace(run=trio.sleep_forever, admission=b"an admission", introduce_again=lambda: None)
    credentials = replace(plain, gate=gate, journal=journal)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(credentials.run)
        await trio.testing.wait_all_tasks_blocked()
        gossip.changed.unpark_all()  # the roster lacks it: it was revoked
        await trio.testing.wait_all_tasks_blocked()
        assert "no longer a member" in journal.standing[0].text
        assert gossip.postponed == {}
        credentials.roster.hear_creator(0, 1, frozenset(), frozenset([credentials.author]))
        gossip.changed.unpark_all()
        await trio.testing.wait_all_tasks_blocked()
        assert journal.standing == []
        assert gossip.postponed == {(Kind.ADMISSION, 0): AdmissionProof(b"an admission")}
        nursery.cancel_scope.cancel()


async def test_invites_at_the_same_moment_are_for_different_seats() -> None:
    credentials, seats = credentials_of(CREATOR, Disk(), PostponingGossip()), list[int]()

    async def invite() -> None:
        invited = (await credentials.invite(2, 2e9, 0)).invitation
        seats.extend(range(invited.first_seat, invited.first_seat + invited.num_seats))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(invite)
    assert sorted(seats) == list(range(6))


async def test_only_the_creator_revokes() -> None:
    credentials = credentials_of(Ed25519PrivateKey.generate(), Disk(), PostponingGossip())
    with pytest.raises(CredentialsError, match="only the run's creator"):
        await credentials.revoke([ANNA])
    with pytest.raises(CredentialsError, match="may not invite"):
        await credentials.invite(1, 2e9, 0)


@pytest.mark.parametrize("uses", [4, 20])
async def test_a_revoked_members_invite_admits_nobody_any_more_and_the_others_that_came_by_it_stay(uses: int) -> None:
    """A few seats have a bearer each, of which the free ones close; many share one, and its other members are named."""
    store, gossip = Disk(), PostponingGossip()
    credentials = credentials_of(CREATOR, store, gossip)
    roster, invite = credentials.roster, await credentials.invite(uses, 2e9, 0)
    roster.settle()
    for seat, member in enumerate((ANNA, BEN)):
        roster.admit(invite.admit(RUN_ID, member, seat), 1e9)

    def hear() -> None:
        said = gossip.postponed[Kind.REVOCATION, 0]
        assert isinstance(said, Revocation)
        roster.hear_creator(0, 1, frozenset(said.keys), frozenset(said.readmitted))

    (told,) = await credentials.revoke([ANNA])
    assert (told[0], told[2]) == (ANNA, 0 if uses == 4 else 1)
    hear()
    assert [roster.is_member(who) for who in (ANNA, BEN)] == [False, True]
    for seat in range(uses):
        with pytest.raises(InvitationError):
            roster.admit(invite.admit(RUN_ID, b"c" * 32, seat), 1e9)
    await credentials.restore([ANNA])
    hear()
    assert [roster.is_member(who) for who in (ANNA, BEN)] == [True, True]
    await credentials.restore(invite.bearers)
    await credentials.revoke([BEN], keeps_invites=True)
    hear()
    roster.admit(invite.admit(RUN_ID, b"c" * 32, 2), 1e9)
    assert [roster.is_member(who) for who in (ANNA, BEN, b"c" * 32)] == [True, False, True]
    await credentials.restore([BEN])
    hear()
    await credentials.revoke([b"c" * 32])
    hear()
    assert [roster.is_member(who) for who in (ANNA, BEN, b"c" * 32)] == [True, True, False]
    await credentials.revoke(invite.bearers)
    hear()
    assert not any(map(roster.is_member, (ANNA, BEN, b"c" * 32)))
