"""One node, from its settings to its end: what `farandole join` runs.

The nesting below is the order of teardown: the trainer ends before the mesh, the mesh before the store, the store
before the lock. This module makes no decisions; it wires the parts together:

    store -> host -> connectivity (reachability, relay) -> messenger -> control socket, page -> member

This module covers the parts up to the run's manifest; `farandole.node.member` covers the run state and after.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import trio

from farandole.protocol.mesh.relay import Limits
from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.invite import decode_invite, split_address
from farandole.protocol.run.manifest import decode_manifest
from farandole.protocol.state.believing import Partners
from farandole.protocol.wire.errors import FarandoleError, ManifestError
from farandole.protocol.wire.identity import peer_id_of, short_name

from .base import logs
from .base.bandwidth import Shaping
from .base.causes import Finding, Level, lessen
from .base.config.file import read_limits
from .base.control import ControlError, Handler, call, serve_control
from .base.errors import Exit, PeerUnreachableError
from .base.identity import IdentityError, IdentityInUseError, load_or_create_key, locked
from .base.nurseries import open_service_nursery, own_error
from .base.quiet_hours import QuietHoursError
from .base.settings import NodeSettings
from .base.system.processes import STOP_SIGNALS
from .control_methods import admission_handlers, change_quiet_hours, kept, set_caps, taken, warn_of_overrides
from .inspect import machine
from .join.address_book import AddressBook, keep_ports, load_ports
from .join.bootstrap import Target, connect_to_run, find_target, obtain_manifest
from .join.invites import own_invite, warnings_about
from .loop.idle_service import IdleService
from .loop.rest_service import Rest, RestService
from .loop.traffic_service import TrafficService
from .member.assembly import close_gate, open_member
from .member.parts import Daemon, Mesh
from .member.run_member import PARTNERS_FACT, RunMember
from .mesh.host import open_host
from .mesh.mdns import open_mdns
from .mesh.reach.connectivity import open_connectivity
from .programs.service import ProgramService, open_programs
from .state.credentials import ADMISSION_FACT
from .state.messenger import open_messenger
from .state.store import MANIFEST_FACT, open_store
from .status.journal import Journal
from .store.disk_space import DiskError
from .store.run_file import require_trainable_model
from .trainer.script import ScriptDoor, has_started, open_script_door
from .trainer.trainer import TrainerError
from .ui.dashboard.app import PageAddress, open_dashboard
from .ui.headline import keep_reminding
from .ui.reporting import MAX_MEMBERS_SHOWN, Reporter

NETWORK_KEY_FACT: Final = "network key"
# How often a run's first node looks whether others can join: it takes seconds, until its trainer has started.
INVITE_POLL_SECONDS: Final = 0.5
# A loop that is started again within this time continues with the node that it, or an earlier one, has started.
LINGER_SECONDS: Final = 600.0
# How often such a node looks whether a loop is there.
LOOK_INTERVAL: Final = 5.0

RunDaemon = Callable[[Daemon], Awaitable[None]]
"""Runs until it is asked to leave, and then no longer than a clean leave takes."""


async def run_daemon(settings: NodeSettings, run: RunDaemon) -> int:
    """Run a daemon with this home's key and store until it is asked to leave; return the exit code (`Exit`)."""
    journal = Journal(logs.say, keep_round=logs.keep_round)
    try:
        with locked(settings.lock):
            key = load_or_create_key(settings.key)
            async with open_store(settings.store) as store:
                partners = Partners()
                partners.restore(await store.get_fact(PARTNERS_FACT) or b"")
                book = AddressBook(store, partners.__contains__)
                await book.load()
                daemon = Daemon(settings, key, store, book, partners, journal, trio.Event(), Rest())
                return await _run_until_told(run, daemon)
    except BaseExceptionGroup as group:  # nurseries wrap even a single error
        found = own_error(group)
        if found is None:
            raise
        error = found
    except FarandoleError as single:
        error = single
    logs.complain(f"error: {error}")
    match error:
        case IdentityInUseError():
            return Exit.HOME_IN_USE
        case ManifestError() | IdentityError() | QuietHoursError() | DiskError():
            return Exit.BAD_INPUT
        case TrainerError():
            return Exit.TRAINER_FAILED
        case _:
            return Exit.CANNOT_JOIN


