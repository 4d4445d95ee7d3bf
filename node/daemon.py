"""One node, from its settings to its end: what `farandole join` runs.

The nesting below is the order of teardown: the trainer ends before the mesh, the mesh before the store, the store
before the lock. Nothing here decides; it wires the parts together:

    store -> host -> messenger -> gossip (run state) -> membership -> rounds (trainer, pairing, exchanges)

Up to the messenger here; from the run state on in `farandole.node.member`.
"""

from __future__ import annotations

import abc
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.errors import FarandoleError, ManifestError
from farandole.protocol.identity import public_bytes
from farandole.protocol.manifest import Manifest
from farandole.protocol.relay import Limits

from .base.bandwidth import Shaping
from .base.control import ControlError, Handler, serve_control
from .base.exits import Exit
from .base.identity import IdentityError, IdentityInUseError, load_or_create_key, locked
from .base.logs import is_for_machines
from .base.nurseries import own_error
from .base.quiet_hours import QuietHoursError, parse_quiet_hours
from .base.settings import NodeSettings
from .base.system.signals import STOP_SIGNALS
from .inspect.listing import offers_of
from .join.address_book import AddressBook
from .join.bootstrap import Target, connect_to_run, find_target, obtain_manifest
from .loop.pause.idle import IdleWatch
from .loop.pause.idle_service import IdleKeeper
from .loop.pause.pause import Rest
from .loop.pause.pause_service import RestKeeper
from .loop.traffic.traffic_service import TrafficKeeper
from .member import NodeParts, RunMember
from .mesh.host import Host, open_host
from .mesh.mdns import open_mdns
from .mesh.reach.connectivity import open_connectivity
from .state.messenger import open_messenger
from .state.store import Store, open_store
from .status.journal import Journal
from .status.status import NodeStatus
from .store.disk_space import DiskError
from .trainer.trainer import TrainerError
from .ui.chronicle import keep_chronicle
from .ui.console import Console
from .ui.dashboard.server import open_dashboard
from .ui.reporting import MAX_MEMBERS_SHOWN, Reporter

MANIFEST_FACT: Final = "manifest"


class Daemon(abc.ABC):
    """What runs until it is told to leave, and answers meanwhile what `serve_control` asks."""

    def __init__(self, settings: NodeSettings, journal: Journal) -> None:
        self.is_leaving = trio.Event()
        """Set when it is told."""
        self._settings = settings
        self._journal = journal
        self._rest = Rest()
        self._reporter: Reporter

    @abc.abstractmethod
    async def run(self) -> None:
        """Until then, and no longer than leaving in good order takes."""

    def _handlers(self) -> Mapping[str, Handler]:
        """For `serve_control`, once there is something to report."""
        return {"status": self._status, "peers": self._peers, **self._deeds()}

    def _deeds(self) -> Mapping[str, Handler]:
        """What the page may ask for, and the command line."""
        return {"leave": self._leave}

    @asynccontextmanager
    async def _open_page(self) -> AsyncIterator[None]:
        """Serve the dashboard meanwhile, and the figures for Prometheus, if they are wanted."""
        settings = self._settings
        if not settings.dashboard:
            yield
            return
        async with open_dashboard(
            settings.dashboard_place, settings.dashboard_port, self._status_now, self._deeds(), time.time
        ) as place:
            self._journal.say(f"a page about this node is at {place.url} (`farandole dashboard` knows its token)")
            yield

    async def _keep_offline(self, host: Host, traffic: TrafficKeeper) -> None:
        """While a month's traffic is spent."""
        while True:
            await traffic.wait_offline()
            self._journal.warn(self._rest.words)
            await host.go_offline()
            await traffic.wait_online()
            host.go_online()

    def _status_now(self) -> NodeStatus:
        return self._reporter.status()

    async def _status(self, params: dict[str, Any]) -> object:
        max_members = params.get("max_members", MAX_MEMBERS_SHOWN)
        if not isinstance(max_members, int):
            raise ControlError("bad_request", "max_members is a number")
        return self._reporter.status(max(0, max_members))

    async def _peers(self, params: dict[str, Any]) -> object:
        return self._reporter.members()

    async def _leave(self, params: dict[str, Any]) -> object:
        self.is_leaving.set()
        return "leaving"


MakeDaemon = Callable[[Ed25519PrivateKey, Store, Journal], Daemon]


async def run_node(settings: NodeSettings) -> int:
    """Run a node until it is told to leave; the exit code (`Exit`)."""
    return await run_daemon(settings, partial(Node, settings))


async def run_daemon(settings: NodeSettings, make: MakeDaemon) -> int:
    """Run what ``make`` makes, with this home's key and store, until it is told to leave; the exit code (`Exit`)."""
    console = Console(as_json=is_for_machines(settings.log_format, sys.stdout))
    try:
        with locked(settings.lock):
            key = load_or_create_key(settings.key)
            async with open_store(settings.store) as store:
                return await _run_until_told(make(key, store, Journal(say=console.say, tell_round=console.tell_round)))
    except BaseExceptionGroup as group:
        found = own_error(group)
        if found is None:
            raise
        error = found
    except FarandoleError as single:
        error = single
    console.complain(f"error: {error}")
    return _exit_code(error)


def _exit_code(error: BaseException) -> Exit:
    match error:
        case IdentityInUseError():
            return Exit.HOME_IN_USE
        case ManifestError() | IdentityError() | QuietHoursError() | DiskError():
            return Exit.BAD_INPUT
        case TrainerError():
            return Exit.TRAINER_FAILED
        case _:
            return Exit.CANNOT_JOIN


