"""Poisons that hostile members train on: each has its effect where nothing stops it."""

from __future__ import annotations

import pytest
import torch

from farandole.protocol.run.manifest import InnerConfig, Manifest
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.testnet.methods.compare import MODEL
from farandole.testnet.zoo.member_attacks import ATTACKS, POISONS, AttackView, trigger_success
from farandole.training.engine.learner import Learner, build_learner


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
