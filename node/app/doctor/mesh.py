"""Checks that ask peers: whether they know the run, the time, how others reach this node."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

import trio

from farandole.protocol.mesh.dialling import is_open_to_peers
from farandole.protocol.mesh.kademlia import run_key
from farandole.protocol.mesh.reachability import ReachabilityKind, Verdict
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.state.believing import NUM_AGREEING, judge_clock, votes_of
from farandole.protocol.wire.errors import ManifestError, RemoteProtocolError, UnknownManifestError
from farandole.protocol.wire.identity import short_name

from ...base.errors import PeerUnreachableError
from ...base.remedies import describe_skew
from ...base.settings import NodeSettings
from ...join.bootstrap import dial, fetch_manifest
from ...mesh.host import Host
from ...mesh.reach.dialback import ask_time
from ...mesh.reach.reachability import Examiner, Reachability
from .causes import Finding, found
from .machine import check_needs

# Time to find members in the DHT, and again to dial them: some of them have gone.
FIND_TIMEOUT: Final = 4.0
# Three, since any of them may fail to answer, or be busy.
NUM_ASKED: Final = 3
# Enough for the votes that must agree on a wrong clock, with two wrong ones among them.
NUM_CLOCKS: Final = NUM_AGREEING + 2
# A clock that is farther off works, but leaves little of the accepted offset for the delay of messages.
MAX_FINE_OFFSET: Final = 10.0

_Answer = TypeVar("_Answer")


async def meet(host: Host, peers: dict[bytes, list[str]], run_id: bytes | None) -> list[bytes]:
    """Dial the peers, and members that the DHT knows if few answer; return the connected ones."""
    await dial(host, peers)
    if run_id is not None and host.connected and len(host.connected) < NUM_ASKED:
        found_peers = dict(await host.dht.find_providers(run_key(run_id), FIND_TIMEOUT))
        found_peers.pop(host.author, None)
        with trio.move_on_after(FIND_TIMEOUT):
            await dial(host, found_peers)
    return list(host.connected)


async def check_run(
    host: Host, peers: Sequence[bytes], run_id: bytes | None, settings: NodeSettings
) -> tuple[list[Finding], Manifest | None]:
    """Check whether a peer knows the run, and which of its needs the settings lack; return its manifest, too."""
    if run_id is None:
        return [found("run-none")], None

    async def ask(peer: bytes) -> Manifest | UnknownManifestError:
        try:
            return decode_manifest(await fetch_manifest(host, peer, run_id), run_id)[0]
        except UnknownManifestError as error:
            return error
        except ManifestError as error:
            raise PeerUnreachableError(str(error)) from error

    answers = await _ask_all(ask, peers)
    manifests = [answer for answer in answers if isinstance(answer, Manifest)]
    run = run_id.hex()[:16]
    if not manifests:
        return [found("run-newer", why=str(answers[0])) if answers else found("run-unknown", run=run)], None
    fine = found("run-fine", run=run, name=manifests[0].name)
    return [fine, *await trio.to_thread.run_sync(check_needs, manifests[0], settings)], manifests[0]


async def check_needs_of(manifest: Manifest | None, settings: NodeSettings) -> list[Finding]:
    """Check a run of invited members, who tell a visit nothing: what it needs, if the folder has its manifest."""
    skipped = found("run-untold", why="its members answer only invited ones, and the doctor joins no run")
    return [skipped, *(await trio.to_thread.run_sync(check_needs, manifest, settings) if manifest is not None else ())]


async def check_clock(host: Host, peers: Sequence[bytes], clock: Callable[[], float] = time.time) -> Finding:
    """Check how far this clock is off the peers' clocks."""

    async def ask(peer: bytes) -> tuple[bytes, str, float]:
        return peer, host.connections.network_of(peer), await ask_time(host, peer, clock)

    answers = await _ask_all(ask, peers[:NUM_CLOCKS])
    return find_skew(votes_of(answers)) if answers else found("clock-untold", why="no peer reports its time")


