"""Homes in trouble: relays die, a router reboots, an address changes, bootstrap peers are gone for good.

Real daemons (`farandole.testnet.bench.nat_daemon`) in homes of the NAT lab train a small model together. The only peers
in their invite are relays without trainers, on public addresses. Troubles come one after the other; each is timed until
its effect is gone, as the daemons' status reports it. The loss of all these relays comes last: if the one public home
that is left changed its address after that, no member could find it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.status.status import NodeStatus
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import SignedManifest, sign_manifest

from ..natlab.groups import open_leash
from ..natlab.kinds import HTTPS_PORT
from ..natlab.lab import Lab, open_lab
from ..report.section import Grid
from .nat import gather, run_unless_interrupted
from .nat_daemon import NatDaemon
from .process import BenchError
from .report import OUT, BenchReport, Out, Write, open_bench

# Limits, in seconds.
MAX_RELAY_SECONDS: Final = 30.0
MAX_REJOIN_SECONDS: Final = 90.0
MAX_RETURN_SECONDS: Final = 60.0
MAX_NEWS_SECONDS: Final = 30.0
# Sessions that may fail when their relay dies.
MAX_FAILED: Final = 1
# The timeout, in limits: it distinguishes a late effect from one that never comes.
PATIENCE: Final = 3.0
# Until all members train, with processes to start on a busy machine.
BEGIN_TIMEOUT: Final = 180.0
# One dies, one falls silent, and two continue to serve.
NUM_RELAYS: Final = 4
# A contribution of a megabyte then takes two seconds: a relay that dies dies in the middle of an exchange.
UP_MBIT, DOWN_MBIT = 4.0, 20.0
# How long a home's router is off when it reboots.
OFF_SECONDS: Final = 10.0
HEADER: Final = ("trouble", "until", "measured", "at most")
RUN: Final[dict[str, Any]] = {
    "name": "trouble",
    "model": "0.5M",
    "outer": {"codec": "bf16"},
    "rounds": {"inner_steps": 2, "round_seconds": 0, "exchange_seconds": 20},
}
OPTIONS: Final = ("--device", "cpu", "--heartbeat-seconds", "2", "--checkpoint-seconds", "5", "--validate-every", "0")

ALL_AGAIN, HOME_AGAIN = "all exchange again", "its home exchanges again"

Condition = Callable[[NodeStatus], bool]
Conditions = Sequence[tuple[NatDaemon, Condition]]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The effect of one trouble."""

    trouble: str
    effect: str
    """The event until which it was timed, or what was counted."""
    measured: float | None
    """Seconds, or a number; None: not within `PATIENCE` times the limit."""
    limit: float
    unit: str = " s"

    def misses(self) -> list[str]:
        """Return the limit that was missed, if it was."""
        if self.measured is not None and self.measured <= self.limit:
            return []
        found = "never" if self.measured is None else f"{self.measured:.0f}{self.unit}"
        return [f"{self.trouble}: {self.effect}: {found}, not within {self.limit:g}{self.unit}"]

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        digits = 1 if self.unit else 0
        measured = "never" if self.measured is None else f"{self.measured:.{digits}f}{self.unit}"
        return [self.trouble, self.effect, measured, f"{self.limit:g}{self.unit}"]


def report_of(setting: Mapping[str, Any], rows: Sequence[Recovery]) -> BenchReport:
    """Return the table, data and misses of all troubles."""
    grid = Grid("Homes in trouble", HEADER, [row.cells() for row in rows], num_left=2)
    data = {"rows": [asdict(row) for row in rows]}
    return BenchReport(setting, [grid], data, misses=[miss for row in rows for miss in row.misses()])


