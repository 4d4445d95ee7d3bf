"""Pairing under a virtual clock: real training loops, modelled trainers, and the commit of the exchanges.

Real: every `TrainingLoop`, its `Pairing` and each message of that, and the `Outcomes` that initiators answer from.
Modelled: inner steps (each node has its own speed), transfers (a random delay), and the commit's messages (`_Exchange`
below follows `farandole.node.bulk.exchange_service`, its shares of the deadline included). Messages may be lost; then,
as with a connection that breaks, both ends get notice a little later.

    report = simulate(PairingScenario(num_nodes=8, rounds=RoundConfig(round_seconds=20.0)), seed=7)
"""

from __future__ import annotations

import cmath
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Literal

from farandole.protocol.exchange.exchange import ASK_FROM, DATA_UNTIL, DECIDE_UNTIL, Outcomes
from farandole.protocol.rounds import pairing_events, pairing_messages, training_events
from farandole.protocol.rounds.pairing import Pairing
from farandole.protocol.rounds.pairing_order import PeerOrder
from farandole.protocol.rounds.trainer_rounds import LoopConfig
from farandole.protocol.rounds.training_loop import TrainingLoop
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.run.rules import NoLoCoConfig, RoundConfig
from farandole.protocol.state.node_state import TrainingState
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.supervisor import Supervisor
from farandole.protocol.wire.timers import SetTimer, TimerFired

from .simulation import Network, SimulatedTimer, Simulation

# The outer step, between an exchange's end and the next round.
OUTER_STEP_SECONDS = 0.2
# A broken connection is noticed after the first, a death after at most the second (the run state's heartbeats).
BREAK_SECONDS, DEATH_SECONDS = 0.5, 6.0
# No trainer computes, so any model is suitable.
MODEL = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=32, context=16, vocabulary=256)
PREPARED = messages.Prepared("none", 0, 0, bytes(32), 0, 0, 0, resumed=messages.Saved(0, 0, 0))
RESOLVE_INTERVAL = 0.5
# Between a greedy member's proposals to a node.
PROPOSE_INTERVAL = 0.5
# The same, to a node that has another partner, and to one that has a greedy one and does not give it up.
PARTNER_INTERVAL, ABSENCE = 2.0, 60.0

Capturing = Literal["exchange", "absent", "mute", "stalled"]
"""What hostile members do once they have a partner: exchange; never be ready; begin, and never offer anything; or
offer, and then neither send nor decide."""


@dataclass(frozen=True)
class PairingScenario:
    """The parameters of a simulation."""

    num_nodes: int
    rounds: RoundConfig
    seconds: float = 600.0
    step_seconds: tuple[float, float] = (0.5, 0.5)
    """Seconds of an inner step of the fastest and the slowest node; the other speeds are evenly spaced between."""
    start_spread: float = 0.0
    """Nodes start their first round within this number of seconds."""
    transfer_seconds: tuple[float, float] = (0.2, 1.0)
    loss: float = 0.0
    """Share of messages that break their connection instead of arriving."""
    num_deaths: int = 0
    num_late: int = 0
    """Number of nodes, in addition to the others, that join at random times."""
    num_fragments: int = 1
    num_capturing: int = 0
    """Number of hostile members, in addition to the others: see `_Coalition`."""
    capturing: Capturing = "absent"
    claimed_seconds: float | None = None
    """When hostile members say that they will be ready, from now; None: they cannot tell."""
    key_seconds: float = math.inf
    """Hostile members change their keys after this time, one after another."""


@dataclass
class PairingReport:
    """The result of a simulation."""

    rounds: int = 0
    """Finished rounds of all nodes together."""
    alone: int = 0
    longest_wait: float = 0.0
    """Seconds from a contribution's readiness to the outcome of its round."""
    mean_wait: float = 0.0
    utilisation: float = 0.0
    """Share of the nodes' time spent in inner steps, over all rounds but each node's last."""
    coherence: float = 0.0
    """Coherence of the phases at the end: 1 if all nodes start rounds together, about N^-0.5 for independent starts."""
    disagreements: int = 0
    """Sessions that only one of two living nodes believes committed, or whose sides had different fragments."""
    steps_too_many: int = 0
    """Outer steps of a node in excess of one per round."""
    fragments: Counter[int] = field(default_factory=Counter)
    """Contributions exchanged, by fragment."""
    pairs: Counter[frozenset[bytes]] = field(default_factory=Counter)
    repeats: float = 0.0
    """Share of exchanges with the same partner as in the exchange before."""
    messages_per_round: float = 0.0
    """Messages of honest nodes per round of theirs."""
    captured: Counter[int] = field(default_factory=Counter)
    """Rounds whose partner was a capturing member, by index."""
    averaged: Counter[int] = field(default_factory=Counter)
    """Rounds with an honest partner, by the minute of their outcome."""
    rounds_at: Counter[int] = field(default_factory=Counter)
    """Finished rounds, by index."""
    trace: str = ""


