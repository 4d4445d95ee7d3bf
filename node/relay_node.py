"""A node without a trainer: what `farandole relay` runs.

It serves the DHT for one run or several, introduces newcomers to members, and relays between peers behind NAT as soon
as peers have found that they can dial it. It is a member of no run: it needs neither manifest nor run state, so it
costs a small machine little and cannot mislead a peer about a run. torch is never imported.

    store -> host -> connectivity (reachability, relay) -> control socket, page -> finding members
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import trio

from farandole.protocol.mesh.kademlia import relay_key
from farandole.protocol.mesh.reachability import ReachabilityKind, is_global
from farandole.protocol.mesh.relay import Limits
from farandole.protocol.run.invite import Invite, decode_invite, peers_at
from farandole.protocol.run.manifest import RUN_ID_BYTES
from farandole.protocol.wire.errors import ManifestError
from farandole.protocol.wire.identity import public_bytes, short_name

from .base.backoff import pauses
from .base.control import ControlError
from .base.figures import plural
from .base.nurseries import open_service_nursery
from .base.settings import NodeSettings
from .daemon import NETWORK_KEY_FACT, open_control, open_mesh, run_daemon
from .join.bootstrap import FIRST_REDIAL_PAUSE, NO_ANSWER, dial, find_members, how_many
from .member.parts import Daemon, Mesh
from .mesh.host import Host
from .relay_page import PublicPage, publish
from .state.store import Store, StoreError
from .status.journal import DISK, Journal

# Each costs two announcements in the DHT an hour, and a lookup a minute.
MAX_RUNS: Final = 16
RUNS_FACT: Final = "relayed runs"
# What the commands ask only of a member's node.
OF_MEMBERS: Final = (
    *("admit", "checkpoints", "invitation", "invite", "network_key", "notice", "pause", "quiet", "resume", "roster"),
)
ONLY_PRIVATE: Final = (
    "this relay knows no public address of its machine, so only its own network can dial it. On a cloud machine, or "
    "behind a router that forwards a port, start it with --port PORT --announce /ip4/PUBLIC-IP/tcp/PORT"
)
# Longest interval of checks for connected members.
MAX_LOOK_INTERVAL: Final = 30.0
# Members of each run to connect to; peers that connect for another reason are not counted.
NUM_MEMBERS: Final = 4


async def run_relay(settings: NodeSettings, invites: Sequence[str], page: Path | None = None) -> int:
    """Relay for the invites' runs and the stored ones until asked to leave; return the exit code (`Exit`).

    ``page``: folder for the run's public page, if there is to be one.
    """
    return await run_daemon(settings, partial(be_relay, invites, page))


async def be_relay(invites: Sequence[str], page: Path | None, daemon: Daemon) -> None:
    """Relay until asked to leave. Raises `ManifestError` if no run is known, or too many; see `PublicPage`."""
    decoded = [decode_invite(invite) for invite in invites]
    runs = await _load_runs(daemon.store, [invite.run_id for invite in decoded])
    named = peers_at([*(address for invite in decoded for address in invite.addresses), *daemon.settings.bootstrap])
    named.pop(public_bytes(daemon.key), None)
    network_keys = {invite.network_key for invite in decoded}
    if len(network_keys) > 1:
        raise ManifestError("a relay for a private run is for that run alone: give each its own --home, and a port")
    for network_key in network_keys:
        await daemon.store.put_fact(NETWORK_KEY_FACT, network_key)
    network_key = await daemon.store.get_fact(NETWORK_KEY_FACT) or b""
    if page is not None and len(runs) > 1:
        raise ManifestError(
            f"--page is for a relay of one run, and this one is for {len(runs)}: give it another --home"
        )
    public = None if page is None else await trio.to_thread.run_sync(PublicPage, page, runs[0])
    async with open_mesh(daemon, runs, {**daemon.book.peers(), **named}, Limits(), network_key) as mesh:

        async def refuse(params: dict[str, Any]) -> object:
            words = "a relay runs here, which is no member: type this where a member's node runs"
            raise ControlError("no_member", words)

        handlers = dict.fromkeys(OF_MEMBERS, refuse)
        async with open_control(daemon, mesh, runs[0], handlers), open_service_nursery() as nursery:
            seeker = MemberSeeker(daemon, mesh, runs, named)
            nursery.start_soon(seeker.run)
            daemon.journal.say("a node that others cannot dial connects to this relay, on its machine, with:")
            daemon.journal.say(f"  farandole dial {address_for_others(mesh.host, daemon.settings.announce)}")
            if not (daemon.settings.announce or any(is_global(known.split("/")[2]) for known in mesh.host.addresses)):
                daemon.journal.say(ONLY_PRIVATE)
            nursery.start_soon(_tell_reachability, mesh, daemon.journal, runs)
            if public is not None:
                invite = decoded[0] if decoded else Invite(runs[0], network_key=network_key)
                nursery.start_soon(publish, daemon.settings, invite, mesh.host.addresses, public, daemon.journal)
                daemon.journal.say(f"writing the run's public page into {page}")
            await daemon.is_leaving.wait()
            await seeker.remember(is_last=True)
        daemon.journal.say("left")


def address_for_others(host: Host, announced: Sequence[str]) -> str:
    """Return the address that other homes most likely reach."""

    def rank(address: str) -> tuple[bool, bool]:
        return address.partition("/p2p/")[0] in announced, is_global(address.split("/")[2])

    return max(host.addresses, key=rank, default="ADDRESS")


async def _load_runs(store: Store, named: Sequence[bytes]) -> list[bytes]:
    stored = await store.get_fact(RUNS_FACT) or b""
    before = [stored[place : place + RUN_ID_BYTES] for place in range(0, len(stored), RUN_ID_BYTES)]
    runs = list(dict.fromkeys(run for run in (*named, *before) if len(run) == RUN_ID_BYTES))
    if not runs:
        raise ManifestError("which run? Give an invite: `farandole relay farandole1...`; any member can make one")
    if len(runs) > MAX_RUNS:
        raise ManifestError(f"a relay is for at most {MAX_RUNS} runs; for others give it another --home")
    await store.put_fact(RUNS_FACT, b"".join(runs))
    return runs


class MemberSeeker:
    """Keeps connections with a few members of each run, and remembers them.

    ``named``: public key -> addresses, of the peers that the invites name.
    """

    def __init__(self, daemon: Daemon, mesh: Mesh, runs: Sequence[bytes], named: dict[bytes, list[str]]) -> None:
        self._daemon = daemon
        self._mesh = mesh
        self._runs = runs
        self._named = named
        self._members: dict[bytes, list[bytes]] = {run: [] for run in runs}

    async def run(self) -> None:
        """Look for members until cancelled."""
        journal, host, traffic = self._daemon.journal, self._mesh.host, self._mesh.traffic
        waits = pauses(FIRST_REDIAL_PAUSE, MAX_LOOK_INTERVAL, random.Random())
        here = address_for_others(host, self._daemon.settings.announce)
        waits_for = "" if self._daemon.book.peers() else f"a member: on its machine, `farandole dial {here}`"
        journal.announce("relaying", f"for {plural(len(self._runs), 'run')}", waits_for)
        while True:
            if traffic.is_spent:
                journal.update(isolation=self._daemon.rest.words)
                await traffic.wait_online()
            named = {**self._daemon.book.peers(), **self._named}
            if not host.connected:
                await dial(host, named, is_one_enough=True)
            if host.connected:
                for run, known in self._members.items():  # in the DHT, if too few of the known ones are still connected
                    there = [peer for peer in known if peer in host.connected]
                    if len(there) < NUM_MEMBERS:
                        there = await find_members(host, run)
                        for peer in set(there) - set(known):
                            journal.say(f"found {short_name(peer)}, a member of run {run.hex()[:16]}")
                    self._members[run] = there
                    host.relays.members = frozenset(chain(*self._members.values()))
                journal.update(isolation="", waits_for="")
            elif named and not journal.state.waits_for:
                journal.update(isolation=f"{NO_ANSWER}: {how_many(named)} tried; still trying")
            await self.remember()
            await trio.sleep(next(waits))

    async def remember(self, *, is_last: bool = False) -> None:
        """Store the addresses of the connected members."""
        for peer in self._mesh.host.connected.intersection(chain(*self._members.values())):
            self._daemon.book.note_reached(peer, self._mesh.host.dialler.known.to_keep(peer))
        try:
            await self._daemon.book.save(is_last=is_last)
        except StoreError as error:
            self._daemon.journal.warn(f"{error}; trying again", f"{DISK}store")
        else:
            self._daemon.journal.over(f"{DISK}store")


async def _tell_reachability(mesh: Mesh, journal: Journal, runs: Sequence[bytes]) -> None:
    """Print this node's reachability, and provide it as a relay of every run while peers can dial it."""
    host, reachability = mesh.host, mesh.connectivity.reachability
    told = ReachabilityKind.UNKNOWN
    while True:
        while reachability.kind is told:
            await reachability.changed()
        told = reachability.kind
        if told is ReachabilityKind.PUBLIC:
            journal.say("peers can dial this node: it relays; its addresses, for invites:")
            journal.over("reachability")
            for address in host.addresses:
                journal.say(f"  {address}")
            for run in runs[1:]:  # the first is announced with the relay itself
                await host.dht.provide(relay_key(run))
        else:
            journal.warn(f"this node is {told}: peers cannot dial it, so it relays for nobody", "reachability")
            for run in runs[1:]:
                host.dht.withdraw(relay_key(run))
