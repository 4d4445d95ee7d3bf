"""Run state under simulation: a thousand nodes with the real state machines, on a bad network, in virtual time.

Each node is a daemon's run state: a `RunState`, a `Writer`, a `Gossip`, timers. Messages are really encoded and
decoded. Only verdicts are shared: `SharedChecker` remembers for all nodes which bytes are valid, and `SharedRoster`
which admissions are. Nodes still behave as with separate checkers, since validity is a function of the item's bytes
alone, and sharing saves 999 of 1,000 verifications.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.protocol.run.invitations import Admission
from farandole.protocol.run.roster import Roster
from farandole.protocol.state.antientropy import Session
from farandole.protocol.state.entries import (
    AdmissionProof,
    Beat,
    Checker,
    Delta,
    Entry,
    Kind,
    Member,
    Payload,
    Progress,
    Signed,
)
from farandole.protocol.state.gossip import JOIN_LEAD_SECONDS, SYNC_PERIOD, Gossip, is_worth_forwarding, sync_periods
from farandole.protocol.state.liveness import BASE_PERIOD
from farandole.protocol.state.push import TICK_SECONDS
from farandole.protocol.state.state import MAX_AUTHORS, RunState
from farandole.protocol.state.writer import Mark, Writer
from farandole.protocol.wire.errors import RemoteProtocolError

from .simulation import UNIX_EPOCH, Clock, Network, Simulation

RUN_ID = b"simulated run".ljust(32, b".")
SESSION_TIMEOUT = 5.0
REFUSAL_SECONDS = 1.0
"""Until a sender learns that nobody is there: a reset, or a few retransmissions."""
NUM_JOIN_SESSIONS = 3
JOINING_SECONDS = 10.0
"""After which a node has the members' entries from its first sessions."""

_PUSH, _TO_RESPONDER, _TO_INITIATOR = 0, 1, 2


class SharedChecker(Checker):
    """A `Checker` whose verdicts are remembered by the items' exact bytes."""

    def __init__(self, run_id: bytes, creator: bytes) -> None:
        super().__init__(run_id, creator)
        self._parse = cache(super().parse)
        self._is_genuine = cache(super().is_genuine)

    def parse(self, signed: Signed) -> Entry:
        """See `Checker.parse`."""
        return self._parse(signed)

    def is_genuine(self, entry: Entry) -> bool:
        """See `Checker.is_genuine`; entries are shared, so the cache key is their identity."""
        return self._is_genuine(entry)


class SharedRoster(Roster):
    """A `Roster` that remembers, for all nodes together, which admissions are valid."""

    def __init__(self, run_id: bytes, creator: bytes, valid: set[Admission]) -> None:
        super().__init__(run_id, creator)
        self._valid = valid

    def check(self, admission: Admission) -> None:
        """See `Roster.check`."""
        if admission not in self._valid:
            super().check(admission)
            self._valid.add(admission)


@lru_cache(maxsize=8_192)
def key_of(number: int) -> Ed25519PrivateKey:
    """Return the private key of the node with this number."""
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


