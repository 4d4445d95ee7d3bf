"""Walks through the training loop: every order of reports, partners, exchanges, rests, crashes and leaving."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farandole.protocol.rounds import pairing_messages as pairing
from farandole.protocol.rounds import training_events as machine
from farandole.protocol.rounds.pairing import Pairing
from farandole.protocol.rounds.pairing_events import (
    ExchangeEnded,
    MessageReceived,
    PeerLost,
    PeersChanged,
    SendMessage,
    StartExchange,
)
from farandole.protocol.rounds.trainer_rounds import LoopConfig
from farandole.protocol.rounds.training_loop import EXCHANGE_GRACE, GIVE_UP_GRACE, REST_TIMEOUT, TrainingLoop
from farandole.protocol.run.manifest import Manifest, ModelConfig, StartConfig
from farandole.protocol.run.rules import NoLoCoConfig, RoundConfig
from farandole.protocol.state.node_state import TrainingState
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.supervisor import Supervisor
from farandole.protocol.wire.timers import SetTimer, TimerFired

MODEL = ModelConfig(num_layers=1, width=16, num_heads=2, hidden=32, context=16, vocabulary=256)
SAVED = messages.Saved(0, 0, 0)
HAS_TRAINER = {machine.LoopState.TRAINING, machine.LoopState.LEAVING, machine.LoopState.ENDING}
PEERS = [bytes([number]) * 32 for number in range(1, 4)]
# Rounding error of sums of times.
ROUNDING = 1e-6


def contribution(round_index: int, fragment: int = 0) -> messages.Contributed:
    return messages.Contributed(round_index, 64, 8, 8, 1, 1, 8, 2.0, 1.0, fragment, 1.0)


def make_loop(rounds: RoundConfig, max_rounds: int | None = None, num_fragments: int = 1) -> TrainingLoop:
    manifest = Manifest("tiny", MODEL, rounds=rounds, outer=NoLoCoConfig(fragments=num_fragments))
    config = LoopConfig(b"r" * 32, manifest, max_rounds, 30.0, 3, 60.0)
    return TrainingLoop(config, Pairing(b"a" * 32, rounds, random.Random(1), num_fragments), Supervisor(16))


@dataclass
class Trainer:
    """A trainer process as the loop sees it; refuses commands that a real one could not obey."""

    overlaps: bool
    partners: int
    phase: Literal["starting", "ready", "ending"] = "starting"
    training: int | None = None
    """Round whose inner steps run."""
    contributed: int = -1
    contributed_at: float = 0.0
    commanded: set[int] = field(default_factory=set)
    """Rounds whose outer step was ordered."""
    pending: list[int] = field(default_factory=list)
    """The ones of them that are not reported."""
    fragment: int = 0
    num_saving: int = 0
    is_last_save_asked: bool = False
    is_killed: bool = False
    num_pings: int = 0

    @property
    def awaits_outcome(self) -> bool:
        """Return whether the newest contribution has no outer step yet."""
        return self.contributed >= 0 and self.contributed not in self.commanded

    def obey(self, command: messages.Command) -> None:
        assert self.phase == "ready"
        if isinstance(command, messages.Ping):
            self.num_pings += 1
            return
        assert not self.is_last_save_asked, "the last save is the last command"
        match command:
            case messages.Train(round_index, takes_steps=takes_steps):
                assert self.training is None
                assert takes_steps == (round_index % self.partners == 0)
                assert self.contributed < 0 or round_index == self.contributed + 1
                assert self.overlaps or (not self.pending and not self.awaits_outcome)
                self.training = round_index
            case messages.UseFragment(_, fragment):
                self.fragment = fragment
            case messages.TakeOuterStep(round_index):
                assert round_index == self.contributed
                assert round_index not in self.commanded, "one outer step a round"
                self.commanded.add(round_index)
                self.pending.append(round_index)
            case messages.Save(is_last):
                self.num_saving += 1
                self.is_last_save_asked = is_last
                assert self.num_saving == 1 or is_last, "one save at a time, but for the last"
            case messages.FinishRound() | messages.Validate():
                pass
            case _:
                pytest.fail(f"nobody asked for {command}")


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class Walk(RuleBasedStateMachine):
    """A node in a run with three peers, of which some answer; any event may happen at any time."""

    @initialize(
        overlap=st.booleans(),
        is_boxed=st.booleans(),
        max_rounds=st.sampled_from([None, None, 1, 3]),
        num_fragments=st.sampled_from([1, 3]),
        partners=st.sampled_from([1, 3]),
        rest=st.sampled_from(["", "", "quiet hours"]),
    )
    def begin(
        self, overlap: bool, is_boxed: bool, max_rounds: int | None, num_fragments: int, partners: int, rest: str
    ) -> None:
        partners = 1 if overlap or num_fragments > 1 else partners
        self.rounds = RoundConfig(0 if is_boxed else 5, 30.0 if is_boxed else 0.0, 20.0, overlap, partners)
        self.loop = make_loop(self.rounds, max_rounds, num_fragments)
        self.now, self.timer_at = 0.0, math.inf
        self.trainer: Trainer | None = None
        self.exchange: StartExchange | None = None
        self.ended: list[ExchangeEnded] = []
        """Exchanges of the newest contribution."""
        self.sessions: dict[bytes, bytes] = {}
        """Peer -> the session that it proposed or was asked for."""
        self.theirs: set[bytes] = set()
        """Sessions that a peer proposed."""
        self.begins: set[bytes] = set()
        """Peers that proposed, and know that this node is ready."""
        self.rest, self.rest_since = rest, 0.0
        self.left_at: float | None = None
        self.published = TrainingState()
        self.num_over = 0
        self.handle(machine.LoopBegan(TrainingState(), rest))

    @rule(num_deeds=st.integers(1, 12), end=st.sampled_from(["committed", "committed", "refused", "broken"]))
    def go_on(self, num_deeds: int, end: str) -> None:
        """Do the usual next step ``num_deeds`` times, so that walks get far."""
        for _ in range(num_deeds):
            trainer = self.trainer
            if trainer is None:
                if self.rest:
                    self.rest_or_not("")
                else:
                    self.wait(1.0)
            elif trainer.phase == "starting":
                self.load(0, is_resumed=True)
            elif trainer.phase == "ending":
                self.end()
            elif trainer.is_killed:
                self.die("fault")
            elif trainer.pending:
                self.take_outer_step()
            elif trainer.num_saving:
                self.save("")
            elif self.exchange is not None:
                self.end_exchange(end)
            elif trainer.awaits_outcome:
                if self.begins:
                    self.begin_with(min(self.begins))
                for peer in sorted(self.sessions):
                    self.hear(peer, *self.answers(peer)["ready"])
                self.wait(1.0)
            elif trainer.training is not None:
                if self.loop.state is machine.LoopState.TRAINING and not self.sessions:
                    self.know_peers(set(PEERS))
                self.contribute()
            else:
                self.wait(0.1)

    # Effects of the outputs

    def handle(self, *events: machine.Event) -> None:
        for event in events:
            for output in self.loop.handle(event, self.now):
                self.carry_out(output)

    def carry_out(self, output: machine.Output) -> None:
        trainer = self.trainer
        match output:
            case machine.StartTrainer():
                assert trainer is None, "one trainer at a time"
                assert not self.rest
                self.trainer = Trainer(self.rounds.overlap, self.rounds.partners)
            case machine.EndTrainer():
                assert trainer is not None
                trainer.phase, self.exchange = "ending", None
            case machine.KillTrainer():
                assert trainer is not None
                assert trainer.phase == "ready"
                trainer.is_killed = True
            case StartExchange():
                assert self.exchange is None, "never two exchanges at once"
                assert trainer is not None
                assert output.round == trainer.contributed
                assert trainer.awaits_outcome
                self.exchange = output
            case machine.GiveUpExchange():
                assert self.exchange is not None
            case machine.RoundEnd(contributed, exchanges, alone):
                assert trainer is not None
                assert contributed.round == trainer.contributed
                assert list(exchanges) == self.ended
                assert alone or exchanges[-1].committed
                assert not any(exchange.committed for exchange in (exchanges if alone else exchanges[:-1]))
            case SetTimer(at):
                self.timer_at = at
            case SendMessage(peer, payload):
                self.deliver(peer, pairing.decode_message(payload))
            case TrainingState():
                self.published = output
            case machine.LoopOver():
                self.num_over += 1
            case _ if isinstance(output, messages.Command):
                assert trainer is not None
                trainer.obey(output)
            case machine.Enter() | _:
                pass

    def deliver(self, peer: bytes, message: pairing.Message) -> None:
        match message:
            case pairing.Propose(session):
                self.sessions[peer] = session
                self.begins.discard(peer)
            case pairing.Ready(session) if self.sessions.get(peer) == session and session in self.theirs:
                self.begins.add(peer)
            case _:
                pass

    # Time

    @rule(seconds=st.sampled_from([0.1, 1.0, REST_TIMEOUT, 11.0, 40.0, 150.0]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (at := min(self.timer_at, self.exchange.deadline if self.exchange else math.inf)) <= until:
            self.now = max(self.now, at)
            if self.exchange is not None and self.exchange.deadline <= self.now:
                self.end_exchange("broken")
            if self.timer_at <= self.now:
                self.timer_at = math.inf
                self.handle(TimerFired())
            if self.trainer and self.trainer.num_pings and not self.trainer.is_killed and self.is_awake:
                self.answer_pings()
        self.now = until

    is_awake = True

    @rule(is_awake=st.booleans())
    def freeze(self, is_awake: bool) -> None:
        self.is_awake = is_awake

    def answer_pings(self) -> None:
        assert self.trainer is not None
        self.trainer.num_pings = 0
        if self.trainer.phase == "ready":
            self.handle(messages.Pong())

    # The trainer

    def is_ready(self) -> bool:
        return self.trainer is not None and self.trainer.phase == "ready" and not self.trainer.is_killed

    @precondition(lambda self: self.trainer is not None and self.trainer.phase == "starting")
    @rule(round_index=st.integers(0, 2), is_resumed=st.booleans())
    def load(self, round_index: int, is_resumed: bool) -> None:
        assert self.trainer is not None
        self.trainer.phase = "ready"
        resumed = SAVED if is_resumed else None
        prepared = messages.Prepared("cpu", 1, 64, b"l" * 32, round_index, 0, 0, resumed=resumed)
        self.handle(prepared)

    @precondition(lambda self: self.trainer is not None)
    @rule(cause=st.sampled_from(["weights", "memory", "fault", "detached"]))
    def die(self, cause: messages.Cause) -> None:
        self.trainer = self.exchange = None
        self.handle(machine.TrainerEnded("killed", cause))

    @precondition(lambda self: self.trainer is not None and self.trainer.phase == "ending")
    @rule()
    def end(self) -> None:
        self.trainer = self.exchange = None
        self.handle(machine.TrainerEnded())

    @precondition(lambda self: self.is_ready() and self.trainer.training is not None)
    @rule(steps=st.integers(0, 5))
    def progress(self, steps: int) -> None:
        assert self.trainer is not None
        round_index = self.trainer.training
        assert round_index is not None
        self.handle(messages.Progress(round_index, steps, steps, 8 * steps, 3.0, 8.0))

    @precondition(
        lambda self: (
            self.is_ready()
            and self.trainer.training is not None
            and not self.trainer.pending
            and not self.trainer.awaits_outcome
        )
    )
    @rule()
    def contribute(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        assert trainer.training is not None
        trainer.contributed, trainer.training = trainer.training, None
        trainer.contributed_at, self.ended = self.now, []
        self.handle(contribution(trainer.contributed, trainer.fragment))

    @precondition(lambda self: self.is_ready() and self.trainer.pending)
    @rule()
    def take_outer_step(self) -> None:
        assert self.trainer is not None
        self.handle(messages.OuterStepTaken(self.trainer.pending.pop()))

    @precondition(lambda self: self.is_ready() and self.trainer.num_saving)
    @rule(problem=st.sampled_from(["", "the disk is full"]))
    def save(self, problem: str) -> None:
        assert self.trainer is not None
        self.trainer.num_saving -= 1
        self.handle(messages.Saved(0, 0, 0, problem=problem))

    # Peers

    @rule(peers=st.sets(st.sampled_from(PEERS)))
    def know_peers(self, peers: set[bytes]) -> None:
        self.handle(PeersChanged(frozenset(peers)))

    @rule(peer=st.sampled_from(PEERS))
    def lose_peer(self, peer: bytes) -> None:
        self.handle(PeerLost(peer))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), kind=st.sampled_from(["accept", "ready", "refuse", "busy", "withdraw"]))
    def answer(self, data: st.DataObject, kind: str) -> None:
        peer = data.draw(st.sampled_from(sorted(self.sessions)))
        self.hear(peer, *self.answers(peer)[kind])

    def answers(self, peer: bytes) -> dict[str, list[pairing.Message]]:
        session = self.sessions[peer]
        return {
            "accept": [pairing.Agree(session, 3.0)],
            "ready": [pairing.Agree(session, 0.0), pairing.Ready(session)],
            "refuse": [pairing.Decline(session, "matched")],
            "busy": [pairing.Busy(session, 1.0)],
            "withdraw": [pairing.Withdraw(session)],
        }

    @rule(peer=st.sampled_from(PEERS), number=st.integers(0, 2**64 - 1))
    def propose(self, peer: bytes, number: int) -> None:
        session = peer[:7] + number.to_bytes(8, "big") + bytes((number % 3,))  # differs between peers
        self.sessions[peer] = session
        self.theirs.add(session)
        self.begins.discard(peer)
        self.hear(peer, pairing.Propose(session, 0.0))

    @precondition(lambda self: self.begins)
    @rule(data=st.data())
    def begin_exchange(self, data: st.DataObject) -> None:
        self.begin_with(data.draw(st.sampled_from(sorted(self.begins))))

    def begin_with(self, peer: bytes) -> None:
        self.begins.discard(peer)
        self.hear(peer, pairing.Begin(self.sessions[peer]))

    def hear(self, peer: bytes, *answers: pairing.Message) -> None:
        self.now += 0.1  # so that no honest peer counts as flooding
        for answer in answers:
            self.handle(MessageReceived(peer, pairing.encode_message(answer)))

    @precondition(lambda self: self.exchange is not None)
    @rule(end=st.sampled_from(["committed", "refused", "broken"]))
    def end_exchange(self, end: str) -> None:
        start, self.exchange = self.exchange, None
        assert start is not None
        is_committed, is_broken = end == "committed", end == "broken"
        over = ExchangeEnded(start.session, start.peer, is_committed, is_broken, round=start.round, partner_size=64)
        if self.trainer is not None and self.trainer.phase == "ready":
            self.ended.append(over)
            self.handle(over)

    # The owner, and the run

    @rule(words=st.sampled_from(["", "quiet hours", "paused by hand"]))
    def rest_or_not(self, words: str) -> None:
        if words and not self.rest:
            self.rest_since = self.now
        self.rest = words
        self.handle(machine.RestChanged(words))

    @precondition(lambda self: self.left_at is None)
    @rule(chance=st.integers(0, 7))
    def leave(self, chance: int = 0) -> None:
        if chance == 0:
            self.left_at = self.now
            self.handle(machine.Signal.LEAVE)

    @rule(
        event=st.sampled_from(
            [machine.Signal.SAVE, machine.Signal.RESTART, machine.OthersMoved(2), machine.OthersMoved(90)]
        )
    )
    def hear_of_the_run(self, event: machine.Event) -> None:
        self.handle(event)

    @rule(chance=st.integers(0, 7), event=st.sampled_from((machine.Signal.DATA_OVER, machine.Signal.RUN_STOPPED)))
    def end_rounds(self, chance: int, event: machine.Signal) -> None:
        if chance == 0:
            self.handle(event)

    # Invariants

    @invariant()
    def the_state_is_that_of_the_trainer(self) -> None:
        if not hasattr(self, "loop"):
            return
        state, trainer = self.loop.state, self.trainer
        if state in HAS_TRAINER:
            assert trainer is not None
            assert trainer.phase == "ready"
        if state is machine.LoopState.ENDING:
            assert trainer is not None
            assert trainer.is_last_save_asked
        if trainer is not None and state is not machine.LoopState.OVER:
            assert state in HAS_TRAINER | {machine.LoopState.PREPARING, machine.LoopState.STOPPING}
        if state is machine.LoopState.RESTING:
            assert self.rest
        assert self.num_over == (state is machine.LoopState.OVER)
        assert self.published == self.loop.training

    @invariant()
    def every_round_ends_in_time(self) -> None:
        if not hasattr(self, "loop"):
            return
        trainer = self.trainer
        if trainer is not None and self.loop.state is machine.LoopState.TRAINING and trainer.awaits_outcome:
            assert self.now <= trainer.contributed_at + self.rounds.exchange_seconds + ROUNDING
        if self.loop.state is machine.LoopState.LEAVING:
            assert self.left_at is not None
            assert self.now <= self.left_at + EXCHANGE_GRACE + GIVE_UP_GRACE + ROUNDING
        if self.rest and self.loop.state in HAS_TRAINER:
            assert self.now <= self.rest_since + REST_TIMEOUT + ROUNDING

    def teardown(self) -> None:
        """A node that is asked to leave, and whose trainer obeys, ends after its last save."""
        if not hasattr(self, "loop"):
            return
        if self.left_at is None:
            self.leave()
        if self.loop.state is machine.LoopState.LEAVING:
            self.wait(EXCHANGE_GRACE + GIVE_UP_GRACE)
        while self.is_ready() and self.loop.state is machine.LoopState.ENDING:
            self.save("")
        if self.trainer is not None:
            self.die("fault") if self.trainer.phase == "ready" else self.end()
        assert self.loop.state is machine.LoopState.OVER
        assert self.num_over == 1


TestWalk = Walk.TestCase


def test_a_loop_that_has_gone_is_waited_for_however_often_and_no_loss_asked_of_one_that_knows_none() -> None:
    loop = make_loop(RoundConfig(5, 0.0, 20.0))
    loop.handle(machine.LoopBegan(TrainingState()), 0.0)
    for _ in range(100):
        loop.handle(messages.Prepared("cpu", 1, 64, b"l" * 32, 0, 0, 0, has_loss=False), 1.0)
        outputs = loop.handle(machine.TrainerEnded("the loop is gone", "detached"), 2.0)
        assert machine.StartTrainer() in outputs
        assert not loop.training.is_trainer_dead
    loop = make_loop(RoundConfig(5, 0.0, 20.0))
    loop.config = dataclasses.replace(loop.config, validate_every=1)
    loop.handle(machine.LoopBegan(TrainingState()), 0.0)
    asked = {}
    for has_loss in (True, False):
        loop.handle(messages.Prepared("cpu", 1, 64, b"l" * 32, 0, 0, 0, has_loss=has_loss), 1.0)
        loop.handle(messages.Contributed(0, 64, 1, 1, 1, 1, 1, None, 1.0, 0), 2.0)
        outputs = loop.handle(messages.OuterStepTaken(0), 3.0)
        asked[has_loss] = any(messages.Validate(8) == output for output in outputs)
        loop.handle(machine.TrainerEnded("the loop is gone", "detached"), 4.0)
    assert asked == {True: True, False: False}


@pytest.mark.parametrize("resumed", [None, SAVED])
def test_the_weights_that_a_run_starts_from_are_validated(resumed: messages.Saved | None) -> None:
    loop = make_loop(RoundConfig(5, 0.0, 20.0))
    run = msgspec.structs.replace(loop.config.manifest, start=StartConfig("ab" * 32, "cd" * 32))
    loop.config = dataclasses.replace(loop.config, manifest=run)
    loop.handle(machine.LoopBegan(TrainingState()), 0.0)
    begun = loop.handle(messages.Prepared("cpu", 1, 64, b"l" * 32, 0, 0, 0, resumed=resumed), 1.0)
    assert (messages.Validate(8) in begun) == (resumed is None)
