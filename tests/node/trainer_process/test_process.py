"""The trainer in this process, with a device whose copies are late; and rounds that end in a side thread."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from farandole.node.base.system.tuning import KEEP_PRIORITY_VARIABLE, SAVING_NICENESS
from farandole.node.store.run_file import manifest_of
from farandole.node.trainer_process.process import StepPace
from farandole.protocol.run.manifest import DataConfig, Manifest
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.trainer_messages import FinishRound, Save, Screen, TakeOuterStep, Train
from farandole.training.engine import snapshot
from farandole.training.engine.learner import HeldOutLoss, Learner, build_learner
from farandole.training.engine.replica import Replica
from farandole.training.model.stages import build_module
from farandole.training.outer import round_end
from farandole.training.outer.contribution import Wait
from farandole.training.outer.outer_state import OuterState
from farandole.training.screening.rule import Accept, Encounter, Partner, Verdict

from ...patience import PATIENCE
from ...training.conftest import Asking, LateCopier
from .conftest import Start, Trainer

MANIFEST = manifest_of({"name": "tiny", "model": "tiny", "inner": {"batch_size": 2}}, Path(), 0.0)
ALICE, BOB = b"a" * 32, b"b" * 32


def after_three_steps(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once a replica has taken three inner steps."""
    event, step = threading.Event(), Replica.inner_step

    def inner_step(replica: Replica, num_tokens: int, divisor: int = 1) -> None:
        step(replica, num_tokens, divisor)
        if replica.round_end.totals.steps == 3:
            event.set()

    monkeypatch.setattr(Replica, "inner_step", inner_step)
    return event


def test_inner_steps_go_on_while_a_contribution_is_encoded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is possible before the next round's first inner step; the sent contribution is from before that step."""
    may_copy = after_three_steps(monkeypatch)
    monkeypatch.setattr(round_end, "copier_for", lambda device: LateCopier(may_copy))
    trainer = start(MANIFEST)
    trainer.handle(Train(0, 2))
    expected = trainer.learner.round_end.fast_weights()
    trainer.send(TakeOuterStep(0, BOB, 0, 0))
    trainer.handle(Train(1, 2))
    assert trainer.report(messages.Contributed).round == 0
    assert trainer.report(messages.Encoded).digest == blake3(expected.numpy().tobytes()).digest()
    assert trainer.report(messages.OuterStepTaken) == messages.OuterStepTaken(0, late_steps=1)
    assert trainer.report(messages.Contributed).round == 1
    assert trainer.report(messages.Encoded).digest == blake3(trainer.outgoing[: trainer.size]).digest()