async def _run_until_told(run: RunDaemon, daemon: Daemon) -> Exit:
    """Run until a first SIGINT, SIGTERM or ``farandole leave`` asks for a clean stop; a second ends it at once."""
    code = Exit.OK
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        async with open_service_nursery() as nursery:

            async def watch() -> None:
                nonlocal code
                async for _ in signals:
                    if daemon.is_leaving.is_set():
                        code = Exit.INTERRUPTED
                        nursery.cancel_scope.cancel()
                    daemon.is_leaving.set()

            nursery.start_soon(watch)
            await run(daemon)
    return code


# The mesh


@asynccontextmanager
async def open_mesh(daemon: Daemon, target: Target, limits: Limits | None) -> AsyncIterator[Mesh]:
    """Listen, and find out who can dial this node; ``limits``: None to relay for no peer."""
    settings = daemon.settings
    shaping = Shaping.of_mbit(settings.upload_mbit, settings.download_mbit)
    limit = round(settings.monthly_traffic * 1e9)
    traffic = TrafficService(limit, daemon.rest, daemon.store, shaping, datetime.now, daemon.journal)
    await traffic.begin()
    shaping = replace(shaping, may_spend=traffic.may_spend)
    ports = await load_ports(daemon.store, settings.listening)
    async with (
        open_host(
            daemon.key,
            settings.listening,
            shaping=shaping,
            network_key=target.network_key,
            first_ports=ports,
            announce=settings.announce,
        ) as host,
        open_connectivity(
            host, target.run_id, shaping, target.peers, limits, port_lease=settings.port_lease
        ) as connectivity,
        open_mdns(host, target.run_id, is_on=settings.mdns),
    ):
        await keep_ports(daemon.store, ports, host.acceptor.ports, daemon.journal)
        yield Mesh(host, connectivity, shaping, traffic)


# Requests of people


@asynccontextmanager
async def open_control(
    daemon: Daemon,
    mesh: Mesh,
    run_id: bytes,
    socket_handlers: Mapping[str, Handler] | None = None,
    page_handlers: Mapping[str, Handler] | None = None,
) -> AsyncIterator[Reporter]:
    """Serve the control socket and, where the settings want it, the dashboard, and count the traffic.

    ``socket_handlers`` answer over the socket, ``page_handlers`` from the page as well. Both add to every daemon's own.
    Yields the reporter, which learns more once the node knows its run.
    """
    settings, journal, host = daemon.settings, daemon.journal, mesh.host
    reporter = Reporter(
        host,
        journal,
        run_id,
        "",
        time.time(),
        mesh.shaping,
        mesh.connectivity,
        traffic=mesh.traffic,
        rest=daemon.rest,
    )

    async def status(params: dict[str, Any]) -> object:
        max_members = params.get("max_members", MAX_MEMBERS_SHOWN)
        if not isinstance(max_members, int):
            raise ControlError("bad_request", "max_members is a number")
        return reporter.status(max(0, max_members))

    async def leave(params: dict[str, Any]) -> object:
        daemon.is_leaving.set()
        return "leaving"

    async def dial(params: dict[str, Any]) -> object:
        """Connect to the peer at an address that a person gave, and remember it."""
        (address,) = taken(params, address=str)
        _, peer = split_address(address)
        if peer == host.author:
            raise ControlError("bad_request", "this is the node's own address")
        try:
            await host.connect(peer, [address])
        except PeerUnreachableError as error:
            raise ControlError("unreachable", f"{short_name(peer)} does not answer at {address}: {error}") from error
        daemon.book.note_reached(peer, host.dialler.known.to_keep(peer))
        journal.say(f"connected to {short_name(peer)}, as asked for")
        return f"connected to {peer_id_of(peer)}"

    async def limit(params: dict[str, Any]) -> object:
        changed = {name: cap for name, cap in params.items() if name in ("upload_mbit", "download_mbit")}
        return await kept(settings, journal, set_caps(mesh.shaping, params), changed)

    page: PageAddress | None = None

    async def dashboard(params: dict[str, Any]) -> object:
        if page is None:
            raise ControlError("no_page", "this node serves no page: it has --no-dashboard, or is just starting")
        return page

    async def keep_offline() -> None:
        """Take the node offline whenever a month's traffic is spent, and warn about it."""
        while True:
            await mesh.traffic.wait_spent()
            journal.warn(daemon.rest.words, "traffic")
            host.connections.is_offline = True
            await host.connections.close()
            await mesh.traffic.wait_spent(False)
            journal.over("traffic")
            host.connections.is_offline = False

    from_page = {"leave": leave, "limit": limit, **(page_handlers or {})}
    of_socket = {"status": status, "dial": dial, "dashboard": dashboard, **(socket_handlers or {})}
    async with open_service_nursery() as nursery, AsyncExitStack() as stack:
        # Before anything is printed: a script that reads it may ask at once.
        await nursery.start(serve_control, settings.control, {**from_page, **of_socket})
        warn_of_overrides(settings, journal, read_limits(settings.home))
        journal.say(f"this node is {host.peer_id}")
        for address in host.addresses:
            is_announced = address.partition("/p2p/")[0] in settings.announce
            journal.say(f"{'announcing' if is_announced else 'listening on'} {address}")
        nursery.start_soon(mesh.traffic.run)
        nursery.start_soon(keep_offline)
        nursery.start_soon(keep_reminding, lambda: reporter.status(0), journal.remind)
        if settings.dashboard:
            page = await stack.enter_async_context(
                open_dashboard(settings.dashboard_port, reporter.status, from_page, time.time)
            )
            journal.say(f"this node's page, for `farandole dashboard --open`, is at {page.url}")
        yield reporter