@dataclass
class RecoveryBench:
    """Runs all troubles in one lab with one run."""

    lab: Lab
    folder: Path
    """Holds the daemons' own folders, and a log of each."""
    say: Callable[[str], None] = lambda text: None
    tell: Callable[[Recovery], None] = lambda row: None
    """Called with each row as it is measured."""
    rows: list[Recovery] = field(default_factory=list)
    _daemons: list[NatDaemon] = field(default_factory=list)

    async def measure(self) -> list[Recovery]:
        """Return all rows. Raises `BenchError` if the run does not start, or a daemon ends by itself."""
        signed = sign_manifest(manifest_of(RUN, Path(), time.time()), Ed25519PrivateKey.generate())
        (self.folder / "run.manifest").write_bytes(signed.encode())
        try:
            relays = await self._open_relays(signed)
            near, far = await self._open_members(signed)
            await self._lose_relays(relays, near, far)
            mapped = await self._join("mapped", "upnp", await near.make_invite())
            await self._until_begun(mapped, lambda status: status.exchanges_ok > 0 and status.reachability == "public")
            await self._reboot_router(near)
            await self._change_address(mapped, [near, far])
            await self._lose_bootstrap(relays, [near, far, mapped])
            await self._join_by_member(far)
        finally:
            for daemon in self._daemons:
                daemon.kill()
        return self.rows

    # The run

    async def _open_relays(self, signed: SignedManifest) -> list[NatDaemon]:
        """Start public nodes, each of which knows that it is public."""
        relays: list[NatDaemon] = []
        invite = encode_invite(Invite(signed.run_id))
        for index in range(NUM_RELAYS):
            relay = await self._open(f"relay-{index}", "open")
            relay.start("relay", invite, port=HTTPS_PORT)
            invite = await self._invite_to(signed, [*relays, relay])
            relays.append(relay)
        self.say("waiting until the relays have found that they are public")
        await gather(*(partial(self._until_begun, relay, lambda s: s.reachability == "public") for relay in relays))
        return relays

    async def _invite_to(self, signed: SignedManifest, relays: Sequence[NatDaemon]) -> str:
        return encode_invite(Invite(signed.run_id, tuple([await self._address_of(relay) for relay in relays])))

    async def _address_of(self, relay: NatDaemon) -> str:
        prefix = f"/ip4/{relay.home.address}/"
        status = await self._until_begun(relay, lambda s: any(a.startswith(prefix) for a in s.addresses))
        return next(address for address in status.addresses if address.startswith(prefix))

    async def _open_members(self, signed: SignedManifest) -> tuple[NatDaemon, NatDaemon]:
        """Start two members that reach each other through relays alone, and train."""
        relays = list(self._daemons)
        near, far = await self._open("near", "symmetric"), await self._open("far", "port-restricted")
        for member in (near, far):
            await trio.to_thread.run_sync(member.home.set_rate, UP_MBIT, DOWN_MBIT)
        known = [option for relay in relays for option in ("--bootstrap", await self._address_of(relay))]
        near.start("join", str(self.folder / "run.manifest"), *known, *OPTIONS)
        far.start("join", await self._invite_to(signed, relays), *OPTIONS)
        self.say("waiting until two homes exchange through relays")
        await gather(*(partial(self._until_begun, member, _trains_over_relays) for member in (near, far)))
        return near, far

    async def _open(self, name: str, kind: str) -> NatDaemon:
        home = await trio.to_thread.run_sync(self.lab.add_home, kind)
        daemon = NatDaemon(name, home, self.folder, self.lab.leash)
        self._daemons.append(daemon)
        return daemon

    async def _join(self, name: str, kind: str, invite: str) -> NatDaemon:
        self.say(f"a newcomer joins from a home of kind {kind}")
        daemon = await self._open(name, kind)
        daemon.start("join", invite, *OPTIONS)
        return daemon

    async def _until_begun(self, daemon: NatDaemon, condition: Condition) -> NodeStatus:
        with trio.move_on_after(BEGIN_TIMEOUT):
            return await daemon.until(condition)
        raise BenchError(f"{daemon.name} is not ready after {BEGIN_TIMEOUT:g} s; see {self.folder}")

    # Troubles

    async def _lose_relays(self, relays: list[NatDaemon], near: NatDaemon, far: NatDaemon) -> None:
        """Kill one relay in the middle of an exchange, and pull another's cable."""
        members = (near, far)
        for trouble, lose in (("the relay in use dies", NatDaemon.kill), ("a relay in use falls silent", _unplug)):
            victim = await self._relay_in_use(relays)
            lost = (await self._until_begun(victim, _is_there)).peer_id
            before = [await self._until_begun(member, _is_exchanging) for member in members]
            await trio.to_thread.run_sync(lose, victim)
            relays.remove(victim)
            began = trio.current_time()
            have_others = [(member, partial(_has_other_relays, lost)) for member in members]
            await self._time(trouble, "both homes have two other relays", MAX_RELAY_SECONDS, have_others, began)
            await self._time(trouble, ALL_AGAIN, MAX_RETURN_SECONDS, _exchange_since(members, before), began)
            after = [await self._until_begun(member, _is_there) for member in members]
            failed = [now.exchanges_failed - then.exchanges_failed for now, then in zip(after, before, strict=True)]
            self._add(Recovery(trouble, "exchanges that came to nothing", max(failed), MAX_FAILED, unit=""))
            victim.kill()

    async def _relay_in_use(self, relays: Sequence[NatDaemon]) -> NatDaemon:
        with trio.move_on_after(BEGIN_TIMEOUT):
            while True:
                for relay in relays:
                    status = await relay.status()
                    if status is not None and status.relayed_circuits:
                        return relay
        raise BenchError(f"no relay is in use; see {self.folder}")

    async def _lose_bootstrap(self, relays: Sequence[NatDaemon], members: Sequence[NatDaemon]) -> None:
        """Kill all relays, then restart a member, which knows the others from its address book alone."""
        trouble = "all bootstrap peers die for ever"
        before = [await self._until_begun(member, _is_there) for member in members]
        for relay in relays:
            relay.kill()
        await self._time(trouble, ALL_AGAIN, MAX_RETURN_SECONDS, _exchange_since(members, before))
        restarted = members[1]
        restarted.kill()
        restarted.start("join", *OPTIONS)
        condition = [(restarted, _has_exchanged)]
        await self._time(trouble, "a member that restarts exchanges", MAX_REJOIN_SECONDS, condition)

    async def _join_by_member(self, host: NatDaemon) -> None:
        newcomer = await self._join("newcomer", "carrier", await host.make_invite())
        effect = "a newcomer with the invite of a home behind NAT exchanges"
        condition = [(newcomer, _has_exchanged)]
        await self._time("bootstrap peers are dead", effect, MAX_REJOIN_SECONDS, condition)

    async def _reboot_router(self, member: NatDaemon) -> None:
        await trio.to_thread.run_sync(member.home.switch_off)
        await trio.sleep(OFF_SECONDS)
        again = _exchange_since([member], [await self._until_begun(member, _is_there)])
        await trio.to_thread.run_sync(member.home.switch_on)
        await self._time("a router reboots", HOME_AGAIN, MAX_RETURN_SECONDS, again)

    async def _change_address(self, member: NatDaemon, others: Sequence[NatDaemon]) -> None:
        """Change the address of a home that others can dial."""
        trouble = "a public home gets another address"
        before = await self._until_begun(member, _is_there)
        await trio.to_thread.run_sync(member.home.change_address)
        back = await self._time(trouble, HOME_AGAIN, MAX_RETURN_SECONDS, _exchange_since([member], [before]))
        knows = partial(_knows, before.peer_id, f"/ip4/{member.home.address}/")
        conditions = [(other, knows) for other in others]
        await self._time(trouble, "from then on, all others know it", MAX_NEWS_SECONDS, conditions, back)

    # Measuring

    async def _time(
        self, trouble: str, effect: str, limit: float, conditions: Conditions, began: float | None = None
    ) -> float:
        """Wait until all conditions hold, at most `PATIENCE` limits; record the time from ``began``; return the end."""
        self.say(f"{trouble}: until {effect}")
        began = trio.current_time() if began is None else began
        measured = None
        with trio.move_on_at(began + PATIENCE * limit):
            await gather(*(partial(daemon.until, condition) for daemon, condition in conditions))
            measured = trio.current_time() - began
        self._add(Recovery(trouble, effect, measured, limit))
        return trio.current_time()

    def _add(self, row: Recovery) -> None:
        self.rows.append(row)
        self.tell(row)


