"""From an invite to a member, and back to one: which run to join, which peers to dial, where its manifest is.

Each step reports what it waits for.

"The node never joins" is the most frequent complaint in every system of this field. So there are many ways in (the
invite's addresses, ``--bootstrap``, the address book, the DHT, any peer that dials this node), each is retried without
end, and the obstacles are reported. No node has to be started again because the network came up after it.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.mesh.kademlia import run_key
from farandole.protocol.run.invitations import InviteSecret, decode_secret
from farandole.protocol.run.invite import InviteError, decode_invite, network_key_of, peers_at
from farandole.protocol.run.manifest import MAX_MANIFEST_BYTES, RUN_ID_BYTES, decode_manifest
from farandole.protocol.wire.bounds import pauses
from farandole.protocol.wire.errors import ManifestError, RemoteProtocolError, UnknownManifestError
from farandole.protocol.wire.framing import FrameParser, frame
from farandole.protocol.wire.identity import public_bytes, short_name

from ..base.causes import DIAL_MOVED
from ..base.errors import JoinError, NotAdmittedError, PeerUnreachableError
from ..base.figures import plural
from ..base.settings import NodeSettings
from ..base.streams import DIAL_TIMEOUT, Stream, StreamHost, ask, expecting_answer, receive_frame
from ..mesh.addresses import PRIVATE, distance_class, hosts_of
from ..mesh.host import Host
from ..state.gossip import GossipService
from ..status.journal import Journal

logger = logging.getLogger(__name__)

# How long something that peers should give at once is tried before the node gives up, or advises its owner.
JOIN_TIMEOUT = 120.0
# Between two rounds of dialling all peers: seconds at first and at most (`pauses`). A thousand nodes that come back
# after the first pause are 250 a second, which one node can take.
FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE = 4.0, 20.0
NO_ANSWER = "no known address answers"
ONLY_PRIVATE = "the invite has only addresses of its maker's private network"
# Peers dialled at once; an address book holds hundreds.
MAX_PARALLEL_DIALS = 16
DHT_TIMEOUT = 15.0
# A member that has just begun serves its run state within a second.
SYNC_RETRY = 1.0
# Once one peer has answered, the others get this much longer: several connections are better than one.
LAGGARDS_TIMEOUT = 1.0


@dataclass(frozen=True)
class Target:
    """The run to join, and the peers that might know it."""

    run_id: bytes
    manifest: bytes | None
    """The manifest's signed bytes, if this node has them already."""
    peers: dict[bytes, list[str]] = field(default_factory=dict)
    """Public key -> addresses, in the order in which to dial: the named ones, then the ones reached last."""
    secret: InviteSecret | None = None
    """The secret of an invite to a run of invited members."""
    network_key: bytes = b""
    """The network key of a private run."""


def find_target(
    settings: NodeSettings,
    key: Ed25519PrivateKey,
    stored: bytes | None,
    remembered: dict[bytes, list[str]],
    network_key: bytes = b"",
) -> Target:
    """Combine the settings, the node's key, the store's manifest and network key, and its address book into a target.

    Raises `ManifestError` (a damaged invite or manifest, no run, or another run than the folder's) or `JoinError` (no
    key to a private run).
    """
    manifest = settings.manifest.read_bytes() if settings.manifest else None
    invite = decode_invite(settings.invite) if settings.invite else None
    run_id = invite.run_id if invite else None
    for candidate in (manifest, stored):
        if candidate is not None and run_id is None:
            run_id = decode_manifest(candidate)[1].run_id
    if run_id is None:
        raise ManifestError("which run? Give an invite (`farandole join farandole1...`) or a manifest file")
    if manifest is not None:
        decode_manifest(manifest, run_id)  # an invite and a manifest must be of one run
    if stored is not None and decode_manifest(stored)[1].run_id != run_id:
        raise ManifestError(
            f"{settings.home} belongs to another run ({decode_manifest(stored)[1].run_id.hex()[:16]}): "
            "one data directory serves one run. Join this one with a new directory, --home NEW; if you make the run, "
            "sign it with that directory, too: farandole run create (or checkpoint resume, import) takes --home NEW"
        )
    peers = peers_at([*(invite.addresses if invite else ()), *settings.bootstrap])
    for peer, addresses in remembered.items():
        known = peers.setdefault(peer, [])
        known += [address for address in addresses if address not in known]
    peers.pop(public_bytes(key), None)
    manifest = manifest or stored
    network_key = invite.network_key if invite and invite.network_key else network_key
    if manifest is not None:
        run, signed = decode_manifest(manifest)
        if not run.private:
            network_key = b""
        elif signed.creator == public_bytes(key):
            network_key = network_key_of(key, signed.run_id)
        elif not network_key:
            raise JoinError(
                "this run is private, and its key is not in the manifest: join with an invite, which members print by "
                "`farandole run invite`"
            )
    try:
        secret = decode_secret(invite.admission) if invite and invite.admission else None
    except RemoteProtocolError as error:
        raise InviteError(f"the invite is damaged: {error}; copy the whole line again") from error
    return Target(run_id, manifest, peers, secret, network_key)


