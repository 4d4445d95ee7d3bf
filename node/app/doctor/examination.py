"""All checks, in the order of their dependencies; independent ones run at once.

The network is checked with a key of its own, so that neither a broken key nor a node that runs with it is in the way.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.planning.needs import needs_of
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.wire.errors import FarandoleError

from ...base.control import call
from ...base.errors import ListenError
from ...base.settings import NodeSettings
from ...mesh.host import Host, open_host
from ...status.status import NodeStatus
from .causes import CHECKS, NO_ADDRESS, Diagnosis, Finding, Level, conclude, found
from .dial_probe import examine_egress, has_route, judge_doors, knock_at_all, make_doors, resolve
from .invite import RunToJoin, read_invitation
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
    """The run's, once the folder or a peer has given it."""
    is_running: bool = False
    """Whether a node runs with this folder."""
    _invitation: RunToJoin | None = None

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
        kept_ports = (await self._read_invitation()).kept_ports
        in_thread = trio.to_thread.run_sync  # what reads the disk
        self.is_running = is_running = await in_thread(is_node_running, settings.lock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check, "home", in_thread, check_home, settings.home)
            nursery.start_soon(self._check, "node", self._look_at_node)
            nursery.start_soon(self._check, "key", in_thread, check_key, settings.key)
            nursery.start_soon(self._check_room)
            nursery.start_soon(self._check, "data", in_thread, check_data, settings.data, settings.stream)
            look = partial(check_ports, settings.listening, kept_ports, is_running=is_running)
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

    async def _read_invitation(self) -> RunToJoin:
        """Read the invitation once; its manifest, if the folder has it, is the run's."""
        if self._invitation is None:
            settings = self.settings
            self._invitation = await read_invitation(
                settings.invite, settings.bootstrap, settings.store, settings.listening
            )
            self.findings += self._invitation.findings
            self.manifest = self._invitation.manifest
        return self._invitation

    # The network

    async def look_at_network(self) -> None:
        """Check the invite, the connections to peers, and the peers' answers.

        While no node runs here, this visit listens on the node's ports, and has peers try the announced addresses.
        """
        settings = self.settings
        invitation = await self._read_invitation()
        key = Ed25519PrivateKey.generate()
        try:
            async with open_host(
                key,
                settings.listening,
                network_key=invitation.network_key,
                first_ports=invitation.kept_ports,
                announce=() if self.is_running else settings.announce,
            ) as host:
                await self._look_for_peers(host, invitation)
        except ListenError:  # the matter of `check_ports`
            async with open_host(key, NodeSettings().listening, network_key=invitation.network_key) as host:
                await self._look_for_peers(host, invitation)

    async def _look_for_peers(self, host: Host, invitation: RunToJoin) -> None:
        doors = make_doors(invitation.doors)
        await self._check("dns", resolve, doors)
        await knock_at_all(host, doors)
        async with trio.open_nursery() as nursery:

            async def look_at_ways() -> list[Finding]:
                egress = await examine_egress(doors)
                return [egress, *judge_doors(doors, egress)]

            nursery.start_soon(self._check, "egress", look_at_ways)
            peers = dict(list(invitation.remembered.items())[:MAX_REMEMBERED])
            for door in doors:
                if door.is_proved:
                    peers[door.peer] = [door.address, *peers.get(door.peer, [])]
            met = await meet(host, peers, invitation.run_id)
            if met:
                await self._ask_peers(host, met, invitation)
            else:
                self._skip_peers(is_any_known=bool(doors or peers))

    def _skip_peers(self, *, is_any_known: bool) -> None:
        """Report which checks need a peer, and why there is none."""
        why = NO_ADDRESS
        if is_any_known:
            why = "no peer could be reached" if has_route() else "no peer could be reached without the internet"
        self.findings += [found(f"{check}-untold", why=why) for check in OF_PEERS]

    async def _ask_peers(self, host: Host, peers: Sequence[bytes], invitation: RunToJoin) -> None:

        async def look_at_reachability() -> list[Finding]:
            nat, kind = await check_nat(host, peers)
            return [nat, await check_relay(host, peers, kind)]

        async def look_at_run() -> list[Finding]:
            if invitation.is_for_invited:
                return await check_needs_of(invitation.manifest, self.settings)
            findings, manifest = await check_run(host, peers, invitation.run_id, self.settings)
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
