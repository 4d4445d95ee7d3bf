"""The reports of a node in a large run, from real parts and a thousand members' entries."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.bandwidth import Shaping
from farandole.node.mesh.host import Host, open_host
from farandole.node.mesh.reach.connectivity import open_connectivity
from farandole.node.status.journal import MAX_EXCHANGES, Journal
from farandole.node.ui.reporting import Reporter
from farandole.protocol.state.entries import Beat, Delta, Entry, Kind, Member, Progress
from farandole.protocol.state.liveness import Liveness
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import peer_id_of, public_bytes
from farandole.testnet.simulate.state import key_of

from ..hosts import LOOPBACK, host_at_loopback
from ..statuses import ended

RUN_ID = b"r" * 32
NUM_MEMBERS = 1_000


def entries_of(key: Ed25519PrivateKey, number: int) -> list[Entry]:
    """Return what a newcomer hears of a member."""
    writer, now = Writer(key, RUN_ID), time.time()
    writer.resume(())
    if (mark := writer.mark_needed(Kind.MEMBER, 0, now)) is not None:
        writer.marked(mark)
    payloads = {
        Kind.MEMBER: Member(device="cpu", addresses=("/ip4/127.0.0.1/tcp/9",) if number % 3 else ()),
        Kind.PROGRESS: Progress(0, 0, 0, 0, 0),
        Kind.BEAT: Beat(0, 0, 10_000_000, 10_000, b""),
    }
    return [writer.write(kind, 0, payload, now) for kind, payload in payloads.items()]


@asynccontextmanager
async def reporter_of(journal: Journal, num_members: int) -> AsyncIterator[tuple[Reporter, Host]]:
    state, liveness = RunState(RUN_ID, b"c" * 32), Liveness()
    keys = [key_of(1_000_000 + number) for number in range(num_members)]
    entries = [entry for number, key in enumerate(keys) for entry in entries_of(key, number)]
    state.merge(Delta(tuple(entry.signed for entry in entries)), time.time())
    for number, key in enumerate(keys):
        liveness.beat(public_bytes(key), 1, trio.current_time())
        if number:
            liveness.trust(public_bytes(key))
    async with (
        host_at_loopback() as host,
        open_connectivity(host, Ed25519PrivateKey.generate(), RUN_ID, Shaping()) as connectivity,
    ):
        yield Reporter(host, journal, RUN_ID, "large", 0.0, Shaping(), connectivity, state, liveness), host


async def test_a_status_for_the_screen_stays_small_and_says_all_of_the_run() -> None:
    journal = Journal(say=lambda text: None)
    for round_index in range(3 * MAX_EXCHANGES):
        peer = round_index.to_bytes(32, "big")
        journal.record_exchange(ended(round_index, peer, bytes_sent=1, bytes_received=1, seconds=1))
        journal.note("x" * 10_000)
    async with (
        reporter_of(journal, NUM_MEMBERS) as (reporter, host),
        open_host(key_of(1_000_700), LOOPBACK) as other,
    ):
        await other.connect(host.author, host.addresses)
        await anext(host.connections.events())
        status = reporter.status(max_members=64)
        assert (status.run.members_live, status.run.members_heard, status.run.members_gone) == (NUM_MEMBERS - 1, 1, 0)
        assert len(status.members) == 64
        assert (status.members[0].peer_id, status.members[0].path) == (peer_id_of(other.author), "direct")
        assert len(status.recent_exchanges) == MAX_EXCHANGES
        assert len(msgspec.json.encode(status)) < 128_000
        assert len(reporter.status().members) == NUM_MEMBERS