async def dial(host: Host, peers: dict[bytes, list[str]], *, is_one_enough: bool = False) -> dict[bytes, str]:
    """Dial all peers, a few at a time, until the deadline of each; return why each failed one did.

    ``is_one_enough``: once one has answered, do not wait for the others.
    """
    failures: dict[bytes, str] = {}
    limit = trio.CapacityLimiter(MAX_PARALLEL_DIALS)

    async def dial_one(peer: bytes, addresses: Sequence[str]) -> None:
        async with limit:
            try:
                await host.connect(peer, addresses, timeout=DIAL_TIMEOUT)
            except PeerUnreachableError as error:
                failures[peer] = str(error)
                return
        if is_one_enough:
            end = trio.current_time() + LAGGARDS_TIMEOUT
            nursery.cancel_scope.deadline = min(nursery.cancel_scope.deadline, end)

    async with trio.open_nursery() as nursery:
        for peer, addresses in peers.items():
            nursery.start_soon(dial_one, peer, addresses)
    return failures


async def connect_to_run(host: Host, target: Target, journal: Journal) -> None:
    """Wait until there is a connection to any peer, made by either side, without a time limit.

    A run's first node has no peer to dial. A node that knows the manifest goes on alone after one try: the others may
    well come back to it, and a member goes on trying. Any other node has an invite. What its owner can do while no
    address answers is in the status's first line, and printed (`farandole.node.ui.headline`).
    """
    if not target.peers:
        journal.say("nobody to dial: waiting for others to join")
        return
    names = ", ".join(short_name(peer) for peer in list(target.peers)[:4])
    tried, addresses = how_many(target.peers), [address for known in target.peers.values() for address in known]
    is_private = min(map(distance_class, addresses), default=None) == PRIVATE
    obstacle = f"{ONLY_PRIVATE} ({hosts_of(addresses)}), none answers" if is_private else NO_ANSWER
    journal.announce("joining", f"dialling {tried} ({names})", "a bootstrap peer")
    for attempt, pause in enumerate(pauses(FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE, random.Random()), 1):
        failures = await dial(host, target.peers, is_one_enough=True)
        if host.connected:
            journal.say(f"connected to {plural(len(host.connected), 'peer')}")
            return
        if target.manifest is not None:
            journal.warn(f"{NO_ANSWER}; going on alone until one does; {DIAL_MOVED}", NO_ANSWER)
            return
        if attempt == 1:
            for reason in failures.values():
                logger.info("%s", reason)
        times = "once" if attempt == 1 else f"{attempt} times"
        journal.announce(
            "joining",
            f"{obstacle}: {tried} tried {times}, again in {pause:.0f} s",
            "a bootstrap peer",
        )
        await wait_for_anyone(host, pause)


def how_many(peers: Mapping[bytes, Sequence[str]]) -> str:
    """Return the number of addresses and of peers as text."""
    return f"{plural(sum(map(len, peers.values())), 'address')} of {plural(len(peers), 'peer')}"


async def wait_for_anyone(host: Host, timeout: float) -> None:
    """Wait for ``timeout`` seconds, or until there is a connection, made by either side."""
    with trio.move_on_after(timeout):
        while not host.connected:
            await host.connections.changed.park()


