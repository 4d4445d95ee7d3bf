"""From an invite to a member: which run, whom to dial, where its manifest is. Each step says what it waits for.

"The node never joins" is what users of every system in this field complain of most, so there are many ways in (the
invite's addresses, ``--bootstrap``, peers remembered from before, the DHT), each is tried, and a failure names them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio

from farandole.protocol.errors import FarandoleError, ManifestError
from farandole.protocol.identity import peer_id_of, short_name
from farandole.protocol.invite import decode_invite, split_address
from farandole.protocol.manifest import Manifest, decode_manifest
from farandole.protocol.records import run_key

from .backoff import pauses
from .board import Board
from .errors import PeerUnreachableError
from .host import Host
from .settings import NodeSettings
from .transfers import fetch_manifest

# How long a newcomer tries before it gives up with advice; a member that knows the run goes on by itself.
JOIN_TIMEOUT = 120.0
# Between two rounds of dialling everybody: seconds at first and at most (`pauses`). A thousand who come back after the
# first are 250 a second, which one node can take.
FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE = 4.0, 20.0
DIAL_TIMEOUT = 8.0
# Peers dialled at once; an address book holds hundreds.
MAX_PARALLEL_DIALS = 16
DHT_TIMEOUT = 15.0


class JoinError(FarandoleError):
    """This node cannot join; the message says which step failed and what to do."""


@dataclass(frozen=True)
class Target:
    """The run to join, and who might know it."""

    run_id: bytes
    manifest: bytes | None
    """Its signed bytes, where this node has them already."""
    peers: dict[bytes, list[str]] = field(default_factory=dict)
    """Public key -> addresses."""
    is_first: bool = False
    """No other node was named: this one may be the run's first."""


def find_target(settings: NodeSettings, own: bytes, stored: bytes | None, remembered: dict[bytes, list[str]]) -> Target:
    """What the settings, the store's manifest and its address book say together.

    Raises `ManifestError` (a damaged invite or manifest) or `JoinError` (nothing says which run).
    """
    manifest = settings.manifest.read_bytes() if settings.manifest else None
    invite = decode_invite(settings.invite) if settings.invite else None
    run_id = invite.run_id if invite else None
    for candidate in (manifest, stored):
        if candidate is not None and run_id is None:
            run_id = decode_manifest(candidate)[1].run_id
    if run_id is None:
        raise JoinError("which run? Give an invite (`farandole join farandole1...`) or a manifest file")
    if manifest is not None:
        decode_manifest(manifest, run_id)  # an invite and a manifest must be of one run
    if stored is not None and decode_manifest(stored)[1].run_id != run_id:
        raise JoinError(
            f"{settings.home} belongs to another run ({decode_manifest(stored)[1].run_id.hex()[:16]}): "
            "use a folder of its own for this one, with --home"
        )
    named = [*(invite.addresses if invite else ()), *settings.bootstrap]
    peers = {peer: list(addresses) for peer, addresses in remembered.items()}
    for address in named:
        _, peer = split_address(address)
        peers.setdefault(peer, []).insert(0, address)
    peers.pop(own, None)
    return Target(run_id, manifest or stored, peers, is_first=not named)


async def dial(host: Host, peers: dict[bytes, list[str]]) -> dict[bytes, str]:
    """Dial all of them, a few at a time, until the deadline of each; peer -> why it failed."""
    failures: dict[bytes, str] = {}
    limit = trio.CapacityLimiter(MAX_PARALLEL_DIALS)

    async def dial_one(peer: bytes, addresses: Sequence[str]) -> None:
        async with limit:
            try:
                await host.connect(peer, addresses, timeout=DIAL_TIMEOUT)
            except PeerUnreachableError as error:
                failures[peer] = str(error)

    async with trio.open_nursery() as nursery:
        for peer, addresses in peers.items():
            nursery.start_soon(dial_one, peer, addresses)
    return failures


async def connect_to_run(host: Host, target: Target, board: Board) -> None:
    """Reach at least one of the target's peers, however often that takes to succeed within `JOIN_TIMEOUT`.

    A run's first node has nobody to dial, and one that knows the manifest goes on alone after one try: it may well be
    the others who come back to it. Raises `JoinError`.
    """
    if not target.peers:
        board.say("nobody to dial: waiting for others to join")
        return
    failures: dict[bytes, str] = {}
    with trio.move_on_after(JOIN_TIMEOUT):
        for pause in pauses(FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE, random.Random()):
            names = ", ".join(short_name(peer) for peer in list(target.peers)[:4])
            peers = "1 known peer" if len(target.peers) == 1 else f"{len(target.peers)} known peers"
            board.announce("joining", f"dialling {peers} ({names})", "a bootstrap peer")
            failures = await dial(host, target.peers)
            if len(failures) < len(target.peers):
                board.say(f"connected to {len(target.peers) - len(failures)} of {len(target.peers)}")
                return
            if target.is_first:
                board.warn("none of the peers known from before answers; going on alone until one does")
                return
            board.say(f"none answered; trying again in {pause:.0f} s")
            await trio.sleep(pause)
    reasons = "\n".join(f"  {peer_id_of(peer)}: {reason}" for peer, reason in failures.items())
    raise JoinError(
        f"step 1, dialling: no bootstrap peer could be reached within {JOIN_TIMEOUT:g} s:\n{reasons}\n"
        "Is this machine online, and does a firewall let it out? Ask for a newer invite: any member can make one "
        "(`farandole run invite`)."
    )


async def obtain_manifest(host: Host, target: Target, board: Board) -> tuple[Manifest, bytes]:
    """The manifest and its signed bytes: from the target, from a connected peer, or from members found in the DHT.

    Raises `JoinError`.
    """
    if target.manifest is not None:
        return decode_manifest(target.manifest, target.run_id)[0], target.manifest
    board.announce("joining", "fetching the run's manifest", "a member of the run")
    with trio.move_on_after(JOIN_TIMEOUT):
        for pause in pauses(FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE, random.Random()):
            found = await _ask_all(host, host.connected, target.run_id)
            if found is None:
                found = await _ask_all(host, await find_members(host, target.run_id, board), target.run_id)
            if found is not None:
                board.say(f"manifest of run {target.run_id.hex()[:16]} verified: {found[0].name!r}")
                return found
            await trio.sleep(pause)
    raise JoinError(
        f"step 2, the manifest: the bootstrap peers answer, but no member of run {target.run_id.hex()[:16]} was found "
        "through them or the DHT. Has the run ended? Ask for a newer invite."
    )


async def find_members(host: Host, run_id: bytes, board: Board) -> list[bytes]:
    """Members that the DHT knows, dialled."""
    board.enter("joining", "looking for members in the DHT", "the DHT")
    providers = dict(await host.find_providers(run_key(run_id), DHT_TIMEOUT))
    providers.pop(host.author, None)
    failures = await dial(host, providers)
    return [peer for peer in providers if peer not in failures]


async def _ask_all(host: Host, peers: Iterable[bytes], run_id: bytes) -> tuple[Manifest, bytes] | None:
    """Ask all at once; the first good answer ends the others."""
    answer: tuple[Manifest, bytes] | None = None

    async with trio.open_nursery() as nursery:

        async def ask(peer: bytes) -> None:
            nonlocal answer
            try:
                raw = await fetch_manifest(host, peer, run_id)
                answer = decode_manifest(raw, run_id)[0], raw
            except (PeerUnreachableError, ManifestError):
                return
            nursery.cancel_scope.cancel()

        for peer in peers:
            nursery.start_soon(ask, peer)
    return answer