# The node


async def be_node(daemon: Daemon) -> None:
    """Join a run, train until asked to leave, and leave."""
    settings, journal, store, rest = daemon.settings, daemon.journal, daemon.store, daemon.rest
    stored = await store.get_fact(MANIFEST_FACT)
    stored_network_key = await store.get_fact(NETWORK_KEY_FACT) or b""
    target = find_target(settings, daemon.key, stored, daemon.book.peers(), stored_network_key)
    if target.network_key != stored_network_key:
        await store.put_fact(NETWORK_KEY_FACT, target.network_key)
    if settings.trainer == "own":  # what any trainer needs, before a peer is dialled; a loop of the owner's brings it
        torch = machine.check_torch_is_there()
        if not torch and settings.device not in ("auto", "cpu"):
            torch = [await machine.check_torch(settings.device)]
        data = await trio.to_thread.run_sync(machine.check_data, settings.data, settings.stream)
        _heed([*torch, *data], journal)
    if target.manifest is not None:
        _heed(await trio.to_thread.run_sync(_check_fit, settings, target.manifest, False), journal)
    member: RunMember | None = None
    socket_handlers = admission_handlers(lambda: member)
    limits = Limits() if settings.relay else None
    async with (
        open_mesh(daemon, target, limits) as mesh,
        open_messenger(mesh.host) as messenger,
        open_service_nursery() as nursery,
        AsyncExitStack() as stack,
    ):
        if settings.trainer == "external":
            door = await stack.enter_async_context(open_script_door(settings.door))
            daemon = replace(daemon, door=door)
            nursery.start_soon(leave_without_loop, daemon, door)
        idle = None
        if settings.only_when_idle:
            idle = IdleService(journal, daemon.door, looks_at_gpu=settings.device != "cpu")
        rest_service = RestService(rest, store, settings.quiet_hours, datetime.now, journal, idle)
        page_handlers = _owner_handlers(daemon, rest_service)
        await rest_service.begin()
        # How this node was admitted; if the run is known to be for its members alone, no other peer gets in.
        mesh.host.gate.stored, mesh.host.gate.store = await store.load_seats(), store.save_seats
        mesh.host.gate.show(target.run_id, (await store.get_fact(ADMISSION_FACT)) or b"", target.secret)
        if target.manifest is not None:
            close_gate(mesh.host, *decode_manifest(target.manifest))
        async with open_control(daemon, mesh, target.run_id, socket_handlers, page_handlers) as reporter:
            await rest_service.look()
            nursery.start_soon(rest_service.run)
            raw = await _join(daemon, mesh, target)
            if raw is None:
                return
            if target.manifest is None:
                _heed(await trio.to_thread.run_sync(_check_fit, settings, raw, True), journal)
            if raw != stored:
                await store.put_fact(MANIFEST_FACT, raw)
            async with (
                open_member(daemon, mesh, messenger, raw) as member,
                open_programs(
                    settings.programs,
                    ProgramService(
                        mesh.host, target.run_id, mesh.shaping, member.gossip.publish, member.membership.notes
                    ),
                ),
            ):
                member.show_in(reporter)
                await member.take_part(target)