def simulate(scenario: PairingScenario, seed: int) -> PairingReport:
    """Run a scenario; equal seeds give equal reports."""
    return _World(scenario, seed).run()


class _World:
    def __init__(self, scenario: PairingScenario, seed: int) -> None:
        self.scenario = scenario
        self.manifest = Manifest(
            "simulated", MODEL, rounds=scenario.rounds, outer=NoLoCoConfig(fragments=scenario.num_fragments)
        )
        self.simulation = Simulation(seed)
        self.rng = random.Random(f"pairing {seed}")
        self.network = Network(self.simulation, ordered=True)
        self.report = PairingReport()
        self.nodes: dict[bytes, _Node] = {}
        self.beliefs: dict[bytes, dict[bytes, bool]] = {}
        self.fragments: dict[bytes, set[int]] = {}
        self.waits: list[float] = []
        self.capturers: set[bytes] = set()

    def run(self) -> PairingReport:
        scenario, simulation = self.scenario, self.simulation
        for index in range(scenario.num_nodes):
            simulation.call_at(self.rng.uniform(0, scenario.start_spread), self.join(index).start)
        if scenario.num_capturing:
            _Coalition(self)
        self.tell_peers()
        for index in range(scenario.num_nodes, scenario.num_nodes + scenario.num_late):
            simulation.call_at(self.rng.uniform(0, scenario.seconds / 2), partial(self.join_late, index))
        for _ in range(scenario.num_deaths):
            simulation.call_at(self.rng.uniform(0, scenario.seconds * 0.8), self.kill_one)
        simulation.run_until(scenario.seconds)
        return self.summary()

    def join_late(self, index: int) -> None:
        node = self.join(index)
        self.tell_peers()
        node.start()

    def join(self, index: int) -> _Node:
        name = index.to_bytes(4, "big") * 8
        total = self.scenario.num_nodes + self.scenario.num_late
        fastest, slowest = self.scenario.step_seconds
        share = index / max(total - 1, 1)
        speed = (1 - share) / fastest + share / slowest
        node = _Node(self, name, 1 / speed)
        self.nodes[name] = node
        self.network.attach(name, node.receive)
        return node

    def kill_one(self) -> None:
        alive = sorted(name for name, node in self.nodes.items() if node.is_alive)
        if len(alive) > 2:
            victim = self.rng.choice(alive)
            self.nodes[victim].is_alive = False
            self.network.kill(victim)
            for node in self.nodes.values():
                self.simulation.call_after(BREAK_SECONDS, partial(node.lose, victim))
            self.simulation.call_after(DEATH_SECONDS, self.tell_peers)

    def tell_peers(self) -> None:
        alive = frozenset(name for name, node in self.nodes.items() if node.is_alive)
        for name, node in self.nodes.items():
            node.handle(pairing_events.PeersChanged((alive | self.capturers) - {name}))

    def send(self, source: bytes, destination: bytes, payload: bytes) -> None:
        """Send a message, or break the connection, of which both ends get notice."""
        if self.rng.random() >= self.scenario.loss:
            self.network.send(source, destination, payload)
            return
        for name, other in ((source, destination), (destination, source)):
            self.simulation.call_after(BREAK_SECONDS, partial(self.nodes[name].lose, other))

    def summary(self) -> PairingReport:
        report = self.report
        nodes = list(self.nodes.values())
        inner_seconds = sum(node.trainer.inner_seconds_before for node in nodes)
        node_seconds = sum(node.trainer.started_at - node.born_at for node in nodes)
        report.utilisation = inner_seconds / max(node_seconds, 1e-9)
        report.longest_wait = max(self.waits, default=0.0)
        report.mean_wait = statistics.fmean(self.waits) if self.waits else 0.0
        alive = [node.trainer for node in nodes if node.is_alive]
        period = statistics.fmean(trainer.period for trainer in alive)
        phases = (cmath.exp(2j * math.pi * trainer.steps_started_at / period) for trainer in alive)
        report.coherence = abs(sum(phases)) / len(alive)
        for beliefs in self.beliefs.values():  # of both sides of a session, once they are done with it
            living = [committed for name, committed in beliefs.items() if self.nodes[name].is_alive]
            report.disagreements += len(living) == 2 and living[0] is not living[1]
        report.disagreements += sum(len(fragments) > 1 for fragments in self.fragments.values())
        repeats, chances = sum(node.repeats for node in nodes), sum(max(node.meetings - 1, 0) for node in nodes)
        report.repeats = repeats / max(chances, 1)
        sent = sum(self.network.traffic[name].messages for name in self.nodes)
        report.messages_per_round = sent / max(report.rounds, 1)
        report.trace = self.simulation.trace
        return report


