"""A node without a trainer: what `farandole relay` runs.

It serves the DHT for one run or several, introduces newcomers to members, and passes on to each other peers behind NAT
as soon as peers have found that they can dial it. It is a member of none: it needs neither manifest nor run state, so
it costs a small machine little and cannot mislead anybody about a run. torch is never imported.

    store -> host -> connectivity (reachability, relay) -> finding members, the control socket
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.errors import ManifestError
from farandole.protocol.identity import public_bytes, short_name
from farandole.protocol.invite import decode_invite, split_address
from farandole.protocol.manifest import RUN_ID_BYTES
from farandole.protocol.reachability import ReachabilityKind
from farandole.protocol.records import relay_key
from farandole.protocol.relay import Limits

from .base.backoff import pauses
from .base.bandwidth import Shaping
from .base.control import serve_control
from .base.settings import NodeSettings
from .daemon import Daemon, run_daemon
from .join.address_book import AddressBook
from .join.bootstrap import FIRST_REDIAL_PAUSE, dial, find_members
from .loop.traffic.traffic_service import TrafficKeeper
from .mesh.host import Host, open_host
from .mesh.mdns import open_mdns
from .mesh.reach.connectivity import Connectivity, open_connectivity
from .state.store import Store, StoreError
from .status.journal import Journal
from .ui.chronicle import keep_chronicle
from .ui.reporting import Reporter

# Each costs two announcements in the DHT an hour, and a lookup a minute.
MAX_RUNS: Final = 16
RUNS_FACT: Final = "relayed runs"
# Between two looks at who is there, in the long run.
MAX_LOOK_INTERVAL: Final = 30.0
# Of each run; whoever comes to us for another reason is connected beside these.
NUM_MEMBERS: Final = 4


async def run_relay(settings: NodeSettings, invites: Sequence[str]) -> int:
    """Relay for the invites' runs, and those of earlier lives, until told to leave; the exit code (`Exit`)."""
    return await run_daemon(settings, partial(RelayNode, settings, invites))