def test_an_inner_step_takes_as_long_as_its_pace_says(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace is the time from the start of one step to the start of the next, however fast the machine is."""
    pace, begun, learn = 0.05, list[float](), Learner.learn

    def noted(learner: Learner) -> Tensor:
        begun.append(time.monotonic())
        return learn(learner)

    monkeypatch.setattr(Learner, "learn", noted)
    trainer, started_at = start(MANIFEST, step_seconds=pace), time.monotonic()
    trainer.handle(Train(0, 4))
    assert len(begun) == 4
    assert all(at - started_at >= number * pace for number, at in enumerate(begun))


def test_a_pause_that_the_end_of_a_round_cuts_short_counts_only_as_long_as_it_lasted(start: Start) -> None:
    trainer = start(MANIFEST, step_seconds=3_600.0)
    for index in range(2):
        trainer.send(FinishRound(index))
        trainer.handle(Train(index, 4), TakeOuterStep(index))
    for _ in range(2):
        contributed = trainer.report(messages.Contributed)
        assert contributed.inner_steps_this_round == 1
        assert 0.0 < contributed.busy_seconds <= contributed.seconds


def test_inner_steps_go_on_while_a_checkpoint_is_written(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint can be written only after two more inner steps; its content is from before them."""
    monkeypatch.delenv(KEEP_PRIORITY_VARIABLE, raising=False)
    may_copy, priorities = after_three_steps(monkeypatch), list[int]()

    class Late(LateCopier):
        def keep(self, source: Tensor, host: Tensor) -> Wait:
            wait = super().keep(source, host)

            def noted() -> None:
                priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                wait()

            return noted

    monkeypatch.setattr(snapshot, "copier_for", lambda device: Late(may_copy))
    trainer = start(MANIFEST)
    trainer.send(Save())
    trainer.handle(Train(0, 4))
    saved = trainer.report(messages.Saved)
    twin = a_learner(trainer.prepare.author)
    twin.learn()
    content = twin.checkpoint.save(tmp_path / "twin")
    assert (saved.problem, saved.inner_steps, saved.hashes) == ("", 1, content.hashes)
    assert Path(saved.path).read_bytes() == (tmp_path / "twin").read_bytes()
    assert set(priorities) == {SAVING_NICENESS}


def a_learner(author: bytes) -> Learner:
    return build_learner(MANIFEST, run_id=b"r" * 32, author=author, settings=messages.TrainerSettings(device="cpu"))


def test_a_round_without_inner_steps_contributes_what_the_last_outer_step_gave(start: Start) -> None:
    trainer = start(MANIFEST)
    trainer.handle(Train(0, 2), TakeOuterStep(0))
    expected = trainer.learner.round_end.outer.slow.clone()
    trainer.handle(Train(1, 2, takes_steps=False))
    assert trainer.report(messages.Encoded).round == 0
    contributed, encoded = trainer.report(messages.Contributed), trainer.report(messages.Encoded)
    trainer.handle(TakeOuterStep(1), Train(2, 2))
    assert encoded.digest == blake3(expected.numpy().tobytes()).digest()
    assert (contributed.inner_steps_this_round, contributed.tokens_this_round, contributed.loss) == (0, 0, None)
    assert contributed.inner_steps == 2
    assert (trainer.engine.totals.round, trainer.engine.totals.steps) == (2, 4)


def test_weights_of_an_earlier_round_have_their_schedule_at_the_runs_place(start: Start, tmp_path: Path) -> None:
    donor = a_learner(b"d" * 32)
    for _ in range(4):
        donor.learn()
    donor.round_end.apply(None)
    donor.checkpoint.save(tmp_path / "fetched")
    trainer = start(MANIFEST, fetched=str(tmp_path / "fetched"))
    trainer.handle(Train(4, 2), TakeOuterStep(4), Train(5, 2))
    assert [trainer.report(messages.Contributed).inner_steps for _ in range(2)] == [4 + 3 * 4 + 2, 4 + 3 * 4 + 4]


def test_a_learner_draws_the_slices_that_it_is_told_and_waits_for_more_until_the_round_ends(start: Start) -> None:
    trainer = start(msgspec.structs.replace(MANIFEST, data=DataConfig(epochs=2)))
    trainer.send(messages.DrawSlices(1, [(2, 3), (7, 1)]))
    trainer.handle(Train(0, 4))
    trainer.send(TakeOuterStep(0), FinishRound(1))
    trainer.obey()
    trainer.handle(Train(1, 4))

    prepared, trained, contributed = trainer.report(messages.Prepared), list[int](), list[messages.Contributed]()
    while len(contributed) < 2:
        match next(trainer.reports):
            case messages.SlicesTrained(1, ranges):
                trained += [index for first, count in ranges for index in range(first, first + count)]
            case messages.Contributed() as report:
                contributed.append(report)
    assert prepared.num_slices > 7
    assert len(prepared.corpus) == 8
    assert trained == [2, 3, 4, 7]
    assert [report.inner_steps_this_round for report in contributed] == [4, 0]
    assert contributed[1].loss is None


def test_a_run_that_holds_out_no_text_is_not_validated_and_goes_on(start: Start) -> None:
    trainer = start(msgspec.structs.replace(MANIFEST, data=DataConfig(held_out=0.0)))
    trainer.handle(messages.Validate(1), Train(0, 1))
    assert "too little text is held out" in trainer.report(messages.Validated).problem
    assert trainer.report(messages.Contributed).inner_steps == 1


def screen_own(trainer: Trainer, seconds: float = 0.0, tokens: int = 70) -> int:
    """Let Bob send this node's own contribution, which is judged; return its size."""
    trainer.incoming[: trainer.size] = trainer.outgoing[: trainer.size]
    trainer.handle(Screen(trainer.size, 1, BOB, tokens, seconds=seconds))
    return trainer.size


@pytest.mark.parametrize("slowness", [0.0, 0.4])
def test_a_trainer_that_is_slow_to_judge_counts_half_and_says_how_long_it_takes(
    start: Start, monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    """In half a second, of which a window takes ``slowness`` and a few milliseconds."""
    on_exam = HeldOutLoss.on_exam

    def slow(held_out: HeldOutLoss, num_windows: int, key: bytes) -> float:
        time.sleep(slowness * num_windows)
        return on_exam(held_out, num_windows, key)

    monkeypatch.setattr(HeldOutLoss, "on_exam", slow)
    trainer = start(MANIFEST)
    trainer.handle(Train(0, 1))
    size = screen_own(trainer, 0.5 if slowness else 60.0, 128)
    trainer.handle(TakeOuterStep(0, BOB, size, 128))
    judged = trainer.report(messages.Screened)
    assert (judged.reason, judged.clip) == ("", 0.5 if slowness else 1.0)
    assert (judged.late_seconds > 3 * 0.4) == bool(slowness)
    assert trainer.engine.totals.round == 1


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


@pytest.mark.parametrize(("outer", "is_lean"), [({"codec": "fp32"}, False), ({"codec": "int8"}, False), ({}, True)])
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