_PAIRING, _EXCHANGE = b"p", b"x"


class _Coalition:
    """Greedy members that act as one: they propose to every node all the time, and agree to every proposal.

    Proposals to a node alternate between two senders: the member whose turn at the node comes first, and a random one.
    A node that refuses both refuses the other members too, so these save their messages. A node that has a partner gets
    no proposals for a while, unless members are absent: these do not miss a node that gives them up.
    """

    def __init__(self, world: _World) -> None:
        self._world = world
        self._kind = world.scenario.capturing
        self._names: deque[bytes] = deque()
        self._num_names = self._num_proposed = 0
        self._turns: dict[bytes, list[tuple[float, bytes]]] = {}  # by node, when each member's turn comes
        self._ask_at: dict[bytes, float] = {}  # by node
        for _ in range(world.scenario.num_capturing):
            self._add_key()
        simulation, scenario = world.simulation, world.scenario
        simulation.call_every(min(PROPOSE_INTERVAL, (scenario.rounds.round_seconds or math.inf) / 16), self._propose)
        if scenario.key_seconds < math.inf:
            simulation.call_every(scenario.key_seconds / scenario.num_capturing, self._change_key)

    def _add_key(self) -> None:
        name = b"capturer" * 3 + self._num_names.to_bytes(8, "big")
        self._num_names += 1
        self._names.append(name)
        self._world.capturers.add(name)
        self._world.network.attach(name, partial(self._receive, name))

    def _change_key(self) -> bool:
        name = self._names.popleft()
        self._world.capturers.discard(name)
        self._world.network.kill(name)
        self._turns.clear()
        self._add_key()
        self._world.tell_peers()
        return True

    def _propose(self) -> bool:
        now = self._world.simulation.now
        for peer in self._world.nodes:
            self._num_proposed += 1
            if self._ask_at.get(peer, 0.0) > now:
                continue
            turns = self._turns_at(peer)
            is_any = self._num_proposed // len(self._world.nodes) % 2
            name = self._world.rng.choice(self._names) if is_any else min(turns)[1]
            session = self._num_proposed.to_bytes(8, "big") + name[-8:]
            self._say(name, peer, pairing_messages.Propose(session, self._world.scenario.claimed_seconds))
        return True

    def _turns_at(self, peer: bytes) -> list[tuple[float, bytes]]:
        if peer not in self._turns:
            self._turns[peer] = [(PeerOrder(peer).phase(name), name) for name in self._names]
        return self._turns[peer]

    def _receive(self, name: bytes, sender: bytes, payload: bytes) -> None:
        if payload[:1] == _EXCHANGE:
            verb, session = _Verb(payload[1]), payload[2:]
            if verb is _Verb.HELLO and self._kind in ("exchange", "stalled"):
                self._tell(name, sender, _Verb.OFFER, session)
            if self._kind != "exchange":
                return
            if verb is _Verb.HELLO:
                self._tell(name, sender, _Verb.ACCEPTED, session)
            elif verb in (_Verb.ACCEPTED, _Verb.RESOLVE):
                self._tell(name, sender, _Verb.COMMITTED, session)
            if verb in (_Verb.ACCEPTED, _Verb.COMMITTED):
                self._ask_at[sender] = 0.0
            return
        is_ready = self._kind != "absent"
        message = pairing_messages.decode_message(payload[1:])
        if isinstance(message, pairing_messages.Propose | pairing_messages.Agree | pairing_messages.Begin):
            # It has a partner: leave it alone until it gives that up, or has exchanged.
            self._ask_at[sender] = self._world.simulation.now + ABSENCE
        match message:
            case pairing_messages.Propose(session=session):
                self._say(name, sender, pairing_messages.Agree(session, self._world.scenario.claimed_seconds))
                if is_ready:
                    self._say(name, sender, pairing_messages.Ready(session))
            case pairing_messages.Agree() | pairing_messages.Begin():
                turns = self._turns_at(sender)
                self._turns[sender] = [(turn + (other == name), other) for turn, other in turns]
            case pairing_messages.Decline():
                self._ask_at[sender] = self._world.simulation.now + PARTNER_INTERVAL
            case pairing_messages.Withdraw():
                self._ask_at[sender] = 0.0
            case pairing_messages.Ready(session=session) if is_ready and session[8:] == name[-8:]:
                self._say(name, sender, pairing_messages.Begin(session))
                if self._kind in ("exchange", "stalled"):
                    self._tell(name, sender, _Verb.HELLO, session)

    def _say(self, name: bytes, peer: bytes, message: pairing_messages.Message) -> None:
        self._world.network.send(name, peer, _PAIRING + pairing_messages.encode_message(message))

    def _tell(self, name: bytes, peer: bytes, verb: _Verb, session: bytes) -> None:
        self._world.network.send(name, peer, _EXCHANGE + bytes((verb,)) + session)