def find_skew(votes: Sequence[float]) -> Finding:
    """Judge the clock by at least one vote, in seconds by which it is ahead; see `protocol.state.believing`."""
    skew = judge_clock(votes)
    if skew is not None and skew.is_harmful:
        cause = "clock-off" if skew.is_agreed else "clock-disputed"
        return found(cause, how=describe_skew(skew.seconds), num=skew.num_members)
    ahead = min(votes, key=abs) if skew is None else skew.seconds
    return found("clock-fine" if abs(ahead) <= MAX_FINE_OFFSET else "clock-slightly-off", how=describe_skew(ahead))


async def check_nat(host: Host, peers: Sequence[bytes]) -> tuple[Finding, ReachabilityKind]:
    """Check how others reach this node."""
    reachability = Reachability()
    await Examiner(host, reachability).examine()
    num_witnesses = sum(host.connections.is_direct(peer) for peer in peers)
    return judge_nat(reachability.verdict, host.own.ips, num_witnesses, host.own.announced), reachability.kind


def judge_nat(verdict: Verdict, own_ips: Sequence[str], num_witnesses: int, announced: Sequence[str] = ()) -> Finding:
    """Judge the router by the verdict, this machine's own addresses, and the multiaddrs that its owner announces."""
    closed = []
    for address in announced:
        _, _, ip, _, port = address.split("/")
        # Peers dial only the IP address that they see, and not every port.
        is_tried = ip in {seen_ip for seen_ip, _ in verdict.addresses} and is_open_to_peers(int(port))
        if is_tried and (verdict.kind is not ReachabilityKind.PUBLIC or (ip, int(port)) not in verdict.addresses):
            closed.append(address)
    if closed:
        return found("nat-announced-closed", announced=", ".join(closed))
    seen = ", ".join(f"{ip} port {port}" for ip, port in verdict.addresses)
    is_translated = not any(ip in own_ips for ip, _ in verdict.addresses)
    ips = [ip for ip, _ in verdict.addresses]
    match verdict.kind:
        case ReachabilityKind.PUBLIC:
            return found("nat-port-open" if is_translated else "nat-public", seen=seen)
        case ReachabilityKind.PUNCHABLE if not is_translated:
            return found("nat-firewall", seen=seen)
        case ReachabilityKind.PUNCHABLE:
            return found("nat-punchable" if num_witnesses > 1 else "nat-one-witness", seen=seen)
        case ReachabilityKind.RELAY_ONLY if len(set(ips)) < len(ips):
            return found("nat-symmetric", seen=seen)
        case ReachabilityKind.RELAY_ONLY:
            return found("nat-relay-only")
    return found("nat-untold", why="no peer reports how others reach this node")


async def check_relay(host: Host, peers: Iterable[bytes], kind: ReachabilityKind) -> Finding:
    """Check whether a peer would relay others to this node, where that is needed."""
    if kind is ReachabilityKind.PUBLIC:
        return found("relay-needless")

    async def ask(peer: bytes) -> str:
        await host.relays.reserve(peer)
        return short_name(peer)

    names = await _ask_all(ask, [peer for peer in peers if host.connections.is_direct(peer)])
    if names:
        return found("relay-fine", names=", ".join(names))
    return found("relay-none-needed" if kind is ReachabilityKind.RELAY_ONLY else "relay-none")


async def _ask_all(ask: Callable[[bytes], Awaitable[_Answer]], peers: Iterable[bytes]) -> list[_Answer]:
    """Ask all peers at once and return the answers that came; each question has its deadline."""
    answers: list[_Answer] = []

    async def ask_one(peer: bytes) -> None:
        try:
            answers.append(await ask(peer))
        except (PeerUnreachableError, RemoteProtocolError):
            return

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(ask_one, peer)
    return answers
