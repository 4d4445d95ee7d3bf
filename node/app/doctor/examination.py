"""All checks, in the order of their dependencies; independent ones run at once.

The network is checked with a key of its own, so that neither a broken key nor a node that runs with it is in the way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.invite import PREFIX, VERSION, InviteError, decode_invite, is_invite, split_address
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.identity import peer_id_of, with_name

from ...base.causes import CHECKS, Diagnosis, Finding, Level, found
from ...base.control import call
from ...base.errors import ListenError
from ...base.identity import is_locked
from ...base.settings import NodeSettings
from ...daemon import NETWORK_KEY_FACT
from ...inspect import machine
from ...join.address_book import AddressBook, load_ports
from ...mesh.host import Host, open_host
from ...state.store import MANIFEST_FACT, StoreError, open_store
from ...status.status import NodeStatus
from .peers import ask_about_run, check_clock, check_nat, has_route, knock_at_all, make_doors, meet

CONTROL_TIMEOUT: Final = 3.0
# Checks that ask peers.
OF_PEERS: Final = ("run", "clock", "nat", "relay")
# Peers known from before that are dialled in addition to the invite's.
MAX_REMEMBERED: Final = 16

_in_thread = trio.to_thread.run_sync  # for what reads the disk


class Examination:
    """One visit, and its findings so far."""

    def __init__(self, settings: NodeSettings, clock: Callable[[], float] = time.time) -> None:
        """``clock``: Unix seconds."""
        self._settings = settings
        self._clock = clock
        self._findings: list[Finding] = []
        self._is_running = is_locked(settings.lock)
        self._called: Callable[[str], str] = partial(with_name, name="")
        """Returns what to call the peer with an id: with its name, if a node runs here that knows it."""
        # What the invite and the folder say.
        self._run_id: bytes | None = None
        self._manifest: Manifest | None = None  # the run's, once a file, the folder or a peer has given it
        self._named: list[tuple[bytes, str]] = []  # public key and multiaddr of each address that a person has named
        self._remembered: dict[bytes, list[str]] = {}  # peers from the folder's address book -> multiaddrs
        self._network_key = b""  # of a private run
        self._has_admission = False  # whether the invite admits to a run of invited members
        self._kept_ports: dict[str, int] = {}  # multiaddr with port 0 -> the port on which the node listened before

    async def run(self) -> Diagnosis:
        """Make all checks."""
        settings = self._settings
        await self._check("node", self._look_at_node)
        await self._read_invitation()
        async with trio.open_nursery() as everything:
            everything.start_soon(self._check, "torch", machine.check_torch, settings.device)
            async with trio.open_nursery() as nursery:  # before the network, where this visit itself listens
                nursery.start_soon(self._check, "home", _in_thread, machine.check_home, settings.home)
                nursery.start_soon(self._check, "key", _in_thread, machine.check_key, settings.key)
                nursery.start_soon(self._check, "data", _in_thread, machine.check_data, settings.data, settings.stream)
                look = partial(machine.check_ports, settings.listening, self._kept_ports, is_running=self._is_running)
                nursery.start_soon(self._check, "port", look)
            await self._look_at_network()
            # Last, since a peer may have named the run's model.
            needs = None if self._manifest is None else needs_of(self._manifest)
            await self._check("disk", _in_thread, machine.check_disk, settings.home, needs)
            fits = partial(machine.check_memory, self._manifest, settings, is_running=self._is_running)
            await self._check("memory", _in_thread, fits)
        return conclude(self._findings)

    # The run to join

    async def _read_invitation(self) -> None:
        settings = self._settings
        text = settings.invite
        if text is not None and not is_invite(text) and await _in_thread(os.path.isfile, text):
            try:
                self._manifest, signed = decode_manifest(await trio.Path(text).read_bytes())
            except (OSError, FarandoleError) as error:
                self._findings.append(found("invite-manifest-damaged", path=text, why=error))
            else:
                self._run_id = signed.run_id
                self._findings.append(found("invite-manifest", run=signed.run_id.hex()[:16]))
        elif text is not None:
            try:
                invite = decode_invite(text)
            except InviteError as error:
                is_of_other_version = is_invite(text) and not "".join(text.split()).lower().startswith(PREFIX + VERSION)
                cause = f"invite-{'other-version' if is_of_other_version else 'damaged'}"
                self._findings.append(found(cause, why=error))
            else:
                self._run_id, self._network_key = invite.run_id, invite.network_key
                self._has_admission = bool(invite.admission)
                self._named = [(split_address(address)[1], address) for address in invite.addresses]
                names = ", ".join(dict.fromkeys(self._called(peer_id_of(peer)) for peer, _ in self._named))
                cause = "invite-fine" if invite.addresses else "invite-empty"
                self._findings.append(found(cause, run=invite.run_id.hex()[:16], names=names))
        for address in settings.bootstrap:
            try:
                self._named.append((split_address(address)[1], address))
            except InviteError as error:
                self._findings.append(found("invite-address", why=error))
        stored, raw = None, await self._read_store(settings.store)
        if raw is not None:
            try:
                known, signed = decode_manifest(raw)
                stored = signed.run_id
                if self._run_id in (None, stored) and (text is None or self._run_id is not None):
                    self._manifest = known
            except FarandoleError as error:
                self._findings.append(found("invite-store-damaged", store=settings.store, why=error))
        if text is None:
            self._run_id = stored
            self._findings.append(found("invite-none" if stored is None else "invite-stored"))
        elif stored is not None and self._run_id not in (None, stored):
            self._findings.append(found("invite-other-run", home=settings.home, run=stored.hex()[:16]))

    async def _read_store(self, path: Path) -> bytes | None:
        """Read what the folder knows, and return its run's manifest."""
        if not await trio.Path(path).exists():
            return None
        try:
            async with open_store(path) as store:
                book = AddressBook(store)
                await book.load()
                self._remembered = book.peers()
                self._kept_ports = await load_ports(store, self._settings.listening)
                self._network_key = self._network_key or await store.get_fact(NETWORK_KEY_FACT) or b""
                return await store.get_fact(MANIFEST_FACT)
        except StoreError:  # a full disk, which another check reports
            return None

    # This machine

    async def _look_at_node(self) -> Finding:
        """Ask the node that runs here how others reach it."""
        if not self._is_running:
            return found("node-none")
        ask = partial(call, self._settings.home, "status", timeout=CONTROL_TIMEOUT)
        try:
            status = msgspec.convert(await _in_thread(ask), NodeStatus)
        except (FarandoleError, msgspec.ValidationError):
            return found("node-silent")
        self._called = status.called
        return found("node-running", kind=status.reachability)

    # The network

    async def _look_at_network(self) -> None:
        """Check the connections to peers, and ask them.

        While no node runs here, this visit listens on the node's ports, and has peers try the announced addresses.
        """
        settings = self._settings
        key = Ed25519PrivateKey.generate()
        try:
            async with open_host(
                key,
                settings.listening,
                network_key=self._network_key,
                first_ports=self._kept_ports,
                announce=() if self._is_running else settings.announce,
            ) as host:
                await self._look_for_peers(host)
        except ListenError:  # the matter of `check_ports`
            async with open_host(key, NodeSettings().listening, network_key=self._network_key) as host:
                await self._look_for_peers(host)

    async def _look_for_peers(self, host: Host) -> None:
        doors = make_doors(self._named)
        peers = dict(list(self._remembered.items())[:MAX_REMEMBERED])
        if is_named := bool(doors or not peers):
            await self._check("bootstrap", knock_at_all, host, doors)
        for door in doors:
            if door.is_proved:
                peers[door.peer] = [door.address, *peers.get(door.peer, [])]
        met = await meet(host, peers, self._run_id)
        if not is_named:
            cause = "fine" if met else "moved" if has_route() else "offline"
            self._findings.append(found(f"bootstrap-{cause}", address="a peer that was known before"))
        if met:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._check, "run", self._look_at_run, host, met)
                nursery.start_soon(self._check, "clock", check_clock, host, met, self._clock)
                nursery.start_soon(self._check, "nat", check_nat, host, met, self._called)
            return
        why = "no address of a peer is known"
        if doors or peers:
            why = "no peer could be reached" if has_route() else "no peer could be reached without the internet"
        self._findings += [found(f"{check}-untold", why=why) for check in OF_PEERS]

    async def _look_at_run(self, host: Host, met: list[bytes]) -> list[Finding]:
        # Only invited members are told of such a run, and a visit is none.
        if self._has_admission or (self._manifest is not None and self._manifest.admission != "open"):
            known = found("run-untold", why="its members answer only invited ones, and the doctor joins no run")
        elif self._run_id is None:
            return [found("run-none")]
        else:
            known, manifest = await ask_about_run(host, met, self._run_id)
            self._manifest = self._manifest or manifest
        if self._manifest is None:
            return [known]
        return [known, *await _in_thread(machine.check_run, self._manifest, self._settings)]

    async def _check(
        self, name: str, check: Callable[..., Awaitable[Finding | list[Finding]]], *arguments: object
    ) -> None:
        """Add the findings of ``check(*arguments)``. Raises nothing: an unforeseen failure is a finding too."""
        try:
            findings = await check(*arguments)
            self._findings += [findings] if isinstance(findings, Finding) else findings
        except Exception as error:  # it is a finding, and ends no other check
            self._findings.append(Finding(name, f"{name}-broken-check", Level.WARNING, f"cannot be told: {error!r}"))


def conclude(findings: Iterable[Finding]) -> Diagnosis:
    """Make a diagnosis of all findings."""
    found = tuple(sorted(findings, key=lambda finding: CHECKS.index(finding.check)))
    return Diagnosis(found, all(finding.level is not Level.FAILED for finding in found))