class SimulatedNode:
    """A node that lives from `start` to `stop`; a restart keeps what is on disk."""

    def __init__(self, world: World, number: int, clock: Clock) -> None:
        self.world = world
        self.number = number
        self.clock = clock
        self.key = key_of(number)
        self.mark: Mark = ()
        self.incarnation = 0
        self.is_running = False
        self.seen_at: dict[bytes, float] = {}
        """Entry id -> virtual second at which it first came in; only while `World.watched` asks for it."""
        self._rng = random.Random(f"{world.simulation.seed} node {number}")
        self._sessions: dict[tuple[int, bytes, int], Session] = {}  # by direction, peer and number
        self._session_number = 0
        self._contacts: list[bytes] = []
        self._new_life()
        self.author = self.writer.author

    def _new_life(self) -> None:
        world = self.world
        roster = SharedRoster(RUN_ID, world.creator, world.valid) if world.admission_of else None
        self.state = RunState(
            RUN_ID, world.creator, checker=world.checker, roster=roster, max_authors=world.max_authors
        )
        self.writer = Writer(self.key, RUN_ID)
        self.writer.resume(self.mark)
        self.gossip = Gossip(self.state, self.writer.author, self._rng, world.base_period, world.network_of)
        self.incarnation += 1
        self._sessions.clear()

    # life and death

    def start(self, contacts: list[bytes]) -> None:
        """Join the run through these peers: sync with each, and announce the node."""
        self._contacts = contacts
        self._run()
        if (roster := self.state.roster) is not None:
            self._later(JOINING_SECONDS, roster.settle)
        self._sync_later(sync_periods())
        for contact in contacts[:1]:
            self._open_session(contact, with_beats=True)
        for contact in contacts[1:NUM_JOIN_SESSIONS]:
            self._later(JOIN_LEAD_SECONDS, partial(self._open_session, contact, with_beats=True))
        self._later(1.0, self._announce)

    def start_settled(self, contacts: list[bytes]) -> None:
        """Start as a node that has been a member for some time and is connected to these peers."""
        self._contacts = contacts
        self._run()
        if self.state.roster is not None:
            self.state.roster.settle()
        first = SYNC_PERIOD * self._rng.random()
        self._sync_later(itertools.chain([first], itertools.repeat(SYNC_PERIOD)))
        self._later(self.gossip.liveness.period * self._rng.random(), self._beat)

    def _run(self) -> None:
        life = self.incarnation
        self.is_running = True
        self.world.network.attach(self.author, self._receive)

        def tick() -> bool:
            if self._lives(life):
                for peer, message in self.gossip.tick(self.clock.unix(), self.clock.monotonic()):
                    self._send(peer, bytes((_PUSH,)) + message)
            return self._lives(life)

        self.world.simulation.call_every(TICK_SECONDS, tick, jitter=0.2)

    def stop(self) -> None:
        """Die at once."""
        self.is_running = False
        self.world.network.kill(self.author)

    def restart(self, contacts: list[bytes]) -> None:
        """Restart with nothing but the key and the mark."""
        self._new_life()
        self.start(contacts)

    def _lives(self, life: int) -> bool:
        return self.is_running and self.incarnation == life

    def _later(self, delay: float, call: Callable[[], object]) -> None:
        """Call after ``delay`` virtual seconds, if this life lasts until then."""
        life = self.incarnation
        self.world.simulation.call_after(delay, lambda: self._lives(life) and call())

    # writing

    def publish(self, kind: Kind, index: int, payload: Payload) -> Entry:
        """Write an entry and push it."""
        now = self.clock.unix()
        mark = self.writer.mark_needed(kind, index, now)
        if mark is not None:
            self.mark = mark
            self.writer.marked(mark)
        entry = self.writer.write(kind, index, payload, now)
        self.gossip.publish(entry, now)
        self._note([entry])
        return entry

    def _announce(self) -> None:
        if self.writer.delay(Kind.MEMBER, 0, self.clock.unix()) > 0:
            self._later(5.0, self._announce)
            return
        if admission := self.world.admission_of and self.world.admission_of(self.author):
            self.publish(Kind.ADMISSION, 0, AdmissionProof(admission))
        self.publish(Kind.MEMBER, 0, Member(device="simulated", addresses=("/ip4/127.0.0.1/tcp/4001",)))
        self._beat()

    def _beat(self) -> None:
        if self.writer.delay(Kind.BEAT, 0, self.clock.unix()) <= 0:
            self.publish(Kind.BEAT, 0, Beat(0, 0, None, 0))
        self._later(self.gossip.liveness.period * self._rng.uniform(0.9, 1.0), self._beat)

    def _note(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.id in self.world.watched:
                self.seen_at.setdefault(entry.id, self.world.simulation.now)

    # timers

    def _sync_later(self, periods: Iterator[float]) -> None:
        def sync() -> None:
            now = self.clock.monotonic()
            self._sync(now)
            silent = self.gossip.choose_silent(now)
            if silent is not None:
                self._open_session(silent, with_beats=True)
            self._sync_later(periods)

        self._later(next(periods) * self._rng.uniform(0.75, 1.25), sync)

    def _sync(self, now: float) -> None:
        """Sync with a live member, or if none is known with one of the contacts."""
        partner = self.gossip.choose_partner(now)
        if partner is not None:
            self._open_session(partner, with_beats=False)
        elif self._contacts:
            self._open_session(self._rng.choice(self._contacts), with_beats=True)

    # sending and receiving

    def _send(self, peer: bytes, message: bytes) -> None:
        network = self.world.network
        network.send(self.author, peer, message, is_stream=message[0] != _PUSH)
        if network.can_hear(self.author, peer):
            return

        def refuse() -> None:
            """Handle a peer that is gone: sessions with it fail, and another peer is asked at once."""
            self.gossip.unreachable(peer, self.clock.monotonic())
            failed = [key for key in self._sessions if key[:2] == (_TO_INITIATOR, peer)]
            for key in failed:
                del self._sessions[key]
            if failed:
                self._sync(self.clock.monotonic())

        self._later(REFUSAL_SECONDS, refuse)

    def _open_session(self, peer: bytes, with_beats: bool) -> None:
        session = self.gossip.open_session(self.clock.unix(), is_initiator=True, with_beats=with_beats)
        self._session_number += 1
        number = self._session_number
        self._sessions[_TO_INITIATOR, peer, number] = session
        self._send(peer, bytes((_TO_RESPONDER,)) + number.to_bytes(4, "big") + session.start())

        def fail() -> None:
            """Fail a session that is not over by now, and ask another peer at once."""
            session = self._sessions.pop((_TO_INITIATOR, peer, number), None)
            if session is not None and not session.is_done:
                self.gossip.unreachable(peer, self.clock.monotonic())
                self._sync(self.clock.monotonic())

        self._later(SESSION_TIMEOUT, fail)

    def _receive(self, peer: bytes, message: bytes) -> None:
        unix, now = self.clock.unix(), self.clock.monotonic()
        if message[0] == _PUSH:
            try:
                self._note(self.gossip.receive_push(peer, message[1:], unix, now).new)
            except RemoteProtocolError:
                self.gossip.unreachable(peer, now)
            return
        direction, number = message[0], int.from_bytes(message[1:5], "big")
        key = (direction, peer, number)
        if direction == _TO_RESPONDER and key not in self._sessions:
            self._sessions[key] = self.gossip.open_session(unix, is_initiator=False)
            self.world.simulation.call_after(SESSION_TIMEOUT, lambda: self._sessions.pop(key, None))
        session = self._sessions.get(key)
        if session is None:
            return
        try:
            deltas, to_send = session.receive_data(message[5:])
            for delta in deltas:
                forward = is_worth_forwarding(delta)
                report = self.gossip.merge(delta, peer, unix, now, forward, is_asked=session.is_initiator)
                self._note(report.new)
        except RemoteProtocolError:
            del self._sessions[key]
            return
        if to_send:
            back = _TO_INITIATOR if direction == _TO_RESPONDER else _TO_RESPONDER
            self._send(peer, bytes((back,)) + number.to_bytes(4, "big") + to_send)
        if session.is_done:
            self.gossip.reached(peer)
            self._sessions.pop(key, None)


@dataclass
class World:
    """The nodes, the network between them, and figures for tests."""

    seed: int
    num_nodes: int
    loss: float = 0.0
    base_period: float = BASE_PERIOD
    max_authors: int = MAX_AUTHORS
    network_of: Callable[[bytes], str] = lambda peer: ""
    creator: bytes = b"\x01" * 32
    admission_of: Callable[[bytes], bytes] | None = None
    """Maps an author to its encoded admission; empty if it has none. None: any author is a member."""
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Node number -> (offset in seconds, drift) of its clock, where it is wrong."""

    def __post_init__(self) -> None:
        self.simulation = Simulation(self.seed)
        self.network = Network(self.simulation, loss=self.loss)
        self.checker = SharedChecker(RUN_ID, self.creator)
        self.watched: set[bytes] = set()
        self.valid: set[Admission] = set()
        """Admissions that were found to be valid."""
        self.nodes = [self._make(number) for number in range(1, self.num_nodes + 1)]

    def _make(self, number: int) -> SimulatedNode:
        return SimulatedNode(self, number, Clock(self.simulation, *self.clocks.get(number, (0.0, 0.0))))

    @property
    def living(self) -> list[SimulatedNode]:
        """Return the nodes that run now."""
        return [node for node in self.nodes if node.is_running]

    def contacts(self) -> list[bytes]:
        """Return three living nodes, drawn at random, as an invite lists them."""
        living = [node.author for node in self.living]
        return self.simulation.rng.sample(living, min(NUM_JOIN_SESSIONS, len(living)))

    def add_node(self) -> SimulatedNode:
        """Add a node, and return it without starting it."""
        self.nodes.append(self._make(len(self.nodes) + 1))
        return self.nodes[-1]

    def settle(self) -> None:
        """Start all nodes as members of a settled run: each knows each, as of now."""
        now = UNIX_EPOCH + self.simulation.now
        for node in self.nodes:
            node.mark = ((0, int(now)),)
            node.writer.marked(node.mark)
        entries: list[Entry] = []
        for node in self.nodes:
            if admission := self.admission_of and self.admission_of(node.author):
                entries.append(node.writer.write(Kind.ADMISSION, 0, AdmissionProof(admission), now))
            entries.append(node.writer.write(Kind.MEMBER, 0, Member(device="simulated"), now))
            entries.append(node.writer.write(Kind.BEAT, 0, Beat(0, 0, None, 0), now))
        everything = Delta(tuple(entry.signed for entry in entries))
        for node in self.nodes:
            node.gossip.merge(everything, node.author, now, node.clock.monotonic(), forward=False, is_asked=True)
            node.start_settled([other.author for other in self.nodes if other is not node][:NUM_JOIN_SESSIONS])

    def publish_progress(self, node: SimulatedNode) -> Entry:
        """Make a node write an entry, and record when it arrives at each node."""
        entry = node.publish(Kind.PROGRESS, 0, Progress(0, 0, node.number, 0, 0))
        self.watched.add(entry.id)
        node.seen_at[entry.id] = self.simulation.now
        return entry

    def publish_all(self, nodes: Sequence[SimulatedNode], seconds: float) -> list[tuple[Entry, float]]:
        """Make each node that still runs write one entry, spread over the next ``seconds``.

        Returns a list that fills over time: each entry, and when it was written.
        """
        written: list[tuple[Entry, float]] = []

        def publish(node: SimulatedNode) -> None:
            if node.is_running:
                written.append((self.publish_progress(node), self.simulation.now))

        for index, node in enumerate(nodes):
            self.simulation.call_after(seconds * index / len(nodes), partial(publish, node))
        return written

    def replace(self, nodes: Sequence[SimulatedNode], seconds: float) -> None:
        """Replace nodes one after another, evenly over the next ``seconds``: one dies, and a new node joins."""

        def replace(node: SimulatedNode) -> None:
            node.stop()
            self.add_node().start(self.contacts())

        for index, node in enumerate(nodes):
            self.simulation.call_after(seconds * (index + 0.5) / len(nodes), partial(replace, node))

    def are_equal(self) -> bool:
        """Return whether all living nodes have one root."""
        return len({node.state.root for node in self.living}) == 1


def delays_of(written: Sequence[tuple[Entry, float]], nodes: Sequence[SimulatedNode]) -> list[float]:
    """Return the sorted seconds from each entry's writing to each of the nodes; infinity where it never arrived."""
    return sorted(node.seen_at.get(entry.id, float("inf")) - at for entry, at in written for node in nodes)