class _Trainer:
    """A modelled trainer: its inner steps take time, and so does the outer step."""

    def __init__(self, simulation: Simulation, rounds: RoundConfig, step_seconds: float, node: _Node) -> None:
        self.started_at = simulation.now
        """When this round began."""
        self.steps_started_at = simulation.now
        """When its inner steps began, or those of the round before."""
        self.period = rounds.round_seconds or 1.0
        """Seconds between the last two such times."""
        self.inner_seconds = self.inner_seconds_before = 0.0
        """Seconds spent in inner steps: in all, and before the present round."""
        self.fragment = 0
        self.ready_at = 0.0
        """When the newest contribution was ready."""
        self._simulation = simulation
        self._rounds = rounds
        self._step_seconds = step_seconds
        self._node = node
        self._round = -1
        self._awaits_outcome = False
        """Whether the newest contribution's outcome is pending; the next one is made after its outer step."""
        self._steps_ended_at: float | None = None
        """When the inner steps ended, if their contribution has to wait for an outcome."""
        self._steps_end: SimulatedTimer | None = None

    def obey(self, command: messages.Command) -> None:
        """Carry out a command of the training loop."""
        match command:
            case messages.Train(round_index, takes_steps=takes_steps):
                self._start_round(round_index, takes_steps=takes_steps)
            case messages.FinishRound():
                steps = math.ceil((self._simulation.now - self.started_at) / self._step_seconds)
                self._end_steps_at(self.started_at + steps * self._step_seconds)
            case messages.UseFragment(_, fragment):
                self.fragment = fragment
            case messages.TakeOuterStep(round_index):

                def step() -> None:
                    self._awaits_outcome = False
                    self._node.handle(messages.OuterStepTaken(round_index))
                    if self._steps_ended_at is not None:
                        self._contribute()

                self._simulation.call_after(0.0 if self._rounds.overlap else OUTER_STEP_SECONDS, step)

    def _start_round(self, round_index: int, *, takes_steps: bool) -> None:
        now = self._simulation.now
        if takes_steps:
            if self._round >= 0:
                self.period = now - self.steps_started_at
            self.steps_started_at = now
        self._round, self.started_at = round_index, now
        self.inner_seconds_before = self.inner_seconds
        if not takes_steps:
            self._end_steps_at(now)
        elif self._rounds.inner_steps:
            self._end_steps_at(now + self._rounds.inner_steps * self._step_seconds)

    def _end_steps_at(self, at: float) -> None:
        if self._steps_end is not None:
            at = min(at, self._steps_end.at)
            self._steps_end.cancel()
        self._steps_end = self._simulation.call_at(at, self._contribute)

    def _contribute(self) -> None:
        self._steps_end = None
        now = self._simulation.now
        if self._awaits_outcome:
            self._steps_ended_at = now
            return
        ended_at = now if self._steps_ended_at is None else self._steps_ended_at
        self._steps_ended_at = None
        self.inner_seconds += ended_at - self.started_at
        self._awaits_outcome = True
        takes_steps = self._rounds.takes_steps(self._round)
        seconds = max(ended_at - self.started_at, self._step_seconds if takes_steps else 0.0)
        steps = max(1, round(seconds / self._step_seconds)) if takes_steps else 0
        self.ready_at = now
        self._node.handle(
            messages.Contributed(self._round, 0, steps, steps, steps, steps, steps, None, seconds, self.fragment)
        )


