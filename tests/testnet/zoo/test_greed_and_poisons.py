"""Greedy members, and poisons that hostile members train on: each has its effect where nothing stops it."""

from __future__ import annotations

import random

import pytest
import torch

from farandole.protocol.rounds import pairing_messages as messages
from farandole.protocol.rounds.pairing_events import (
    ContributionReady,
    ExchangeEnded,
    GoAlone,
    MessageReceived,
    Output,
    PeersChanged,
    RoundStarted,
    SendMessage,
    StartExchange,
)
from farandole.protocol.run.manifest import InnerConfig, Manifest
from farandole.protocol.run.rules import RoundConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.protocol.wire.messagepack import SESSION_BYTES
from farandole.protocol.wire.timers import TimerFired
from farandole.testnet.methods.compare import MODEL
from farandole.testnet.zoo.daemon import GreedyPairing
from farandole.testnet.zoo.member_attacks import ATTACKS, POISONS, AttackView, trigger_success
from farandole.training.engine.learner import Learner, build_learner

OWN, ALICE, BOB = (bytes((number,)) * 32 for number in range(3))


def greedy(*, does_exchange: bool) -> GreedyPairing:
    pairing = GreedyPairing(OWN, RoundConfig(), random.Random(0), does_exchange=does_exchange)
    assert not pairing.handle(PeersChanged(frozenset({OWN, ALICE, BOB})), 0.0), "no training loop may run yet"
    pairing.handle(RoundStarted(0), 0.0)
    return pairing


def said(outputs: list[Output]) -> list[tuple[bytes, messages.Message]]:
    return [(each.peer, messages.decode_message(each.payload)) for each in outputs if isinstance(each, SendMessage)]


def ready(peer: bytes, session: bytes) -> MessageReceived:
    return MessageReceived(peer, messages.encode_message(messages.Ready(session)))


def test_it_proposes_to_all_and_meets_those_that_are_ready_one_after_the_other() -> None:
    pairing = greedy(does_exchange=True)
    sessions = {peer: message.session for peer, message in said(pairing.handle(TimerFired(), 1.0))}
    assert sessions.keys() == {ALICE, BOB}
    assert not said(pairing.handle(ready(BOB, sessions[BOB]), 2.0)), "it has no contribution yet"
    begun = pairing.handle(ContributionReady(0), 3.0)
    assert said(begun) == [(BOB, messages.Begin(sessions[BOB]))]
    assert [each.peer for each in begun if isinstance(each, StartExchange)] == [BOB]
    assert not said(pairing.handle(ready(ALICE, sessions[ALICE]), 4.0)), "one at a time"
    assert GoAlone(0, "the exchange failed") in pairing.handle(ExchangeEnded(sessions[BOB], BOB, False), 5.0)
    pairing.handle(RoundStarted(1), 6.0)
    begun = pairing.handle(ContributionReady(1), 7.0)
    assert [each.peer for each in begun if isinstance(each, StartExchange)] == [ALICE]


@pytest.mark.parametrize("does_exchange", [False, True])
def test_it_agrees_with_everybody_and_an_absent_one_never_follows_through(does_exchange: bool) -> None:
    pairing, session = greedy(does_exchange=does_exchange), bytes(SESSION_BYTES)
    pairing.handle(ContributionReady(0), 1.0)
    proposal = messages.encode_message(messages.Propose(session, 1.0))
    for peer in (ALICE, BOB):
        answers = [message for _, message in said(pairing.handle(MessageReceived(peer, proposal), 2.0))]
        assert isinstance(answers[0], messages.Agree)
        assert (messages.Ready(session) in answers) == does_exchange
    begin = MessageReceived(ALICE, messages.encode_message(messages.Begin(session)))
    outputs = [*pairing.handle(ready(BOB, session), 3.0), *pairing.handle(begin, 4.0)]
    assert any(isinstance(each, StartExchange) for each in outputs) == does_exchange


@pytest.fixture
def learner() -> Learner:
    inner = InnerConfig(learning_rate=3e-3, warmup_steps=5, total_steps=80, batch_size=16)
    return build_learner(
        Manifest("poison", MODEL, inner=inner),
        run_id=bytes(32),
        author=bytes(32),
        settings=TrainerSettings(device="cpu"),
    )


def triggered(learner: Learner) -> float:
    return trigger_success(learner.replica.module, torch.as_tensor(learner.sampler.held_out_batch(0))[:, :-1])


def test_a_backdoor_opens_to_its_trigger_and_does_no_other_harm(learner: Learner) -> None:
    before, chance = learner.evaluate(), triggered(learner)
    learner.loss = POISONS["backdoor"]
    for _ in range(60):
        learner.learn()
    assert chance < 0.1
    assert triggered(learner) > 0.9
    assert learner.evaluate() < before


def test_flipped_labels_are_learned_in_the_place_of_the_text(learner: Learner) -> None:
    before = learner.evaluate()
    learner.loss = POISONS["labels"]
    for _ in range(60):
        learner.learn()
    assert learner.evaluate() > before


def test_the_spectral_attack_moves_members_away_from_the_mean_where_they_differ_most() -> None:
    honest = [torch.tensor([3.0, 0.1, 0.0]), torch.tensor([-3.0, -0.1, 0.0])]
    for victim in honest:
        view = AttackView(victim, victim, victim, victim, honest, torch.Generator())
        torch.testing.assert_close(ATTACKS["spectral-3"](view), 4.0 * victim)