async def obtain_manifest(host: Host, target: Target, journal: Journal) -> bytes:
    """Return the manifest's signed bytes, verified: from the target, a connected peer, or members found in the DHT.

    Tries without end, while it goes on dialling the target's peers. Raises `UnknownManifestError` if the run needs a
    newer version of this program.
    """
    if target.manifest is not None:
        return target.manifest
    journal.announce("joining", "fetching the run's manifest", "a member of the run")
    advised_at = trio.current_time() + JOIN_TIMEOUT
    for pause in pauses(FIRST_REDIAL_PAUSE, MAX_REDIAL_PAUSE, random.Random()):
        found = await ask_for_manifest(host, host.connected, target.run_id)
        if found is None:
            journal.enter("joining", "looking for members in the DHT", "the DHT")
            found = await ask_for_manifest(host, await find_members(host, target.run_id), target.run_id)
        refusal = host.gate.refusal
        if found is None and target.secret is None and not refusal:
            # Only peers that the invite or the owner names: a stranger's word would end the joining of an open run.
            with trio.move_on_after(ANSWER_TIMEOUT):
                for peer in target.peers.keys() & host.connected:
                    if refusal := await host.gate.refusal_of(peer):
                        break
        if found is None and refusal:
            raise NotAdmittedError(f"step 2, the manifest: members answer, but do not admit this node: {refusal}")
        if found is not None:
            manifest = decode_manifest(found)[0]
            if manifest.private != bool(target.network_key):
                raise JoinError("the invite is wrong: it has the key of a private run, and this run is not private")
            journal.say(f"manifest of run {target.run_id.hex()[:16]} verified: {manifest.name!r}")
            return found
        if trio.current_time() >= advised_at:
            advised_at = math.inf
            journal.warn(
                "step 2, the manifest: bootstrap peers answer, but no member of run "
                f"{target.run_id.hex()[:16]} was found through them or the DHT. Has the run ended, or is it for "
                "invited members? Ask for a newer invite, one that is for you. Still trying."
            )
        journal.enter("joining", f"no member found; looking again in {pause:.0f} s", "a member of the run")
        await trio.sleep(pause)
        missing = {peer: addresses for peer, addresses in target.peers.items() if peer not in host.connected}
        await dial(host, missing)
    raise AssertionError("pauses have no end")


async def find_members(host: Host, run_id: bytes, timeout: float = DHT_TIMEOUT) -> list[bytes]:
    """Dial the members that the DHT knows, and return the reached ones; ``timeout``: of the search."""
    providers = dict(await host.dht.find_providers(run_key(run_id), timeout))
    providers.pop(host.author, None)
    failures = await dial(host, providers)
    return [peer for peer in providers if peer not in failures]


async def sync_state(gossip: GossipService, journal: Journal, timeout: float, *, may_begin: bool = False) -> bool:
    """Learn from members what the run is doing; False if none gave its run state in time, unless this node may begin
    the run.
    """
    with trio.move_on_after(timeout):
        while await gossip.join() == 0 and not may_begin:
            journal.say("no member gave its run state; trying again")
            await trio.sleep(SYNC_RETRY)
        return True
    return False


async def ask_for_manifest(host: Host, peers: Iterable[bytes], run_id: bytes) -> bytes | None:
    """Ask all at once for the manifest's bytes; the first good answer ends the others. None: nobody gives one.

    Raises `UnknownManifestError` if the only answers need another version of this program.
    """
    answer: bytes | None = None
    unknown: UnknownManifestError | None = None

    async with trio.open_nursery() as nursery:

        async def ask(peer: bytes) -> None:
            nonlocal answer, unknown
            try:
                raw = await fetch_manifest(host, peer, run_id)
                decode_manifest(raw, run_id)
            except UnknownManifestError as error:
                unknown = error  # raised below, out of the nursery, which would wrap it in a group
            except (PeerUnreachableError, ManifestError):
                pass
            else:
                answer = raw
                nursery.cancel_scope.cancel()

        for peer in peers:
            nursery.start_soon(ask, peer)
    if answer is None and unknown is not None:
        raise unknown
    return answer


# The manifest, a newcomer's first question to a member. A question has a stream of its own: the run id (32 bytes). An
# empty frame answers "not here"; otherwise one frame holds the manifest, which the run id proves.

MANIFEST_PROTOCOL = "/farandole/manifest/1"
# A question and its small answer.
ANSWER_TIMEOUT = 10.0


def serve_manifest(host: StreamHost, run_id: bytes, manifest: bytes) -> None:
    """Answer newcomers from now on."""

    async def answer(stream: Stream) -> None:
        with trio.fail_after(ANSWER_TIMEOUT):
            question = await receive_frame(stream, FrameParser(RUN_ID_BYTES))
            await stream.send_all(frame(manifest if question == run_id else b"", 2 * MAX_MANIFEST_BYTES))

    host.set_handler(MANIFEST_PROTOCOL, answer)


async def fetch_manifest(host: StreamHost, peer: bytes, run_id: bytes) -> bytes:
    """Ask a peer for the manifest's bytes; the caller verifies them against the run id.

    Raises `PeerUnreachableError` if this peer does not give it; another may.
    """
    with expecting_answer(peer, ANSWER_TIMEOUT):
        raw = await ask(host, peer, MANIFEST_PROTOCOL, run_id, 2 * MAX_MANIFEST_BYTES)
    if not raw:
        raise PeerUnreachableError("this peer is not in the run")
    return raw