def _owner_handlers(daemon: Daemon, rest_service: RestService) -> dict[str, Handler]:
    """Return the handlers of what the owner of a node in a run asks of it, on the page as well."""
    rest = daemon.rest

    async def pause(params: dict[str, Any]) -> object:
        await rest_service.pause()
        return "pausing: the trainer saves and ends; the node stays in the mesh"

    async def resume(params: dict[str, Any]) -> object:
        await rest_service.resume()
        return f"still resting: {rest.words}" if rest.is_on else "training again"

    async def quiet(params: dict[str, Any]) -> object:
        words = change_quiet_hours(rest_service, params)
        return await kept(daemon.settings, daemon.journal, words, {"quiet_hours": rest.quiet_hours})

    async def invitation(params: dict[str, Any]) -> object:
        """Return an invite, and below it a line for each thing that may keep newcomers from using it."""
        return await trio.to_thread.run_sync(_invite_and_warnings, daemon.settings.home)

    return {"invitation": invitation, "pause": pause, "resume": resume, "quiet": quiet}


def _invite_and_warnings(home: Path) -> str:
    text = own_invite(home)
    doubted = call(home, "status", max_members=0)["doubted_addresses"]
    return "\n".join([text, *warnings_about(decode_invite(text).addresses, doubted)])


async def be_first_node(daemon: Daemon) -> None:
    """As `be_node`, and print an invite once it trains: by then the router has been asked for a port, too."""

    async def invite() -> None:
        while True:
            await trio.sleep(INVITE_POLL_SECONDS)
            if daemon.journal.state.phase in ("training", "pairing", "exchanging", "outer step"):
                break
        try:
            text = await trio.to_thread.run_sync(own_invite, daemon.settings.home)
        except FarandoleError as error:
            daemon.journal.warn(f"there is no invite yet: {error}; `farandole run invite` makes one")
            return
        for warning in warnings_about(decode_invite(text).addresses):
            daemon.journal.warn(warning)
        logs.show(f"others join with: farandole join {text}")

    async with open_service_nursery() as nursery:
        nursery.start_soon(invite)
        await be_node(daemon)


def _check_fit(settings: NodeSettings, raw_manifest: bytes, is_new: bool) -> list[Finding]:
    """Compare this machine and its settings with the run, before any weights are downloaded. Reads the disk.

    A node that ``is_new`` in its run needs room for them; others are warned, and train on without it. Raises
    `JoinError` if it cannot train the run's model, or its owner has not allowed that model's code.
    """
    manifest = decode_manifest(raw_manifest)[0]
    require_trainable_model(manifest, settings.allow_model, by_loop=settings.trainer == "external")
    disk = machine.check_disk(settings.home, needs_of(manifest))
    findings = [disk if is_new else lessen(disk), *machine.check_run(manifest, settings)]
    if settings.trainer == "own":  # first, since nothing that its owner can type makes up for it
        findings.insert(0, machine.check_memory(manifest, settings, is_running=False))
    return findings


async def leave_without_loop(daemon: Daemon, door: ScriptDoor) -> None:
    """End a node that a loop has started once none is there for `LINGER_SECONDS`, even if its folder was deleted."""
    waited, is_of_loop = 0.0, False
    while waited < LINGER_SECONDS:
        await trio.sleep(LOOK_INTERVAL)
        is_of_loop |= has_started(daemon.settings.started_by_loop, os.getpid())
        waited = waited + LOOK_INTERVAL if is_of_loop and not door.has_loop else 0.0
    daemon.journal.say("the loop that has started this node is gone, and no other has come: leaving")
    daemon.is_leaving.set()


def _heed(findings: Iterable[Finding], journal: Journal) -> None:
    """Pass warnings on. Raises `TrainerError`, with the remedy, if the trainer cannot run here."""
    for finding in findings:
        if finding.level is Level.FAILED:
            raise TrainerError(finding.words)
        if finding.level is Level.WARNING:
            journal.warn(finding.words)


async def _join(daemon: Daemon, mesh: Mesh, target: Target) -> bytes | None:
    """Connect to the run and return its signed manifest; None if the node is asked to leave first."""
    raw: bytes | None = None

    async with open_service_nursery() as nursery:

        async def give_up_when_leaving() -> None:
            await daemon.is_leaving.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(give_up_when_leaving)
        if mesh.traffic.is_spent:
            daemon.journal.enter("paused", daemon.rest.words)
            await mesh.traffic.wait_spent(False)
        await connect_to_run(mesh.host, target, daemon.journal)
        raw = await obtain_manifest(mesh.host, target, daemon.journal)
    return raw
