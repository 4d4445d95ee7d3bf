"""A node without a trainer: what `farandole relay` runs.

It serves the DHT for a run, introduces newcomers to members, and relays between peers behind NAT as soon as peers have
found that they can dial it. It is no member: it needs neither manifest nor run state, so it costs a small machine
little and cannot mislead a peer about the run. torch is never imported.

    store -> host -> connectivity (reachability, relay) -> control socket, page -> finding members
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trio

from farandole.protocol.mesh.reachability import ReachabilityKind, is_global
from farandole.protocol.mesh.relay import Limits
from farandole.protocol.run.invite import decode_invite
from farandole.protocol.wire.bounds import pauses
from farandole.protocol.wire.errors import ManifestError
from farandole.protocol.wire.identity import short_name

from .base.control import ControlError
from .base.nurseries import open_service_nursery
from .daemon import open_control, open_mesh
from .join.bootstrap import FIRST_REDIAL_PAUSE, NO_ANSWER, Target, dial, find_members, find_target, how_many
from .member.parts import Daemon, Mesh
from .mesh.host import Host
from .relay_page import PublicPage, publish
from .state.store import StoreError
from .status.journal import DISK, Journal

INVITE_FACT: Final = "relayed run"
# What the commands ask only of a member's node.
OF_MEMBERS: Final = (*("admit", "invitation", "invite", "network_key", "notice", "pause", "quiet", "resume", "roster"),)
ONLY_PRIVATE: Final = (
    "this relay knows no public address of its machine, so only its own network can dial it. On a cloud machine, or "
    "behind a router that forwards a port, start it with --port PORT --announce /ip4/PUBLIC-IP/tcp/PORT"
)
# Longest interval of checks for connected members.
MAX_LOOK_INTERVAL: Final = 30.0
# Members to connect to; peers that connect for another reason are not counted.
NUM_MEMBERS: Final = 4


async def be_relay(page: Path | None, daemon: Daemon) -> None:
    """Relay for the run of the invite, or of the stored one, until asked to leave.

    ``page``: folder for the run's public page, if there is to be one (`PublicPage`). Raises `ManifestError` if no run
    is known, or another than the invite's.
    """
    stored = (await daemon.store.get_fact(INVITE_FACT) or b"").decode()
    text = daemon.settings.invite or stored
    if not text:
        raise ManifestError("which run? Give an invite: `farandole relay farandole1...`; any member can make one")
    invite = decode_invite(text)
    if stored and decode_invite(stored).run_id != invite.run_id:
        raise ManifestError("this folder is of a relay for another run: give each its own --home, and a port")
    await daemon.store.put_fact(INVITE_FACT, text.encode())
    target = find_target(replace(daemon.settings, invite=text), daemon.key, None, daemon.book.peers())
    public = None if page is None else await trio.to_thread.run_sync(PublicPage, page, invite.run_id)
    async with open_mesh(daemon, target, Limits()) as mesh:
        mesh.host.gate.show(invite.run_id, b"", target.secret)  # invited members tell others nothing, in the DHT too

        async def refuse(params: dict[str, Any]) -> object:
            words = "a relay runs here, which is no member: type this where a member's node runs"
            raise ControlError("no_member", words)

        handlers = dict.fromkeys(OF_MEMBERS, refuse)
        async with open_control(daemon, mesh, invite.run_id, handlers), open_service_nursery() as nursery:
            nursery.start_soon(_seek_members, daemon, mesh, target)
            daemon.journal.say("a node that others cannot dial connects to this relay, on its machine, with:")
            daemon.journal.say(f"  farandole dial {address_for_others(mesh.host, daemon.settings.announce)}")
            if not (daemon.settings.announce or any(is_global(known.split("/")[2]) for known in mesh.host.addresses)):
                daemon.journal.say(ONLY_PRIVATE)
            nursery.start_soon(_tell_reachability, mesh, daemon.journal)
            if public is not None:
                nursery.start_soon(publish, daemon.settings, invite, mesh.host.addresses, public, daemon.journal)
                daemon.journal.say(f"writing the run's public page into {page}")
            await daemon.is_leaving.wait()
            with contextlib.suppress(StoreError):
                await daemon.book.save()
        daemon.journal.say("left")


def address_for_others(host: Host, announced: Sequence[str]) -> str:
    """Return the address that other homes most likely reach."""

    def rank(address: str) -> tuple[bool, bool]:
        return address.partition("/p2p/")[0] in announced, is_global(address.split("/")[2])

    return max(host.addresses, key=rank, default="ADDRESS")


async def _seek_members(daemon: Daemon, mesh: Mesh, target: Target) -> None:
    """Keep connections with a few members of the run, and remember their addresses, until cancelled."""
    journal, host, book, known = daemon.journal, mesh.host, daemon.book, list[bytes]()
    waits = pauses(FIRST_REDIAL_PAUSE, MAX_LOOK_INTERVAL, random.Random())
    here = address_for_others(host, daemon.settings.announce)
    waits_for = "" if book.peers() else f"a member: on its machine, `farandole dial {here}`"
    journal.announce("relaying", f"for run {target.run_id.hex()[:16]}", waits_for)
    while True:
        if mesh.traffic.is_spent:
            journal.update(isolation=daemon.rest.words)
            await mesh.traffic.wait_spent(False)
        named, before = {**book.peers(), **target.peers}, known
        if not host.connected:
            await dial(host, named, is_one_enough=True)
        known = [peer for peer in before if peer in host.connected]
        if host.connected:
            if len(known) < NUM_MEMBERS:  # look in the DHT
                known = await find_members(host, target.run_id)
            journal.update(isolation="", waits_for="")
        elif named and not journal.state.waits_for:
            journal.update(isolation=f"{NO_ANSWER}: {how_many(named)} tried; still trying")
        host.relays.members = frozenset(known)
        for peer in known:
            book.note_reached(peer, host.dialler.known.to_keep(peer))
        try:
            await book.save()
        except StoreError as error:
            journal.warn(f"{error}; trying again", f"{DISK}store")
        else:
            journal.over(f"{DISK}store")
        for peer in set(known) - set(before):
            journal.say(f"found {short_name(peer)}, a member of the run")
        await trio.sleep(next(waits))


async def _tell_reachability(mesh: Mesh, journal: Journal) -> None:
    """Print this node's reachability."""
    host, reachability = mesh.host, mesh.connectivity.reachability
    told = ReachabilityKind.UNKNOWN
    while True:
        while reachability.verdict.kind is told:
            await reachability.changed.park()
        told = reachability.verdict.kind
        if told is ReachabilityKind.PUBLIC:
            journal.say("peers can dial this node: it relays; its addresses, for invites:")
            journal.over("reachability")
            for address in host.addresses:
                journal.say(f"  {address}")
        else:
            journal.warn(f"this node is {told}: peers cannot dial it, so it relays for nobody", "reachability")