class RelayNode(Daemon):
    """A relay's parts, and the order in which they begin and end."""

    def __init__(
        self, settings: NodeSettings, invites: Sequence[str], key: Ed25519PrivateKey, store: Store, journal: Journal
    ) -> None:
        super().__init__(settings, journal)
        self._invites = [decode_invite(invite) for invite in invites]
        self._key = key
        self._store = store
        self._book = AddressBook(store)
        self._started_at = time.time()
        self._named: dict[bytes, list[str]] = {}
        self._members: dict[bytes, list[bytes]] = {}

    async def run(self) -> None:
        """Relay until told to leave. Raises `ManifestError` if no run is known, or too many."""
        settings, journal = self._settings, self._journal
        runs = await self._load_runs()
        await self._book.load()
        for address in [address for invite in self._invites for address in invite.addresses] + settings.bootstrap:
            self._named.setdefault(split_address(address)[1], []).append(address)
        self._named.pop(public_bytes(self._key), None)
        shaping = Shaping.of_mbit(settings.upload_mbit, settings.download_mbit)
        limit = round(settings.monthly_traffic * 1e9)
        traffic = TrafficKeeper(limit, self._rest, self._store, shaping, datetime.now, journal.warn)
        await traffic.begin()
        shaping = replace(shaping, may_spend=traffic.may_spend)
        known = self._known()
        async with (
            open_host(self._key, settings.listen, shaping=shaping) as host,
            open_connectivity(
                host,
                self._key,
                runs[0],
                shaping,
                known,
                Limits(),
                port_lease=settings.port_lease,
            ) as connectivity,
            open_mdns(host, runs, is_on=settings.mdns),
        ):
            self._reporter = Reporter(
                host, journal, runs[0], "", self._started_at, shaping, connectivity, traffic=traffic
            )
            connectivity.members = lambda: {peer for members in self._members.values() for peer in members}
            async with trio.open_nursery() as nursery:
                # Before anything is told: a script that reads it may ask at once.
                await nursery.start(serve_control, settings.control, self._handlers())
                journal.say(f"this node is {host.peer_id}")
                for address in host.addresses:
                    journal.say(f"listening on {address}")
                nursery.start_soon(keep_chronicle, self._reporter.connections, journal.note)
                nursery.start_soon(traffic.run)
                nursery.start_soon(self._keep_offline, host, traffic)
                nursery.start_soon(self._seek_members, host, runs, traffic)
                nursery.start_soon(self._tell_reachability, host, connectivity, runs)
                async with self._open_page():
                    await self.is_leaving.wait()
                await self._remember(host, is_last=True)
                nursery.cancel_scope.cancel()
            journal.say("left")

    async def _load_runs(self) -> list[bytes]:
        stored = await self._store.get_fact(RUNS_FACT) or b""
        before = [stored[place : place + RUN_ID_BYTES] for place in range(0, len(stored), RUN_ID_BYTES)]
        named = [invite.run_id for invite in self._invites]
        runs = list(dict.fromkeys(run for run in (*named, *before) if len(run) == RUN_ID_BYTES))
        if not runs:
            raise ManifestError("which run? Give an invite: `farandole relay farandole1...`; any member can make one")
        if len(runs) > MAX_RUNS:
            raise ManifestError(f"a relay is for at most {MAX_RUNS} runs; for others give it another --home")
        await self._store.put_fact(RUNS_FACT, b"".join(runs))
        return runs

    def _known(self) -> dict[bytes, list[str]]:
        return {**self._book.peers(), **self._named}

    async def _seek_members(self, host: Host, runs: Sequence[bytes], traffic: TrafficKeeper) -> None:
        """Keep connections with a few members of each run, and remember them, until cancelled."""
        journal = self._journal
        waits = pauses(FIRST_REDIAL_PAUSE, MAX_LOOK_INTERVAL, random.Random())
        journal.announce("relaying", f"for {'1 run' if len(runs) == 1 else f'{len(runs)} runs'}")
        while True:
            if traffic.is_spent:
                journal.update(isolation=self._rest.words)
                await traffic.wait_online()
            if not host.connected:
                await dial(host, self._known(), is_one_enough=True)
            if host.connected:
                for run in runs:
                    await self._look_for(host, run)
                journal.update(isolation="")
            elif self._known():
                journal.update(isolation=f"none of {len(self._known())} known peers answers; trying on")
            await self._remember(host)
            await trio.sleep(next(waits))

    async def _look_for(self, host: Host, run: bytes) -> None:
        """Members that say so in the DHT, if too few of those found before are still there."""
        there = [peer for peer in self._members.get(run, ()) if host.is_connected(peer)]
        if len(there) < NUM_MEMBERS:
            there = await find_members(host, run)
            for peer in set(there) - set(self._members.get(run, ())):
                self._journal.say(f"found {short_name(peer)}, a member of run {run.hex()[:16]}")
        self._members[run] = there

    async def _remember(self, host: Host, *, is_last: bool = False) -> None:
        for peer in {peer for members in self._members.values() for peer in members} & host.connected:
            self._book.note_reached(peer, host.addresses_of(peer))
        try:
            await self._book.save(is_last=is_last)
        except StoreError as error:
            self._journal.warn(f"{error}; trying again")

    async def _tell_reachability(self, host: Host, connectivity: Connectivity, runs: Sequence[bytes]) -> None:
        """Say what peers found out, and be found as a relay of every run while they can dial this node."""
        reachability = connectivity.reachability
        told = ReachabilityKind.UNKNOWN
        while True:
            while reachability.kind is told:
                await reachability.changed()
            told = reachability.kind
            if told is ReachabilityKind.PUBLIC:
                self._journal.say("peers can dial this node: it relays; its addresses, for invites:")
                for address in host.addresses:
                    self._journal.say(f"  {address}")
                for run in runs[1:]:  # the first is announced with the relay itself
                    await host.provide(relay_key(run))
            else:
                self._journal.warn(f"this node is {told}: peers cannot dial it, so it relays for nobody")
                for run in runs[1:]:
                    host.withdraw(relay_key(run))
