"""Keys that send only heartbeats, next to real daemons: they are not members, and change no node's round."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import trio

from farandole.node.state.messenger import Messenger, open_messenger
from farandole.node.status.status import NodeStatus
from farandole.protocol.run.invite import peers_at
from farandole.protocol.state.entries import Beat, Kind, Member, deltas_of
from farandole.protocol.state.push import MAX_BATCH_BYTES, MAX_PUSH_BYTES, PROTOCOL, Batch
from farandole.protocol.wire.identity import peer_id_of
from farandole.protocol.wire.messagepack import encode

from ..protocol.authors import author_of, signed, tick_at
from .daemons import Daemon, joined
from .hosts import host_at_loopback
from .small_runs import small_manifest, write_run

GHOSTS: Final = range(1_000, 1_060)
CLAIMED_ROUND: Final = 100_000
# Exchanges between honest nodes while the ghosts are there.
NUM_EXCHANGES: Final = 5


def heartbeats(run_id: bytes) -> list[bytes]:
    """Return push messages of all ghosts: they claim to be alive, at addresses without a node, and far ahead."""
    now = time.time()
    members = [Member(addresses=(f"/ip4/127.0.0.1/tcp/{20_000 + number}",)) for number in GHOSTS]
    beat = Beat(5_000_000, CLAIMED_ROUND, 1_000_000, 1_000)
    entries = [
        *(
            signed(number, Kind.MEMBER, 0, tick_at(Kind.MEMBER, now), member, run_id)
            for number, member in zip(GHOSTS, members, strict=True)
        ),
        *(signed(number, Kind.BEAT, 0, tick_at(Kind.BEAT, now), beat, run_id) for number in GHOSTS),
    ]
    return [encode(Batch(False, delta)) for delta in deltas_of(entries, MAX_BATCH_BYTES)]


async def haunt(messenger: Messenger, victims: list[bytes], run_id: bytes) -> None:
    """Send for all ghosts over one process's connection, until cancelled."""
    while True:
        for payload in heartbeats(run_id):
            for victim in victims:
                messenger.send_nowait(victim, PROTOCOL, payload)
        await trio.sleep(1.0)


def committed(status: NodeStatus, partner: str) -> int:
    return next((number for peer, number in status.partners.items() if peer[-8:] == partner), 0)


def has_stopped(status: NodeStatus) -> bool:
    """Return whether the node has ever ended its trainer to take newer weights."""
    return any("taking newer weights" in event.text for event in status.events)


def heard(status: NodeStatus) -> set[str]:
    return {member.peer_id for member in status.members} & {peer_id_of(author_of(number)) for number in GHOSTS}


async def test_sixty_ghosts_that_claim_a_round_far_ahead_stop_nobody(tmp_path: Path, texts: Path) -> None:
    run, data = write_run(tmp_path, small_manifest()), ("--data", str(texts))
    async with (
        joined(tmp_path / "alice", str(tmp_path / "run.manifest"), *data) as alice,
        host_at_loopback() as host,
        open_messenger(host) as messenger,
        trio.open_nursery() as nursery,
    ):
        messenger.set_receiver(PROTOCOL, MAX_PUSH_BYTES, lambda peer, payload: None)
        await alice.says("listening on")
        async with joined(tmp_path / "bob", alice.invite(run.run_id), *data) as bob:
            await alice.says("averaged with")
            await bob.says("averaged with", alice.name)
            victims = peers_at([*alice.addresses, *bob.addresses])
            for victim, addresses in victims.items():
                await host.connect(victim, addresses)
            nursery.start_soon(haunt, messenger, [*victims], run.run_id)
            for daemon, other in ((alice, bob), (bob, alice)):
                await averages_on(daemon, other.name)
        nursery.cancel_scope.cancel()


async def averages_on(daemon: Daemon, partner: str) -> None:
    """Assert that the node knows all ghosts, and goes on as before."""
    begun = await daemon.until(lambda status: len(heard(status)) == len(GHOSTS))
    later = await daemon.until(
        lambda status: has_stopped(status) or committed(status, partner) >= committed(begun, partner) + NUM_EXCHANGES
    )
    assert not has_stopped(later)
    assert begun.round < later.round < CLAIMED_ROUND
    assert later.run.members_live == 2
    assert later.run.members_heard == len(GHOSTS)
