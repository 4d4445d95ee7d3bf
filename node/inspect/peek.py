"""Visits to a run without membership: `farandole checkpoint pull` makes them with an invite.

A visitor has a key of its own for one visit: a node may be using the home's, and two hosts of one name would take
each other's connections. The home's key signs a pass for it (`farandole.protocol.run.invitations.VisitorPass`), by
which a members-only run lets it in. It announces nothing, so no node counts on it; it gets the run state by
anti-entropy.

    host -> connectivity -> manifest -> run state
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.invitations import sign_pass
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.state.entries import Beat, CheckpointNotice, Kind
from farandole.protocol.state.state import RunState
from farandole.protocol.state.writer import Writer
from farandole.protocol.wire.identity import public_bytes

from ..base.bandwidth import Shaping
from ..base.errors import JoinError
from ..base.identity import load_or_create_key
from ..base.nurseries import open_service_nursery
from ..base.settings import NodeSettings
from ..bulk.negotiation import open_bulk
from ..join.bootstrap import Target, dial, find_target, obtain_manifest, sync_state, wait_for_anyone
from ..mesh.host import Host, open_host
from ..mesh.mdns import open_mdns
from ..mesh.reach.connectivity import open_connectivity
from ..state.gossip import GossipService
from ..state.messenger import open_messenger
from ..state.store import open_store
from ..status.journal import Journal
from ..transfers.receiver import Conditions

# A person waits: a peer that restarts, or whose line loses packets, is dialled again soon, up to this number of times.
DIAL_ATTEMPTS: Final = 3
DIAL_PAUSE: Final = 2.0
# For peers that answer to say what the run is, and for the DHT to name some that can.
MANIFEST_TIMEOUT: Final = 40.0
# For a member to give its run state: two that are slow (`farandole.node.state.gossip.JOIN_TIMEOUT`).
SYNC_TIMEOUT: Final = 40.0
# For a pull to connect to members; a large model takes hours, and clocks may be an hour apart.
VISIT_SECONDS: Final = 86_400.0


@dataclass(frozen=True)
class Visit:
    """A visitor's connection to a run, while the visit lasts."""

    conditions: Conditions
    manifest: Manifest
    raw_manifest: bytes
    gossip: GossipService

    def live(self) -> frozenset[bytes]:
        """Return the live members."""
        members = self.gossip.state.members()
        return frozenset(peer for peer in self.gossip.liveness.live(trio.current_time()) if peer in members)

    def members_of(self, stage: int) -> frozenset[bytes]:
        """Return the live members that hold a stage."""
        members = self.gossip.state.members()
        return frozenset(peer for peer in self.live() if members[peer].stage == stage)

    def rounds_of(self, stage: int) -> list[int]:
        """Return the rounds in which the live members of a stage report that they train, without paused members."""
        members = self.gossip.state.members()
        training = (peer for peer in self.members_of(stage) if not members[peer].is_paused)
        beats = (self.gossip.state.payload(peer, Beat) for peer in training)
        return [beat.round for beat in beats if beat is not None]

    def notices(self) -> list[tuple[bytes, CheckpointNotice]]:
        """Return the checkpoints that live members report."""
        live, notices = self.live(), self.gossip.state.entries(Kind.CHECKPOINT)
        return [(entry.author, entry.payload) for entry in notices if entry.author in live]


@asynccontextmanager
async def open_visit(settings: NodeSettings, say: Callable[[str], None]) -> AsyncIterator[Visit]:
    """Visit the run within the block; of the settings, the ones that name the run and the connection are used.

    ``say`` prints which peers it tries. Raises `JoinError` once all have refused, or have not answered in time.
    """
    key, journal = Ed25519PrivateKey.generate(), Journal(say)
    target = find_target(settings, key, None, {})
    shaping = Shaping.of_mbit(settings.upload_mbit, settings.download_mbit)
    with tempfile.TemporaryDirectory(prefix="farandole-visit-") as folder:
        async with (
            open_store(Path(folder) / "store.sqlite") as store,
            open_host(key, settings.listening, shaping=shaping, network_key=target.network_key) as host,
            open_messenger(host) as messenger,
            open_connectivity(host, target.run_id, shaping, target.peers) as connectivity,
            open_mdns(host, target.run_id, is_on=settings.mdns),
            open_bulk(host, target.run_id, shaping, connectivity) as channels,
        ):
            # Without the home's key a key of its own signs the pass, so that a refusal gives its reason.
            member = load_or_create_key(settings.key) if settings.key.exists() else key
            visitor = sign_pass(member, target.run_id, public_bytes(key), int(time.time() + VISIT_SECONDS))
            host.gate.show(target.run_id, b"", target.secret, visitor)
            await _reach(host, target, journal)
            raw = None
            with trio.move_on_after(MANIFEST_TIMEOUT):
                raw = await obtain_manifest(host, target, journal)
            if raw is None:
                raise JoinError(
                    f"peers answer, but none is in run {target.run_id.hex()[:16]}, and the DHT knew of no member "
                    f"within {MANIFEST_TIMEOUT:g} s. The run may have ended; ask for a newer invite, and let "
                    "`farandole doctor` look at it"
                )
            manifest, signed = decode_manifest(raw)
            state = RunState(target.run_id, signed.creator)
            gossip = GossipService(state, Writer(key, target.run_id), host, messenger, store, random.Random())
            async with open_service_nursery() as nursery:
                await nursery.start(gossip.run)
                journal.say("asking members for the run state")
                if not await sync_state(gossip, journal, SYNC_TIMEOUT):
                    raise JoinError(
                        f"members were found, but none gave its run state within {SYNC_TIMEOUT:g} s. Try again later"
                    )
                yield Visit(Conditions(host, target.run_id, shaping, channels), manifest, raw, gossip)


async def _reach(host: Host, target: Target, journal: Journal) -> None:
    """Connect to a peer that the invite names, or that is found in the local network while dialling."""
    places = ", ".join(addresses[0].rpartition("/p2p/")[0] for addresses in target.peers.values())
    journal.say(f"dialling whom the invite names: {places}" if places else "looking for members in the local network")
    failures: dict[bytes, str] = {}
    for attempt in range(DIAL_ATTEMPTS):
        if attempt:
            await wait_for_anyone(host, DIAL_PAUSE)
        failures = await dial(host, target.peers, is_one_enough=True)
        if host.connected:
            return
    reasons = "\n".join(f"  {reason}" for reason in failures.values()) or "  it names nobody"
    raise JoinError(
        f"nobody whom the invite names could be reached:\n{reasons}\nThey may have left the run, or this machine is "
        "offline. Ask for a newer invite: any member can make one (`farandole run invite`)"
    )