def _unplug(daemon: NatDaemon) -> None:
    daemon.home.unplug()


def _is_exchanging(status: NodeStatus) -> bool:
    return status.phase == "exchanging"


def _is_there(status: NodeStatus) -> bool:
    return bool(status.peer_id)


def _trains_over_relays(status: NodeStatus) -> bool:
    is_relayed = any(each.path == "relayed" for each in status.members)
    return is_relayed and len(status.relays) == 2 and status.exchanges_ok > 1


def _has_other_relays(lost: str, status: NodeStatus) -> bool:
    return len(status.relays) == 2 and lost not in status.relays


def _has_exchanged(status: NodeStatus, count: int = 0) -> bool:
    return status.exchanges_ok > count


def _exchange_since(members: Sequence[NatDaemon], before: Sequence[NodeStatus]) -> Conditions:
    """Return the condition that each member has exchanged again since its ``before`` status."""
    pairs = zip(members, before, strict=True)
    return [(member, partial(_has_exchanged, count=status.exchanges_ok)) for member, status in pairs]


def _knows(peer_id: str, prefix: str, status: NodeStatus) -> bool:
    return any(
        address.startswith(prefix) for each in status.members if each.peer_id == peer_id for address in each.addresses
    )


def run(out: Out = OUT, write: Write = None) -> None:
    """Measure how soon homes are back when relays die, routers reboot, and bootstrap peers are gone.

    In the NAT lab (Linux, root, nftables, miniupnpd). Example: [cyan]sudo .venv/bin/farandole testnet bench
    nat-recovery[/cyan]
    """
    with open_bench("nat-recovery", out, write) as bench, open_leash() as leash, open_lab(leash) as lab:
        folder = out / "nat-recovery"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

        def tell(row: Recovery) -> None:
            bench.tell(": ".join(row.cells()[:3]), is_miss=bool(row.misses()))

        measure = RecoveryBench(lab, folder.absolute(), bench.say, tell).measure
        rows = trio.run(run_unless_interrupted, measure)
        bench.publish(report_of(bench.setting, rows), folder)
