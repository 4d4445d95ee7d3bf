"""A node can always publish its own entries, whatever its training or a peer did to its numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from farandole.node.base.project import VERSION
from farandole.node.state.membership import (
    ADDRESSES_INTERVAL,
    COPY_SLOT,
    MEMBER_INTERVAL,
    OWN_SLOT,
    PROGRESS_INTERVAL,
    Announcer,
    Membership,
)
from farandole.node.status.journal import Journal
from farandole.protocol.state.believing import ClockSkew
from farandole.protocol.state.entries import RULES, Beat, CheckpointNotice, Kind, Member, Payload, StageLease, Suspects
from farandole.protocol.state.liveness import Liveness

from ..transfers.files import index_of


class Gossip:
    """Records published entries."""

    def __init__(self) -> None:
        self.liveness = Liveness()
        self.published: list[tuple[Kind, Payload]] = []
        self.clock_skew: ClockSkew | None = None
        self.state = Told()
        self.changed = trio.lowlevel.ParkingLot()

    async def publish(self, kind: Kind, index: int, payload: Payload) -> None:
        self.published.append((kind, payload))
        if kind is Kind.MEMBER:
            self.state.tell(ME, payload)


@pytest.mark.parametrize(
    ("beats", "round_index"),
    [
        ([], 0),
        ([Beat(0, 0, None, 0)], 0),  # the beginning of a run
        ([Beat(900, 30, None, 0), Beat(0, 0, None, 0), Beat(0, 0, None, 0)], 30),  # the median is without newcomers
        ([Beat(0, 30, None, 0), Beat(0, 0, None, 0)], 30),  # a member that has just come back
        ([Beat(50, 0, None, 0), Beat(0, 0, None, 0)], 0),
    ],
)
async def test_newcomers_do_not_make_a_run_look_young(beats: list[Beat], round_index: int) -> None:
    node = Staged()
    for index, beat in enumerate(beats):
        node.hear_beat(bytes([index]) * 32, Member(), beat)
    assert node.membership.current_round() == round_index


async def test_what_was_found_or_has_expired_while_this_machine_slept_is_announced_at_once(clock: MockClock) -> None:
    node = Staged()
    node.host.addresses = ["/ip4/10.0.0.1/tcp/1/p2p/x"]
    await node.announcer.announce()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.announcer.run)
        await trio.sleep(ADDRESSES_INTERVAL * 3)
        (before,) = node.told(Kind.MEMBER)
        node.host.addresses = [*node.host.addresses, "/ip4/5.1.1.1/tcp/2/p2p/y/p2p-circuit/p2p/x"]
        await trio.sleep(ADDRESSES_INTERVAL * 3)
        node.state.entries.clear()
        await trio.sleep(ADDRESSES_INTERVAL * 3)
        nursery.cancel_scope.cancel()
    _, after, again = node.told(Kind.MEMBER)
    assert len(after.addresses) == len(before.addresses) + 1
    assert again == after


ME, ANN, BOB, CYD, EVE = (bytes([number]) * 32 for number in range(1, 6))


class Told:
    """A run state with entries that were never signed."""

    def __init__(self) -> None:
        self.entries: dict[tuple[bytes, type[Payload], int], Payload] = {}

    def tell(self, author: bytes, *payloads: Payload, index: int = 0) -> None:
        self.entries |= {(author, type(payload), index): payload for payload in payloads}

    def payload(self, author: bytes, kind: type[Payload], index: int = 0) -> Payload | None:
        return self.entries.get((author, kind, index))

    def proof_of(self, author: bytes) -> None:
        return None

    def members(self) -> dict[bytes, Member]:
        return {name: entry for (name, _, _), entry in self.entries.items() if isinstance(entry, Member)}


def notice(stage: int, round_index: int) -> CheckpointNotice:
    return CheckpointNotice(round_index, stage, id_of(round_index), 1, 1, 1)


def id_of(round_index: int) -> bytes:
    return bytes([round_index]) * 32


class Staged:
    """A node of a run in three stages."""

    def __init__(self, *, is_bound: bool = False) -> None:
        self.gossip = Gossip()
        self.state = self.gossip.state
        self.journal = Journal(lambda text: None)
        connections = SimpleNamespace(protect=lambda is_needed: None)
        self.host = SimpleNamespace(author=ME, addresses=[], connected=frozenset(), connections=connections)
        state: Any = self.state
        gossip: Any = self.gossip
        host: Any = self.host
        self.announcer = Announcer(host, gossip, self.journal, incarnation=1, num_stages=3, is_bound=is_bound)
        self.membership = Membership(host, state, gossip, self.journal, self.announcer, num_stages=3)

    def told(self, kind: Kind) -> list[Any]:
        """Return what this node has published of a kind."""
        return [payload for published, payload in self.gossip.published if published is kind]

    def hear(self, peer: bytes, stage: int, round_index: int = 0, speed: int = 0, *, is_bound: bool = False) -> None:
        member = Member(stage, speed=speed, is_bound=is_bound)
        self.hear_beat(peer, member, Beat(round_index, round_index, None, 0))

    def hear_beat(self, peer: bytes, member: Member, beat: Beat, *, is_reached: bool = True) -> None:
        self.state.tell(peer, member, beat)
        self.gossip.liveness.beat(peer, 1, trio.current_time())
        if is_reached:
            self.gossip.liveness.trust(peer)
        self.membership.refresh()


async def test_peers_are_those_of_the_own_stage_and_nodes_those_of_all(nursery: trio.Nursery) -> None:
    node = Staged()
    peers: list[frozenset[bytes]] = []
    nodes: list[tuple[frozenset[bytes], ...]] = []

    async def follow() -> None:
        while True:
            await node.membership.changed.park()
            peers.append(node.membership.live)
            nodes.append(node.membership.nodes_of_stages())

    nursery.start_soon(follow)
    await trio.testing.wait_all_tasks_blocked()
    node.hear(ANN, 0)
    node.hear(BOB, 1)
    node.hear(EVE, 7)  # no such stage
    assert node.membership.live == {ANN}
    assert node.membership.everyone == {ANN, BOB}
    assert node.membership.nodes_of_stages() == (frozenset((ME, ANN)), frozenset((BOB,)), frozenset())
    await trio.testing.wait_all_tasks_blocked()
    await node.membership.hold(1)
    await trio.testing.wait_all_tasks_blocked()
    assert peers == [{ANN}, {BOB}]
    assert nodes[-1] == (frozenset((ANN,)), frozenset((BOB, ME)), frozenset())
    assert [len(nodes) for nodes in node.membership.nodes_of_stages()] == [1, 2, 0]
    assert node.gossip.published[-1][1] == Member(stage=1, incarnation=1, version=VERSION)


async def test_weights_come_from_the_stage_or_from_who_keeps_a_copy() -> None:
    node = Staged()
    for peer, stage in ((ANN, 0), (BOB, 1), (CYD, 1), (EVE, 2)):
        node.hear(peer, stage, round_index=9)
    node.state.tell(BOB, notice(2, 8))  # it has moved since
    node.state.tell(CYD, notice(1, 8))
    node.state.tell(ANN, notice(1, 5), index=1)
    node.state.tell(EVE, notice(1, 7), index=1)
    membership = node.membership
    assert membership.donors(0, 1) == [CYD, BOB]
    assert membership.announced(1) == {CYD: notice(1, 8)}
    assert membership.notices(1) == {ANN: [notice(1, 5)], CYD: [notice(1, 8)], EVE: [notice(1, 7)]}
    assert membership.holders(1, id_of(7)) == [EVE]
    node.state.tell(ANN, notice(1, 7), index=1)
    node.host.connected = frozenset((ANN,))
    assert membership.holders(1, id_of(7)) == [ANN, EVE]
    assert membership.announced(2) == {}
    assert membership.holders(2, id_of(7)) == []


async def test_who_moves_and_how_fast_each_is_comes_from_the_run_state() -> None:
    node = Staged()
    node.hear(ANN, 0, speed=500)
    node.hear(BOB, 1, is_bound=True)
    node.state.tell(ANN, StageLease(0, 2))
    node.state.tell(BOB, StageLease(1, 1))
    assert node.membership.providers() == {ANN: Member(0, speed=500), BOB: Member(1, is_bound=True)}
    assert node.membership.leases() == {ANN: StageLease(0, 2)}


async def test_a_checkpoint_and_a_copy_are_announced_side_by_side() -> None:
    node = Staged()
    await node.membership.hold(2)
    index = index_of(b"checkpoint")
    await node.announcer.tell_held(OWN_SLOT, b"a" * 32, msgspec.structs.replace(index, stage=2))
    await node.announcer.tell_held(COPY_SLOT, b"b" * 32, index)
    told = {notice.id: notice.stage for notice in node.told(Kind.CHECKPOINT)}
    assert told == {b"a" * 32: 2, b"b" * 32: 0}
    assert node.membership.told_checkpoints() == frozenset()
    node.state.tell(ME, notice(2, 4))
    node.state.tell(ME, notice(1, 5), index=1)
    assert node.membership.told_checkpoints() == {id_of(4), id_of(5)}
    assert node.membership.announced(2) == {ME: notice(2, 4)}
    assert node.membership.notices(2) == {}


async def test_who_is_paused_holds_no_round_back_but_a_run_of_paused_nodes_is_where_they_left_it() -> None:
    node, paused = Staged(), Member(is_paused=True)
    node.hear_beat(ANN, Member(), Beat(900, 30, None, 0))
    node.hear_beat(BOB, paused, Beat(100, 3, None, 0))
    node.hear_beat(CYD, paused, Beat(100, 4, None, 0))
    assert node.membership.current_round() == 30
    node.hear_beat(ANN, paused, Beat(900, 30, None, 0))
    node.hear_beat(EVE, Member(), Beat(0, 0, None, 0))  # a member that has not trained does not count
    assert node.membership.current_round() == 4


AHEAD = Beat(9_000_000, 100_000, None, 0)


async def test_who_was_only_heard_of_is_no_member_to_decide_by() -> None:
    node = Staged()
    node.hear(ANN, 0, round_index=9)
    for ghost in (BOB, CYD, EVE):
        node.hear_beat(ghost, Member(), AHEAD, is_reached=False)
    membership = node.membership
    assert membership.everyone == {ANN, BOB, CYD, EVE}
    assert membership.reached == membership.live == {ANN}
    assert membership.current_round() == 9
    assert not membership.awaits_contact()
    node.host.connected = frozenset((BOB,))
    membership.refresh()
    assert membership.live == {ANN, BOB}, "it has proved its key"


async def test_the_round_is_that_of_partners_whatever_others_claim() -> None:
    node = Staged()
    node.hear(ANN, 0, round_index=9)
    for liar in (BOB, CYD, EVE):
        node.hear_beat(liar, Member(), AHEAD)
    assert node.membership.partners_round() == 0, "it has no partner yet: nothing stops its trainer"
    assert node.membership.current_round() == 100_000, "a trainer that begins has nothing else to go by"
    node.membership.partners.note(ANN)
    assert node.membership.partners_round() == node.membership.current_round() == 9
    node.hear_beat(ANN, Member(is_paused=True), Beat(9, 9, None, 0))
    assert node.membership.partners_round() == 0
    node.membership.doubt_those_ahead(20)
    assert node.membership.current_round() == 9
    assert node.membership.donors(0, 0) == [ANN]


async def test_a_node_waits_until_it_has_reached_a_member_that_trains_best_a_partner() -> None:
    node = Staged()
    node.hear_beat(BOB, Member(), Beat(0, 0, None, 0), is_reached=False)
    assert not node.membership.awaits_contact(), "a newcomer knows nothing"
    node.hear_beat(ANN, Member(), Beat(90, 9, None, 0), is_reached=False)
    assert node.membership.awaits_contact()
    node.hear_beat(EVE, Member(), AHEAD)
    assert not node.membership.awaits_contact()
    node.membership.partners.note(ANN)
    assert node.membership.awaits_contact()


async def test_suspicions_are_published_when_they_change_and_before_they_expire(clock: MockClock) -> None:
    node = Staged()
    announcer = node.announcer
    async with trio.open_nursery() as nursery:
        nursery.start_soon(announcer.run)
        await trio.sleep(1.5 * MEMBER_INTERVAL)
        assert node.told(Kind.SUSPECTS) == [], "a node without suspicions publishes nothing"
        announcer.note_suspicion(BOB, True)
        announcer.note_suspicion(BOB, True)
        await trio.sleep(2 * PROGRESS_INTERVAL)
        assert node.told(Kind.SUSPECTS) == [Suspects((BOB[:8],))]
        await trio.sleep(RULES[Kind.SUSPECTS].ttl)
        assert len(node.told(Kind.SUSPECTS)) > 3
        announcer.note_suspicion(BOB, False)
        await trio.sleep(2 * PROGRESS_INTERVAL)
        assert node.told(Kind.SUSPECTS)[-1] == Suspects(())
        nursery.cancel_scope.cancel()


async def test_only_suspicions_of_partners_that_are_believed_count() -> None:
    node = Staged()
    accusers = [bytes([number]) * 32 for number in range(10, 13)]
    for accuser in (BOB, *accusers):
        node.hear(accuser, 0)
    for accuser in accusers:
        node.state.tell(accuser, Suspects((BOB[:8],)))
    assert not node.membership.is_suspected(BOB), "anybody can say so"
    for accuser in accusers:
        node.membership.partners.note(accuser)
    assert node.membership.is_suspected(BOB)
    assert not node.membership.is_suspected(CYD)
    node.membership.credit.lose(accusers[:1], trio.current_time())
    assert not node.membership.is_suspected(BOB)
    node.state.tell(BOB, Suspects((BOB[:8],)))
    node.membership.partners.note(BOB)
    assert not node.membership.is_suspected(BOB), "its own list does not count"


async def test_a_clock_that_members_agree_on_is_reported_once(clock: MockClock) -> None:
    node = Staged()
    node.gossip.clock_skew = ClockSkew(-3_660.0, 3, is_agreed=True)
    with trio.move_on_after(10.0):
        await node.membership.run()
    assert node.journal.state.clock == node.gossip.clock_skew
    assert list(node.journal.warnings) == [
        "this machine's clock is 1 h 01 min behind, as the clocks of 3 members show: "
        "set it, for example with `timedatectl set-ntp true`"
    ]
    node.gossip.clock_skew = None
    with trio.move_on_after(3.0):
        await node.membership.run()
    assert node.journal.state.clock is None
    assert not node.journal.warnings, "it is over"


async def test_a_liar_about_the_time_is_ignored_while_a_member_is_live(clock: MockClock) -> None:
    node = Staged()
    node.gossip.clock_skew = ClockSkew(3_660.0, 1, is_agreed=False)
    node.hear(ANN, 0)
    with trio.move_on_after(1.5):
        await node.membership.run()
    assert node.journal.state.clock is None
    assert not node.journal.warnings
    with trio.move_on_after(120.0):  # ANN falls silent
        await node.membership.run()
    assert node.journal.state.clock == node.gossip.clock_skew
    assert [text for text in node.journal.warnings if "one of the clocks is wrong" in text]
