"""All checks, in the order of their dependencies; independent ones run at once.

The network is checked with a key of its own, so that neither a broken key nor a node that runs with it is in the way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.invite import PREFIX, VERSION, InviteError, decode_invite, is_invite, split_address
from farandole.protocol.run.manifest import Manifest, SignedManifest, decode_manifest
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.identity import short_name

from ...base.control import call
from ...base.errors import ListenError
from ...base.settings import NodeSettings
from ...daemon import NETWORK_KEY_FACT
from ...join.address_book import AddressBook, load_ports
from ...mesh.host import Host, open_host
from ...state.store import MANIFEST_FACT, StoreError, open_store
from ...status.status import NodeStatus
from .causes import CHECKS, NO_ADDRESS, Diagnosis, Finding, Level, conclude, found
from .dial_probe import examine_egress, has_route, judge_doors, knock_at_all, make_doors, resolve
from .machine import (
    check_data,
    check_disk,
    check_home,
    check_key,
    check_memory,
    check_ports,
    check_torch,
    is_node_running,
)
from .mesh import check_clock, check_nat, check_needs_of, check_relay, check_run, meet

CONTROL_TIMEOUT: Final = 3.0
# Checks whose findings depend on the run's model.
OF_MODEL: Final = frozenset({"disk", "memory"})
# Checks that ask peers.
OF_PEERS: Final = ("run", "clock", "nat", "relay")
# Peers known from before that are dialled in addition to the invite's.
MAX_REMEMBERED: Final = 16


@dataclass
class Examination:
    """One visit."""

    settings: NodeSettings
    clock: Callable[[], float] = time.time
    """Unix seconds."""
    findings: list[Finding] = field(default_factory=list)
    manifest: Manifest | None = None
    """The run's, once a file, the folder or a peer has given it."""
    is_running: bool = False
    """Whether a node runs with this folder."""
    run_id: bytes | None = None
    named: list[tuple[bytes, str]] = field(default_factory=list)
    """Public key and multiaddr of each address that a person has named."""
    remembered: dict[bytes, list[str]] = field(default_factory=dict)
    """Peers from the folder's address book -> multiaddrs."""
    network_key: bytes = b""
    """Of a private run."""
    has_admission: bool = False
    """Whether the invite admits to a run of invited members."""
    kept_ports: dict[str, int] = field(default_factory=dict)
    """Multiaddr with port 0 -> the port on which the folder's node listened there before."""
    _has_read: bool = False

    async def run(self) -> Diagnosis:
        """Run all checks."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, "torch", check_torch, self.settings.device)
            await self.look_at_folder()
            await self.look_at_network()
        return self.conclude()

    def conclude(self) -> Diagnosis:
        """Return a diagnosis of the present findings."""
        order = list(CHECKS)
        return conclude(sorted(self.findings, key=lambda finding: order.index(finding.check)))

    # This machine

    async def look_at_folder(self) -> None:
        """Check the folder, the machine and the inputs; before the network, where this visit itself listens."""
        settings = self.settings
        await self._read_invitation()
        in_thread = trio.to_thread.run_sync  # what reads the disk
        self.is_running = is_running = await in_thread(is_node_running, settings.lock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, "home", in_thread, check_home, settings.home)
            nursery.start_soon(self._check, "node", self._look_at_node)
            nursery.start_soon(self._check, "key", in_thread, check_key, settings.key)
            nursery.start_soon(self._check_room)
            nursery.start_soon(self._check, "data", in_thread, check_data, settings.data, settings.stream)
            look = partial(check_ports, settings.listening, self.kept_ports, is_running=is_running)
            nursery.start_soon(self._check, "port", look)

    async def _check_room(self) -> None:
        """Check whether the run's model fits here, or any usual one while no run is known."""
        needs = None if self.manifest is None else needs_of(self.manifest)
        await self._check("disk", trio.to_thread.run_sync, check_disk, self.settings.home, needs)
        look = partial(check_memory, self.manifest, self.settings, is_running=self.is_running)
        await self._check("memory", trio.to_thread.run_sync, look)

    async def _look_at_node(self) -> Finding:
        """Ask the node that runs here how others reach it."""
        if not self.is_running:
            return found("node-none")
        ask = partial(call, self.settings.home, "status", timeout=CONTROL_TIMEOUT)
        try:
            status = msgspec.convert(await trio.to_thread.run_sync(ask), NodeStatus)
        except (FarandoleError, msgspec.ValidationError):
            return found("node-silent")
        return found("node-running", kind=status.reachability)

    # The run to join

    async def _read_invitation(self) -> None:
        """Read the invite and the folder, once: the run, the peers to dial, the ports to listen on."""
        if self._has_read:
            return
        self._has_read = True
        text, store = self.settings.invite, self.settings.store
        if text is not None and not is_invite(text) and await trio.to_thread.run_sync(os.path.isfile, text):
            await self._read_manifest(trio.Path(text))
        elif text is not None:
            self._read_invite(text)
        for address in self.settings.bootstrap:
            try:
                self.named.append((split_address(address)[1], address))
            except InviteError as error:
                self.findings.append(found("invite-address", why=error))
        known = await self._read_store(store)
        stored = None if known is None else known[1].run_id
        if text is None:
            self.run_id = stored
            self.findings.append(found("invite-none") if stored is None else found("invite-stored"))
        elif stored is not None and self.run_id not in (None, stored):
            self.findings.append(found("invite-other-run", home=store.parent, run=stored.hex()[:16]))
        if known is not None and self.run_id == stored:
            self.manifest = known[0]

    def _read_invite(self, text: str) -> None:
        try:
            invite = decode_invite(text)
        except InviteError as error:
            cause = "invite-damaged" if is_invite(text) else "invite-no"
            if is_invite(text) and not "".join(text.split()).lower().startswith(PREFIX + VERSION):
                cause = "invite-other-version"
            self.findings.append(found(cause, why=error))
            return
        self.run_id, self.network_key, self.has_admission = invite.run_id, invite.network_key, bool(invite.admission)
        self.named = [(split_address(address)[1], address) for address in invite.addresses]
        names = ", ".join(dict.fromkeys(short_name(peer) for peer, _ in self.named))
        cause = "invite-fine" if invite.addresses else "invite-empty"
        self.findings.append(found(cause, run=invite.run_id.hex()[:16], names=names))

    async def _read_manifest(self, path: trio.Path) -> None:
        """Read the manifest file of a run's first node."""
        try:
            self.manifest, signed = decode_manifest(await path.read_bytes())
        except (OSError, FarandoleError) as error:
            self.findings.append(found("invite-manifest-damaged", path=path, why=error))
            return
        self.run_id = signed.run_id
        self.findings.append(found("invite-manifest", run=signed.run_id.hex()[:16]))

    async def _read_store(self, path: Path) -> tuple[Manifest, SignedManifest] | None:
        if not await trio.Path(path).exists():
            return None
        try:
            async with open_store(path) as store:
                book = AddressBook(store)
                await book.load()
                self.remembered = book.peers()
                self.kept_ports = await load_ports(store, self.settings.listening)
                manifest = await store.get_fact(MANIFEST_FACT)
                self.network_key = self.network_key or await store.get_fact(NETWORK_KEY_FACT) or b""
        except StoreError:  # a full disk, which another check reports
            return None
        try:
            return decode_manifest(manifest) if manifest is not None else None
        except FarandoleError as error:
            self.findings.append(found("invite-store-damaged", store=path, why=error))
            return None

    # The network

    async def look_at_network(self) -> None:
        """Check the invite, the connections to peers, and the peers' answers.

        While no node runs here, this visit listens on the node's ports, and has peers try the announced addresses.
        """
        settings = self.settings
        await self._read_invitation()
        key = Ed25519PrivateKey.generate()
        try:
            async with open_host(
                key,
                settings.listening,
                network_key=self.network_key,
                first_ports=self.kept_ports,
                announce=() if self.is_running else settings.announce,
            ) as host:
                await self._look_for_peers(host)
        except ListenError:  # the matter of `check_ports`
            async with open_host(key, NodeSettings().listening, network_key=self.network_key) as host:
                await self._look_for_peers(host)

    async def _look_for_peers(self, host: Host) -> None:
        doors = make_doors(self.named)
        await self._check("dns", resolve, doors)
        await knock_at_all(host, doors)
        async with trio.open_nursery() as nursery:

            async def look_at_ways() -> list[Finding]:
                egress = await examine_egress(doors)
                return [egress, *judge_doors(doors, egress)]

            nursery.start_soon(self._check, "egress", look_at_ways)
            peers = dict(list(self.remembered.items())[:MAX_REMEMBERED])
            for door in doors:
                if door.is_proved:
                    peers[door.peer] = [door.address, *peers.get(door.peer, [])]
            met = await meet(host, peers, self.run_id)
            if met:
                await self._ask_peers(host, met)
                return
            why = NO_ADDRESS
            if doors or peers:
                why = "no peer could be reached" if has_route() else "no peer could be reached without the internet"
            self.findings += [found(f"{check}-untold", why=why) for check in OF_PEERS]

    async def _ask_peers(self, host: Host, peers: Sequence[bytes]) -> None:

        async def look_at_reachability() -> list[Finding]:
            nat, kind = await check_nat(host, peers)
            return [nat, await check_relay(host, peers, kind)]

        async def look_at_run() -> list[Finding]:
            # Only invited members are told of such a run, and a visit is none.
            if self.has_admission or (self.manifest is not None and self.manifest.admission != "open"):
                return await check_needs_of(self.manifest, self.settings)
            findings, manifest = await check_run(host, peers, self.run_id, self.settings)
            if self.manifest is None and manifest is not None:  # the findings without it were about any model
                self.manifest = manifest
                self.findings = [finding for finding in self.findings if finding.check not in OF_MODEL]
                await self._check_room()
            return findings

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, "run", look_at_run)
            nursery.start_soon(self._check, "clock", check_clock, host, peers, self.clock)
            nursery.start_soon(self._check, "nat", look_at_reachability)

    async def _check(
        self, name: str, check: Callable[..., Awaitable[Finding | list[Finding]]], *arguments: object
    ) -> None:
        """Add the findings of ``check(*arguments)``. Raises nothing: an unforeseen failure is a finding too."""
        try:
            findings = await check(*arguments)
            self.findings += [findings] if isinstance(findings, Finding) else findings
        except Exception as error:  # it is a finding, and ends no other check
            self.findings.append(Finding(name, f"{name}-broken-check", Level.WARNING, f"cannot be told: {error!r}"))