async def _run_until_told(daemon: Daemon) -> Exit:
    """A first SIGINT or SIGTERM, or ``farandole leave``, means leave in good order; a second one means now."""
    code = Exit.OK
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal code
                async for _ in signals:
                    if daemon.is_leaving.is_set():
                        code = Exit.INTERRUPTED
                        nursery.cancel_scope.cancel()
                    daemon.is_leaving.set()

            nursery.start_soon(watch)
            await daemon.run()
            nursery.cancel_scope.cancel()
    return code


class Node(Daemon):
    """A node's parts, and the order in which they begin and end."""

    def __init__(self, settings: NodeSettings, key: Ed25519PrivateKey, store: Store, journal: Journal) -> None:
        super().__init__(settings, journal)
        self._key = key
        self._author = public_bytes(key)
        self._store = store
        self._started_at = time.time()
        hours = [parse_quiet_hours(text) for text in settings.quiet_hours]
        self._rest_keeper = RestKeeper(self._rest, store, hours, datetime.now, journal.warn)
        self._idle_keeper: IdleKeeper | None = None
        if settings.only_when_idle:
            watch = IdleWatch(settings.idle_cpu_percent / 100, may_use_battery=settings.on_battery)
            self._idle_keeper = IdleKeeper(
                self._rest,
                watch,
                lambda: journal.state.trainer_pid,
                journal.warn,
                looks_at_gpu=settings.device != "cpu",
            )
        self._member: RunMember | None = None

    async def run(self) -> None:
        """Join, train, stay until told to leave, and leave."""
        settings, journal, store = self._settings, self._journal, self._store
        stored = await store.get_fact(MANIFEST_FACT)
        book = AddressBook(store)
        await book.load()
        target = find_target(settings, self._author, stored, book.peers())
        shaping = Shaping.of_mbit(settings.upload_mbit, settings.download_mbit)
        limit = round(settings.monthly_traffic * 1e9)
        traffic = TrafficKeeper(limit, self._rest, store, shaping, datetime.now, journal.warn)
        await traffic.begin()
        shaping = replace(shaping, may_spend=traffic.may_spend)
        async with (
            open_host(self._key, settings.listen, shaping=shaping) as host,
            open_messenger(host) as messenger,
            open_connectivity(
                host,
                self._key,
                target.run_id,
                shaping,
                target.peers,
                Limits() if settings.relay else None,
                port_lease=settings.port_lease,
            ) as connectivity,
            open_mdns(host, [target.run_id], is_on=settings.mdns),
        ):
            self._reporter = Reporter(
                host, journal, target.run_id, "", self._started_at, shaping, connectivity, traffic=traffic
            )
            await self._rest_keeper.begin()
            async with trio.open_nursery() as nursery:
                # Before anything is told: a script that reads it may ask at once.
                await nursery.start(serve_control, settings.control, self._handlers())
                journal.say(f"this node is {host.peer_id}")
                for address in host.addresses:
                    journal.say(f"listening on {address}")
                if self._idle_keeper is not None:
                    await self._idle_keeper.look()
                    nursery.start_soon(self._idle_keeper.run)
                nursery.start_soon(self._rest_keeper.run)
                nursery.start_soon(traffic.run)
                nursery.start_soon(self._keep_offline, host, traffic)
                nursery.start_soon(keep_chronicle, lambda: self._reporter.connections(), journal.note)
                async with self._open_page():
                    joined = await self._join(host, target, traffic)
                    if joined is not None:
                        manifest, raw = joined
                        if raw != stored:
                            await store.put_fact(MANIFEST_FACT, raw)
                        parts = NodeParts(self._key, store, book, journal, host, messenger, shaping, self._rest)
                        member = self._member = RunMember(settings, parts, raw)
                        traffic.needs_traffic = manifest.model.num_stages > 1
                        connectivity.members = member.peers
                        self._reporter = member.reporter(self._started_at, connectivity, traffic)
                        await member.run(target, self.is_leaving)
                nursery.cancel_scope.cancel()

    async def _join(self, host: Host, target: Target, traffic: TrafficKeeper) -> tuple[Manifest, bytes] | None:
        """The run's manifest, with a connection to the run; None if told to leave meanwhile."""
        joined: tuple[Manifest, bytes] | None = None

        async with trio.open_nursery() as nursery:

            async def give_up_when_leaving() -> None:
                await self.is_leaving.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(give_up_when_leaving)
            if traffic.is_spent:
                self._journal.enter("paused", self._rest.words)
                await traffic.wait_online()
            await connect_to_run(host, target, self._journal)
            joined = await obtain_manifest(host, target, self._journal)
            nursery.cancel_scope.cancel()
        return joined

    def _handlers(self) -> Mapping[str, Handler]:
        return {**super()._handlers(), "checkpoints": self._checkpoints}

    def _deeds(self) -> Mapping[str, Handler]:
        return {**super()._deeds(), "pause": self._pause, "resume": self._resume}

    async def _checkpoints(self, params: dict[str, Any]) -> object:
        return [] if self._member is None else offers_of(self._member.checkpoint_notices())

    async def _pause(self, params: dict[str, Any]) -> object:
        await self._rest_keeper.pause()
        return "pausing: the trainer saves and ends; the node stays in the mesh"

    async def _resume(self, params: dict[str, Any]) -> object:
        await self._rest_keeper.resume()
        return f"still resting: {self._rest.words}" if self._rest.is_on else "training again"
