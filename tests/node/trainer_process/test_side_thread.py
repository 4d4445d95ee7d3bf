"""Rounds that end in a side thread: averaging is done in the host's memory, and inner steps go on meanwhile."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.node.store.run_file import manifest_of
from farandole.node.trainer_process.process import StepPace
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages
from farandole.training.engine.learner import Learner, build_learner
from farandole.training.engine.replica import Replica
from farandole.training.model.stages import build_module
from farandole.training.outer import round_end
from farandole.training.outer.outer_state import OuterState
from farandole.training.screening.rule import Accept, Encounter, Partner, Verdict

from ...patience import PATIENCE
from ...training.conftest import Asking
from .conftest import Start, Trainer

ALICE, BOB = b"a" * 32, b"b" * 32
STEPS = 2
"""Inner steps before a contribution."""
MORE_STEPS = 6
"""Inner steps of the round after it."""


def manifest_with(**outer: object) -> Manifest:
    return manifest_of({"name": "tiny", "model": "tiny", "inner": {"batch_size": 2}, "outer": outer}, Path(), 0.0)


def learner_of(manifest: Manifest, author: bytes, *, is_lean: bool = False) -> Learner:
    """Return a learner as with a GPU, whose inner steps move other weights than its flat vector."""
    like = build_learner(manifest, run_id=b"r" * 32, author=author, settings=messages.TrainerSettings(device="cpu"))
    return Learner(
        build_module(manifest.model, manifest.seed),
        manifest,
        like.sampler,
        run_id=like.checkpoint.run_id,
        device=like.device,
        author=author,
        settings=messages.TrainerSettings(lean=is_lean),
        averages_on_host=True,
    )


@dataclass
class Meeting:
    """Alice's first exchange, with Bob's contribution, after `STEPS` inner steps."""

    trainer: Trainer
    manifest: Manifest
    contribution: bytearray
    tokens: int

    @property
    def alice(self) -> Learner:
        return self.trainer.learner

    def screen(self) -> None:
        """Send what the mesh process does once all of Bob's contribution is there."""
        self.trainer.send(messages.Screen(len(self.contribution), 1, BOB, self.tokens))
        self.trainer.send(messages.TakeOuterStep(0, BOB, len(self.contribution), self.tokens))

    def end_round(self) -> None:
        """Have the trainer judge the contribution and take the outer step, before the next round begins."""
        self.screen()
        for _ in range(2):
            self.trainer.obey()

    def late(self) -> int:
        """Return how late the outer step was."""
        return self.trainer.report(messages.OuterStepTaken).late_steps


def meet(start: Start, *, is_lean: bool = False, **outer: object) -> Meeting:
    """Train Alice until her contribution awaits Bob's, which has arrived."""
    manifest = manifest_with(**outer)
    trainer = start(manifest, learner_of(manifest, ALICE, is_lean=is_lean))
    bob = learner_of(manifest, BOB)
    for _ in range(STEPS):
        bob.learn()
    contribution = bytearray(bob.round_end.contribution_bytes)
    size, _ = bob.round_end.contribute(contribution)
    del contribution[size:]
    trainer.arrive(1, contribution)
    trainer.handle(messages.Train(0, STEPS))
    return Meeting(trainer, manifest, contribution, bob.totals.tokens)


def in_turn(met: Meeting, late: int, *, is_lean: bool = False) -> Learner:
    """Return Alice after the same steps with everything in one thread, the outer step ``late`` inner steps late."""
    alice = learner_of(met.manifest, ALICE, is_lean=is_lean)
    for _ in range(STEPS):
        alice.learn()
    alice.round_end.contribute(bytearray(alice.round_end.contribution_bytes))
    for _ in range(late):
        alice.learn()
    encounter = Encounter(BOB, alice.round_end.tokens_claimed, met.tokens)
    alice.round_end.screen(met.contribution, encounter)
    assert alice.round_end.apply(met.contribution, encounter, own_first=True) == late
    for _ in range(MORE_STEPS - late):
        alice.learn()
    return alice


