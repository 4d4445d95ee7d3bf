"""Finds out how others reach this node: asks peers now and then, and whenever something may have changed.

Other modules need only `Reachability`. A caller with a fixed answer (a test, a relay with a fixed address) makes that
value itself.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import trio

from farandole.protocol.mesh.reachability import ReachabilityKind, Verdict, Witness, classify, is_global

from ...base.errors import PeerUnreachableError
from ..addresses import direct_ips
from ..host import Host
from .dialback import Dialback

logger = logging.getLogger(__name__)

# Two that agree outvote one that lies or errs.
NUM_WITNESSES = 3
# Two are needed to see whether a NAT shows them the same address.
NUM_COMPARED = 2
# Routers change their mappings, and some homes get another address every day. Longer than any NAT keeps a connection
# that has ended, so that no hole that we made ourselves lets a dial-back in.
EXAMINE_INTERVAL = 300.0
# Until then, an inbound dial may have come through a hole that we made: a verdict that it would change has to wait.
HOLE_SECONDS = EXAMINE_INTERVAL
# Pause while no peer has answered yet; and between two examinations, whatever happens.
RETRY_INTERVAL = 10.0
# The first peers connect within a moment of each other.
SETTLE_SECONDS = 0.5
# Most routers that open ports do so within a moment, and then a node is public from the beginning.
PREPARE_SECONDS = 1.0


class Reachability:
    """The reachability of this node. ``kind`` and ``addresses`` change while the node runs."""

    def __init__(self, verdict: Verdict | None = None) -> None:
        self.verdict = verdict or Verdict(ReachabilityKind.UNKNOWN)
        self.is_examined = verdict is not None
        """Whether peers have been asked."""
        self._changed = trio.Event()

    @property
    def kind(self) -> ReachabilityKind:
        """The kind of reachability of this node."""
        return self.verdict.kind

    def set(self, verdict: Verdict) -> None:
        """Set a new verdict."""
        if verdict.kind is not self.kind:
            logger.info("this node is %s", verdict.kind)
        self.verdict, self.is_examined = verdict, True
        self._changed.set()
        self._changed = trio.Event()

    @property
    def needs_relays(self) -> bool:
        """Return whether others cannot dial this node over IPv4."""
        if self.kind is ReachabilityKind.PUBLIC:
            return bool(self.verdict.addresses) and all(":" in ip for ip, _ in self.verdict.addresses)
        return self.is_examined

    async def changed(self) -> None:
        """Wait until there is a new verdict."""
        await self._changed.wait()


class Examiner:
    """Examines one host's reachability, again and again."""

    def __init__(self, host: Host, reachability: Reachability) -> None:
        self.dialback = Dialback(host)
        self._host = host
        self._reachability = reachability
        self._rng = random.Random()
        self._due = trio.Event()
        self._witnesses: frozenset[bytes] = frozenset()

    async def run(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Examine until cancelled. ``prepare``: awaited, for a short time, before peers are first asked."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            with trio.move_on_after(PREPARE_SECONDS):
                await prepare()
            while True:
                await self._due.wait()
                await trio.sleep(SETTLE_SECONDS)
                self._due = trio.Event()
                has_verdict = await self.examine()
                await trio.sleep(RETRY_INTERVAL)
                if has_verdict:
                    with trio.move_on_after(EXAMINE_INTERVAL):
                        await self._due.wait()
                if self._host.connected:
                    self._due.set()

    def note_change(self) -> None:
        """Note that others may reach this node in another way now."""
        if self._host.connected:
            self._due.set()

    async def _watch(self) -> None:
        """Examine on the first connection, the first ones from the internet, and the loss of a witness."""
        num_asked_far = num_connected = 0
        async for peer, is_connected in self._host.connections.events():
            was_alone, num_connected = num_connected == 0, len(self._host.connected)
            is_far = is_connected and is_global(self._ip_of(peer))
            if not is_connected and peer in self._witnesses:  # maybe because our address has changed
                self._due.set()
            if is_connected and (was_alone or (is_far and num_asked_far < NUM_COMPARED)):
                num_asked_far = 0 if was_alone else num_asked_far
                num_asked_far += is_far
                self._due.set()

    async def examine(self) -> bool:
        """Ask a few peers at once; return whether that has led to a verdict."""
        if not self._host.own.listening:
            self._reachability.set(Verdict(ReachabilityKind.RELAY_ONLY))
            return True
        witnesses, is_first = self._choose(), not self._reachability.is_examined
        self._witnesses = frozenset(witnesses)
        dialled = await self._gather(witnesses, self.dialback.ask)
        if not is_first and not any(witness.answer.has_dialled for witness in dialled):
            return False  # no peer that could contradict what is known
        verdict = classify(dialled, ())
        if verdict.kind is not ReachabilityKind.PUBLIC:

            async def observe(peer: bytes) -> Witness:
                async with self.dialback.observed_by(peer) as witness:
                    return witness

            verdict = classify(dialled, await self._gather(witnesses, observe))
        elif not is_first and self._reachability.kind is not ReachabilityKind.PUBLIC:
            # Behind NAT, and suddenly public: through a hole, unless a known address or the router explains it.
            own, mapped = self._host.own.ips, [port for _, port in self._host.own.mapped.values()]
            is_explained = any(ip in own or port in mapped for ip, port in verdict.addresses)
            if not is_explained and trio.current_time() < self.dialback.holed_at + HOLE_SECONDS:
                return True
        self._reachability.set(verdict)
        self._host.own.observed_ips = list(dict.fromkeys(ip for ip, _ in verdict.addresses))
        return verdict.kind is not ReachabilityKind.UNKNOWN

    def _choose(self) -> list[bytes]:
        """Choose peers with direct connections, distant ones first, at distinct addresses if possible."""
        peers = [peer for peer in self._host.connected if self._host.connections.is_direct(peer)]
        self._rng.shuffle(peers)
        peers.sort(key=lambda peer: not is_global(self._ip_of(peer)))
        apart = {self._ip_of(peer): peer for peer in reversed(peers)}
        return [*reversed(apart.values()), *(peer for peer in peers if apart[self._ip_of(peer)] != peer)][
            :NUM_WITNESSES
        ]

    def _ip_of(self, peer: bytes) -> str:
        return next(iter(direct_ips(self._host.connections.remote_addresses(peer))), "")

    async def _gather(self, peers: Sequence[bytes], ask: Callable[[bytes], Awaitable[Witness]]) -> list[Witness]:
        """Ask these peers at once and return their answers."""
        found: list[Witness] = []

        async def add(peer: bytes) -> None:
            try:
                found.append(await ask(peer))
            except PeerUnreachableError as error:
                logger.debug("no witness: %s", error)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(add, peer)
        return found
