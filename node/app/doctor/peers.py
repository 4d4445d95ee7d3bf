"""Checks of the way to peers, and of what they see: addresses, firewalls, the run, the clock, reachability."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import trio

from farandole.protocol.mesh.reachability import ReachabilityKind, Verdict, has_moved, is_closed, is_global
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.state.believing import NUM_AGREEING, judge_clock, votes_of
from farandole.protocol.wire.errors import UnknownManifestError
from farandole.protocol.wire.identity import peer_id_of

from ...base.causes import Finding, describe_skew, found, lessen
from ...base.errors import StrangerError
from ...base.streams import ask_all
from ...join.bootstrap import ask_for_manifest, dial, find_members
from ...mesh.addresses import PRIVATE, distance_class
from ...mesh.host import Host
from ...mesh.reach.reachability import Examiner, Reachability, ask_time

RESOLVE_TIMEOUT: Final = 5.0
# A lost SYN is sent again after one second and after three.
KNOCK_TIMEOUT: Final = 4.0
PROVE_TIMEOUT: Final = 8.0
# Documentation addresses (RFC 5737, RFC 3849): nothing is sent there, the system is only asked for the route.
_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_NAMED: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/.*)?")
_FAMILIES: Final = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}
# Doors probed at once; an invite has eight.
MAX_DOORS: Final = 16
# Time to find members in the DHT, and again to dial them: some of them have gone.
FIND_TIMEOUT: Final = 4.0
# Three, since any of them may fail to answer, or be busy.
NUM_ASKED: Final = 3
# Enough for the votes that must agree on a wrong clock, with two wrong ones among them.
NUM_CLOCKS: Final = NUM_AGREEING + 2


Knock = Literal["open", "refused", "silent", "no route"]
"""The answer of a TCP port."""


@dataclass
class Door:
    """One address of one peer, and the results of its checks."""

    peer: bytes
    address: str
    kind: str
    host: str
    """An IP address, or a name."""
    port: int
    ips: list[str] = field(default_factory=list)
    knock: Knock | None = None
    is_proved: bool = False
    error: Exception | None = None
    """Why the peer is not behind an open port."""

    @property
    def is_named(self) -> bool:
        """True if the address has a name in place of an IP address."""
        return self.kind.startswith("dns")

    @property
    def is_relayed(self) -> bool:
        """True if the address reaches the peer through a relay."""
        return "/p2p-circuit" in self.address


def make_doors(addresses: Iterable[tuple[bytes, str]]) -> list[Door]:
    """Make doors of the first `MAX_DOORS` TCP addresses among peers' multiaddrs."""
    doors = [
        Door(peer, address, match[1], match[2], int(match[3]))
        for peer, address in addresses
        if (match := _NAMED.fullmatch(address))
    ]
    return doors[:MAX_DOORS]


def has_route() -> bool:
    """Return whether the system has a route to the internet, over IPv4 or IPv6."""
    for family, elsewhere in _ELSEWHERE.items():
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return True
    return False


async def knock(ip: str, port: int) -> Knock:
    """Try to open a TCP connection, and close it."""
    family = trio.socket.AF_INET6 if ":" in ip else trio.socket.AF_INET
    with trio.socket.socket(family, trio.socket.SOCK_STREAM) as probe:
        try:
            with trio.fail_after(KNOCK_TIMEOUT):
                await probe.connect((ip, port))
        except trio.TooSlowError:
            return "silent"
        except ConnectionRefusedError:
            return "refused"
        except OSError as error:
            return "silent" if error.errno == errno.ETIMEDOUT else "no route"
    return "open"


async def knock_at_all(host: Host, doors: Sequence[Door]) -> list[Finding]:
    """Dial each address; return a finding for each. While one reaches its peer, the others are at most warnings."""

    async def try_door(door: Door) -> None:
        door.ips = [] if door.is_named else [door.host]
        if door.is_named:
            with trio.move_on_after(RESOLVE_TIMEOUT), contextlib.suppress(OSError, UnicodeError):
                family = _FAMILIES.get(door.kind, socket.AF_UNSPEC)
                answers = await trio.socket.getaddrinfo(door.host, door.port, family, socket.SOCK_STREAM)
                door.ips = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        for ip in door.ips:
            door.knock = await knock(ip, door.port)
            if door.knock != "open":
                continue
            try:
                with trio.fail_after(PROVE_TIMEOUT):
                    if door.is_relayed:
                        await host.connect(door.peer, [door.address], PROVE_TIMEOUT)
                    else:
                        await host.upgrader.prove(door.peer, (ip, door.port))
                door.is_proved = True
            except Exception as error:  # whatever the handshake raises, the peer was not reached
                door.error = error
            return

    async with trio.open_nursery() as nursery:
        for door in doors:
            nursery.start_soon(try_door, door)
    return judge_doors(doors)