class SlowStep:
    """Makes outer steps wait until the learner has taken ``steps`` inner steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, learner: Learner, steps: int) -> None:
        self.has_begun = threading.Event()
        changed, step, inner_step = threading.Condition(), OuterState.step, Replica.inner_step

        def take(state: OuterState, *arguments: Any, **named: Any) -> None:
            self.has_begun.set()
            with changed:
                assert changed.wait_for(lambda: learner.totals.steps >= steps, PATIENCE)
            step(state, *arguments, **named)

        def count(replica: Replica, num_tokens: int, divisor: int = 1) -> None:
            inner_step(replica, num_tokens, divisor)
            with changed:
                changed.notify_all()

        monkeypatch.setattr(OuterState, "step", take)
        monkeypatch.setattr(Replica, "inner_step", count)


@pytest.mark.parametrize(
    ("outer", "is_lean"),
    [({"codec": "fp32"}, False), ({"codec": "int8"}, False), ({}, True)],
)
def test_inner_steps_go_on_while_the_outer_step_is_computed(
    start: Start, monkeypatch: pytest.MonkeyPatch, outer: dict[str, object], is_lean: bool
) -> None:
    met = meet(start, is_lean=is_lean, **outer)
    alice = met.alice
    with monkeypatch.context() as patch:
        SlowStep(patch, alice, STEPS + 2)
        met.screen()
        met.trainer.handle(messages.Train(1, MORE_STEPS))
    late = met.late()
    assert 2 <= late <= MORE_STEPS
    expected = in_turn(met, late, is_lean=is_lean)
    assert torch.equal(alice.round_end.outer.slow, expected.round_end.outer.slow)
    if is_lean:  # which random bits round the weights depends on when their loss was measured
        torch.testing.assert_close(
            alice.round_end.fast_weights(), expected.round_end.fast_weights(), rtol=2**-5, atol=1e-2
        )
    else:
        assert torch.equal(alice.round_end.fast_weights(), expected.round_end.fast_weights())


def test_what_the_side_thread_needs_is_done_in_the_pause_after_an_inner_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judgement needs the other thread several times: it must not take as many inner steps, with their pauses."""
    met = meet(start)
    end_step, lates = StepPace.end_step, list[int]()

    def pause(pace: StepPace) -> float:
        end_step(pace)
        return time.monotonic() + 2 * PATIENCE

    def finish() -> None:
        lates.append(met.late())
        met.trainer.send(messages.FinishRound(1))

    monkeypatch.setattr(StepPace, "end_step", pause)
    met.screen()
    finishing = threading.Thread(target=finish)
    finishing.start()
    met.trainer.handle(messages.Train(1, MORE_STEPS))
    finishing.join()
    assert lates == [1]


@pytest.mark.parametrize("fragments", [1, 2])
def test_all_losses_of_a_judgement_are_of_the_same_weights(
    start: Start, monkeypatch: pytest.MonkeyPatch, fragments: int
) -> None:
    """With fragments, what is not exchanged in this round changes with each inner step."""
    stepped, losses = threading.Condition(), list[float | None]()
    inner_step = Replica.inner_step

    def count(replica: Replica, num_tokens: int, divisor: int = 1) -> None:
        inner_step(replica, num_tokens, divisor)
        with stepped:
            stepped.notify_all()

    def ask_twice(partner: Partner) -> Verdict:
        losses.append(partner.evaluate(0.0))
        with stepped:
            stepped.wait(0.2)  # where the judgement is between two inner steps, there is none
        losses.append(partner.evaluate(0.0))
        return Accept()

    monkeypatch.setattr(round_end, "rule_of", lambda settings: Asking(ask_twice))
    monkeypatch.setattr(Replica, "inner_step", count)
    met = meet(start, fragments=fragments)
    met.screen()
    met.trainer.handle(messages.Train(1, MORE_STEPS))
    first, again = losses
    assert first is not None
    assert first == again


def test_a_checkpoint_waits_for_the_outer_step(start: Start) -> None:
    """Halfway through the step, some of the slow weights would be new."""
    met = meet(start)
    alice, before = met.alice, met.alice.round_end.outer.slow.clone()
    met.end_round()
    met.trainer.handle(messages.Save())
    saved = met.trainer.report(messages.Saved)
    assert saved.round == 1
    again = learner_of(manifest_with(), ALICE)
    again.checkpoint.load(Path(saved.path))
    assert torch.equal(again.round_end.outer.slow, alice.round_end.outer.slow)
    assert not torch.equal(again.round_end.outer.slow, before)


def test_a_trainer_ends_while_the_side_thread_waits_for_it(start: Start) -> None:
    met = meet(start)
    met.end_round()
    met.trainer.process.close()
    with pytest.raises(CancelledError):
        met.trainer.handle(messages.Save())
    assert met.alice.totals.round == 0
