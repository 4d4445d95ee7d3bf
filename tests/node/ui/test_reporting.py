"""The reports of a node in a large run, from real parts and a thousand members' entries."""

from __future__ import annotations

import time

import msgspec
import trio

from farandole.node.base.bandwidth import Shaping
from farandole.node.mesh.host import open_host
from farandole.node.status.journal import MAX_EXCHANGES, Journal
from farandole.node.ui.reporting import Reporter
from farandole.protocol.state.entries import Beat, Delta, Kind, Member, Progress
from farandole.protocol.state.liveness import Liveness
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.identity import peer_id_of

from ...protocol import authors
from ..hosts import LOOPBACK, open_node
from ..statuses import ended

RUN_ID = b"r" * 32
NUM_MEMBERS = 1_000


def run_of_many() -> tuple[RunState, Liveness]:
    """Return what a newcomer hears of a large run, of which it has reached all members but one."""
    state, liveness, now = RunState(RUN_ID, b"c" * 32), Liveness(), time.time()
    for number in range(NUM_MEMBERS):
        payloads = {
            Kind.MEMBER: Member(device="cpu", addresses=("/ip4/127.0.0.1/tcp/9",) if number % 3 else ()),
            Kind.PROGRESS: Progress(0, 0, 0, 0, 0),
            Kind.BEAT: Beat(0, 0, 10_000_000, 10_000, b""),
        }
        for kind, said in payloads.items():
            state.merge(Delta((authors.signed(number, kind, 0, authors.tick_at(kind, now), said, RUN_ID),)), now)
        liveness.beat(authors.author_of(number), 1, trio.current_time())
        if number:
            liveness.trust(authors.author_of(number))
    return state, liveness


async def test_a_status_for_the_screen_stays_small_and_says_all_of_the_run() -> None:
    journal = Journal(lambda text: None)
    for round_index in range(3 * MAX_EXCHANGES):
        peer = round_index.to_bytes(32, "big")
        journal.record_exchange(ended(round_index, peer, bytes_sent=1, bytes_received=1, seconds=1))
        journal.note("x" * 10_000)
    async with open_node(run_id=RUN_ID) as (host, connectivity), open_host(authors.key_of(700), LOOPBACK) as other:
        reporter = Reporter(host, journal, RUN_ID, "large", 0.0, Shaping(), connectivity, *run_of_many())
        await other.connect(host.author, host.addresses)
        while not host.connected:
            await host.connections.wait_for_change()
        status = reporter.status(max_members=64)
        assert (status.run.members_live, status.run.members_heard, status.run.members_gone) == (NUM_MEMBERS - 1, 1, 0)
        assert len(status.members) == 64
        assert (status.members[0].peer_id, status.members[0].path) == (peer_id_of(other.author), "direct")
        assert len(status.recent_exchanges) == MAX_EXCHANGES
        assert len(msgspec.json.encode(status)) < 128_000
        assert len(reporter.status().members) == NUM_MEMBERS