def judge_doors(doors: Sequence[Door]) -> list[Finding]:
    """Return the findings about the doors, and what they have in common."""
    if not doors:
        return [found("bootstrap-none")]
    has_answer = any(door.knock in ("open", "refused") for door in doors)
    if not has_answer and (all(door.knock == "no route" for door in doors) or not has_route()):
        return [found("bootstrap-offline")]
    findings = [
        found(
            _cause_of(door),
            address=door.address,
            ips=", ".join(door.ips),
            port=door.port,
            seconds=KNOCK_TIMEOUT,
            why=str(door.error) or repr(door.error),
        )
        for door in doors
    ]
    return [lessen(finding) for finding in findings] if any(door.is_proved for door in doors) else findings


def _cause_of(door: Door) -> str:
    if door.is_proved:
        return "bootstrap-fine"
    if not door.ips:
        return "bootstrap-unresolved"
    if door.is_named and not any(map(is_global, door.ips)):
        return "bootstrap-login-page"
    if distance_class(door.address) == PRIVATE:  # every home has such addresses, so its peer need not be what answers
        return "bootstrap-private"
    match door.knock:
        case "open" if door.is_relayed:
            return "bootstrap-behind-relay"
        case "open" if isinstance(door.error, StrangerError):
            return "bootstrap-stranger"
        case "open":
            return "bootstrap-no-handshake"
        case "refused":
            return "bootstrap-refused"
        case "no route":
            return "bootstrap-no-route"
    return "bootstrap-silent"


# What peers answer


async def meet(host: Host, peers: dict[bytes, list[str]], run_id: bytes | None) -> list[bytes]:
    """Dial the peers, and members that the DHT knows if few answer; return the connected ones."""
    await dial(host, peers)
    if run_id is not None and host.connected and len(host.connected) < NUM_ASKED:
        with trio.move_on_after(2 * FIND_TIMEOUT):
            await find_members(host, run_id, FIND_TIMEOUT)
    return list(host.connected)


async def ask_about_run(host: Host, peers: Sequence[bytes], run_id: bytes) -> tuple[Finding, Manifest | None]:
    """Ask whether a peer knows the run; return its manifest, too."""
    run = run_id.hex()[:16]
    try:
        raw = await ask_for_manifest(host, peers, run_id)
    except UnknownManifestError as error:
        return found("run-newer", why=str(error)), None
    if raw is None:
        return found("run-unknown", run=run), None
    manifest = decode_manifest(raw)[0]
    return found("run-fine", run=run, name=manifest.name), manifest


async def check_clock(host: Host, peers: Sequence[bytes], clock: Callable[[], float] = time.time) -> Finding:
    """Check how far this clock is off the peers' clocks."""

    async def ask(peer: bytes) -> tuple[bytes, str, float]:
        return peer, host.connections.network_of(peer), await ask_time(host, peer, clock)

    answers = await ask_all(ask, peers[:NUM_CLOCKS])
    return find_skew(votes_of(answers)) if answers else found("clock-untold", why="no peer reports its time")


def find_skew(votes: Sequence[float]) -> Finding:
    """Judge the clock by at least one vote, in seconds by which it is ahead; see `protocol.state.believing`."""
    skew = judge_clock(votes)
    if skew is not None and skew.is_harmful:
        cause = "clock-off" if skew.is_agreed else "clock-disputed"
        return found(cause, how=describe_skew(skew.seconds), num=skew.num_members)
    return found("clock-fine", how=describe_skew(min(votes, key=abs) if skew is None else skew.seconds))


async def check_nat(host: Host, peers: Sequence[bytes], called: Callable[[str], str]) -> list[Finding]:
    """Check how others reach this node, and whether a peer, as it is ``called`` by its id, would relay if needed."""
    reachability = Reachability()
    await Examiner(host, reachability).examine()
    kind = reachability.verdict.kind
    nat = judge_nat(reachability.verdict, host.own.announced)
    if kind is ReachabilityKind.PUBLIC:
        return [nat, found("relay-needless")]

    async def ask(peer: bytes) -> str:
        await host.relays.reserve(peer)
        return called(peer_id_of(peer))

    names = await ask_all(ask, [peer for peer in peers if host.connections.is_direct(peer)])
    if names:
        return [nat, found("relay-fine", names=", ".join(names))]
    return [nat, found("relay-none-needed" if kind is ReachabilityKind.RELAY_ONLY else "relay-none")]


def judge_nat(verdict: Verdict, announced: Sequence[str] = ()) -> Finding:
    """Judge the router by the verdict, and the multiaddrs that the node's owner announces."""
    if closed := [address for address in announced if is_closed(address, verdict)]:
        return found("nat-announced-closed", announced=", ".join(closed))
    seen = ", ".join(f"{ip} port {port}" for ip, port in verdict.addresses)
    if moved := [address for address in announced if has_moved(address, verdict)]:
        return found("nat-announced-moved", seen=seen, announced=", ".join(moved))
    ips = [ip for ip, _ in verdict.addresses]
    match verdict.kind:
        case ReachabilityKind.PUBLIC:
            return found("nat-public", seen=seen)
        case ReachabilityKind.PUNCHABLE:
            return found("nat-punchable", seen=seen)
        case ReachabilityKind.RELAY_ONLY:
            return found("nat-symmetric" if len(set(ips)) < len(ips) else "nat-relay-only", seen=seen)
    return found("nat-untold", why="no peer reports how others reach this node")
