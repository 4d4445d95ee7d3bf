"""The trainer in this process, with a device whose copies are late, as with a GPU's streams."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from torch import Tensor

from farandole.node.base.system.tuning import KEEP_PRIORITY_VARIABLE, SAVING_NICENESS
from farandole.node.store.run_file import manifest_of
from farandole.protocol.run.manifest import DataConfig
from farandole.protocol.trainer import trainer_messages as messages
from farandole.protocol.trainer.trainer_messages import FinishRound, Save, Screen, TakeOuterStep, Train
from farandole.training.engine import snapshot
from farandole.training.engine.learner import HeldOutLoss, Learner, build_learner
from farandole.training.engine.replica import Replica
from farandole.training.outer import round_end
from farandole.training.outer.contribution import Wait

from ...training.conftest import LateCopier
from .conftest import Start, Trainer

MANIFEST = manifest_of({"name": "tiny", "model": "tiny", "inner": {"batch_size": 2}}, Path(), 0.0)


BOB = b"b" * 32


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


def screen_own(trainer: Trainer, by: float = 0.0, tokens: int = 70) -> int:
    """Let Bob send this node's own contribution, which is judged; return its size."""
    trainer.incoming[: trainer.size] = trainer.outgoing[: trainer.size]
    trainer.handle(Screen(trainer.size, 1, BOB, tokens, by=by))
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
    size = screen_own(trainer, time.monotonic() + (0.5 if slowness else 60.0), 128)
    trainer.handle(TakeOuterStep(0, BOB, size, 128))
    judged = trainer.report(messages.Screened)
    assert (judged.reason, judged.clip) == ("", 0.5 if slowness else 1.0)
    assert (judged.late_seconds > 3 * 0.4) == bool(slowness)
    assert trainer.engine.totals.round == 1
