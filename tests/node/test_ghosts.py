"""Keys that send only heartbeats, next to real daemons: they are not members, and change no node's round."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.status.status import NodeStatus
from farandole.protocol.run.invite import peers_at
from farandole.protocol.run.manifest import SignedManifest
from farandole.protocol.state.entries import Beat, Kind, Member
from farandole.protocol.wire.identity import peer_id_of

from ..protocol.authors import author_of
from .daemons import Daemon, two_that_average
from .outsiders import open_pusher

GHOSTS: Final = range(1_000, 1_060)
CLAIMED_ROUND: Final = 100_000
# Exchanges between honest nodes while the ghosts are there.
NUM_EXCHANGES: Final = 5


def committed(status: NodeStatus, partner: str) -> int:
    return next((number for peer, number in status.partners.items() if peer[-8:] == partner), 0)


def has_stopped(status: NodeStatus) -> bool:
    """Return whether the node has ever ended its trainer to take newer weights."""
    return any("taking newer weights" in event.text for event in status.events)


def heard(status: NodeStatus) -> set[str]:
    return {member.peer_id for member in status.members} & {peer_id_of(author_of(number)) for number in GHOSTS}


async def test_sixty_ghosts_that_claim_a_round_far_ahead_stop_nobody(
    tmp_path: Path, run: SignedManifest, texts: Path
) -> None:
    """They claim to be alive, at addresses without a node, and far ahead, over one process's connections."""
    async with two_that_average(tmp_path, run.run_id, "--data", str(texts)) as (alice, bob):
        await alice.says("averaged with")
        victims = peers_at([*alice.addresses, *bob.addresses])
        async with open_pusher(run.run_id, victims, Ed25519PrivateKey.generate()) as pusher:
            for number in GHOSTS:
                member = Member(addresses=(f"/ip4/127.0.0.1/tcp/{20_000 + number}",))
                beat = Beat(5_000_000, CLAIMED_ROUND, 1_000_000, 1_000)
                pusher.said += [(number, Kind.MEMBER, member), (number, Kind.BEAT, beat)]
            for daemon, other in ((alice, bob), (bob, alice)):
                await averages_on(daemon, other.name)


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