class _Node:
    """A training loop with a modelled trainer and modelled exchanges."""

    def __init__(self, world: _World, name: bytes, step_seconds: float) -> None:
        scenario = world.scenario
        self.world = world
        self.name = name
        config = LoopConfig(
            run_id=bytes(32),
            manifest=world.manifest,
            max_rounds=None,
            checkpoint_seconds=math.inf,
            validate_every=0,
            hung_seconds=math.inf,
        )
        pairing = Pairing(name, scenario.rounds, random.Random(world.rng.random()), scenario.num_fragments)
        self.loop = TrainingLoop(config, pairing, Supervisor(world.manifest.inner.batch_size))
        self.trainer = _Trainer(world.simulation, scenario.rounds, step_seconds, self)
        self.outcomes = Outcomes()
        self.exchanges: dict[bytes, _Exchange] = {}
        self.hellos: set[bytes] = set()
        """Sessions whose stream arrived before they were expected."""
        self.is_alive = True
        self.born_at = world.simulation.now
        self.meetings = self.repeats = 0
        self._last_partner = b""
        self._finished = -1
        """The newest round whose outcome is known."""
        self._timer: SimulatedTimer | None = None

    def start(self) -> None:
        """Begin to train, if the node is alive."""
        if self.is_alive:
            self.born_at = self.world.simulation.now
            self.handle(training_events.LoopBegan(TrainingState()))

    def handle(self, event: training_events.Event) -> None:
        if self.is_alive:
            for output in self.loop.handle(event, self.world.simulation.now):
                self.carry_out(output)

    def carry_out(self, output: training_events.Output) -> None:
        simulation = self.world.simulation
        match output:
            case training_events.StartTrainer():
                simulation.call_after(0.0, partial(self.handle, PREPARED))
            case pairing_events.StartExchange():
                fragment = self.trainer.fragment
                self.world.fragments.setdefault(output.session, set()).add(fragment)
                self.world.report.fragments[fragment] += 1
                self.exchanges[output.session] = _Exchange(self, output)
                self.exchanges[output.session].begin()
            case pairing_events.SendMessage(peer, payload):
                self.world.send(self.name, peer, _PAIRING + payload)
            case SetTimer(at):
                if self._timer is not None:
                    self._timer.cancel()
                fire = partial(self.handle, TimerFired())
                self._timer = simulation.call_at(at, fire) if at < math.inf else None
            case _ if isinstance(output, messages.Command):
                if isinstance(output, messages.TakeOuterStep):
                    self._note_outcome(output)
                self.trainer.obey(output)

    def _note_outcome(self, step: messages.TakeOuterStep) -> None:
        """Record the outcome of a round."""
        world = self.world
        world.report.steps_too_many += step.round <= self._finished
        self._finished = step.round
        world.waits.append(self.world.simulation.now - self.trainer.ready_at)
        world.report.rounds += 1
        world.report.rounds_at[step.round] += 1
        if step.partner:
            if self.name < step.partner:
                world.report.pairs[frozenset((self.name, step.partner))] += 1
            is_captured = step.partner not in world.nodes
            world.report.captured[step.round] += is_captured
            world.report.averaged[int(self.world.simulation.now // 60)] += not is_captured
            self.meetings += 1
            self.repeats += step.partner == self._last_partner
            self._last_partner = step.partner
        else:
            world.report.alone += 1

    def receive(self, sender: bytes, payload: bytes) -> None:
        if payload[:1] == _PAIRING:
            self.handle(pairing_events.MessageReceived(sender, payload[1:]))
            return
        verb, session = _Verb(payload[1]), payload[2:]
        if verb is _Verb.RESOLVE:
            self.say(sender, _Verb[self.outcomes.answer(session, sender).upper()], session)
        elif session in self.exchanges:
            self.exchanges[session].receive(verb)
        elif verb is _Verb.HELLO:
            self.hellos.add(session)

    def say(self, peer: bytes, verb: _Verb, session: bytes) -> None:
        self.world.send(self.name, peer, _EXCHANGE + bytes((verb,)) + session)

    def lose(self, peer: bytes) -> None:
        self.handle(pairing_events.PeerLost(peer))
        for exchange in list(self.exchanges.values()):
            if exchange.start.peer == peer and self.is_alive:
                exchange.break_off()


class _Verb(IntEnum):
    HELLO = 0  # the initiator opens its stream, and sends its offer
    OFFER = 1  # the responder's
    ACCEPTED = 2
    COMMITTED = 3  # the decision, or an answer
    ABORTED = 4
    UNDECIDED = 5
    RESOLVE = 6


class _Exchange:
    """One side of a session: the transfer is a delay, the commit is simulated in full."""

    def __init__(self, node: _Node, start: pairing_events.StartExchange) -> None:
        self.node = node
        self.start = start
        self.started_at = node.world.simulation.now
        self.is_over = False
        self.has_offer = False
        self.has_accepted = False

    def begin(self) -> None:
        node, start = self.node, self.start
        if start.offer_by < start.deadline:
            node.world.simulation.call_at(start.offer_by, partial(self.end_without, "has_offer"))
        if start.is_initiator:
            node.outcomes.begin(start.session, start.peer)
            node.say(start.peer, _Verb.HELLO, start.session)
            self.at(DECIDE_UNTIL, partial(self.end, False))
        else:
            self.at(DATA_UNTIL, partial(self.end_without, "has_accepted"))
            self.at(ASK_FROM, self.ask)
            self.at(1.0, partial(self.end, False))
            if start.session in node.hellos:
                node.hellos.discard(start.session)
                self.receive(_Verb.HELLO)

    def at(self, share: float, call: Callable[[], None]) -> None:
        now = self.node.world.simulation.now
        self.node.world.simulation.call_at(now + share * (self.start.deadline - now), call)

    def receive(self, verb: _Verb) -> None:
        match verb:
            case _Verb.HELLO if not self.start.is_initiator:
                self.has_offer = True
                self.node.say(self.start.peer, _Verb.OFFER, self.start.session)
                world = self.node.world
                world.simulation.call_after(world.rng.uniform(*world.scenario.transfer_seconds), self.accept)
            case _Verb.OFFER if self.start.is_initiator:
                self.has_offer = True
            case _Verb.ACCEPTED if self.start.is_initiator:
                if not self.is_over and self.node.outcomes.decide(self.start.session, committed=True):
                    self.node.say(self.start.peer, _Verb.COMMITTED, self.start.session)
                    self.end(True)
            case _Verb.COMMITTED | _Verb.ABORTED if self.has_accepted:
                self.end(verb is _Verb.COMMITTED)

    def accept(self) -> None:
        if not self.is_over and self.node.is_alive:
            self.has_accepted = True
            self.node.say(self.start.peer, _Verb.ACCEPTED, self.start.session)

    def end_without(self, condition: str) -> None:
        if not getattr(self, condition):
            self.end(False)

    def break_off(self) -> None:
        """Handle a broken stream: an initiator that has not decided aborts, a responder in doubt asks."""
        if self.has_accepted:
            self.ask()
        else:
            self.end(False)

    def ask(self) -> None:
        if self.has_accepted and not self.is_over and self.node.is_alive:
            self.node.say(self.start.peer, _Verb.RESOLVE, self.start.session)
            self.node.world.simulation.call_after(RESOLVE_INTERVAL, self.ask)

    def end(self, is_committed: bool) -> None:
        node, session = self.node, self.start.session
        if self.is_over or not node.is_alive:
            return
        self.is_over = True
        del node.exchanges[session]
        if self.start.is_initiator:
            node.outcomes.decide(session, committed=False)  # unless it is decided already
        node.world.beliefs.setdefault(session, {})[node.name] = is_committed
        seconds = node.world.simulation.now - self.started_at
        end = partial(pairing_events.ExchangeEnded, session, self.start.peer, is_committed, not is_committed)
        node.handle(end(round=self.start.round, seconds=seconds))
