"""Rounds that end in a side thread: averaging is done in the host's memory, and inner steps go on meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from farandole.node.base.system.memory import SharedCounter, counted_size, map_shared_memory, open_shared_memory
from farandole.node.store.run_file import manifest_of
from farandole.node.trainer.channel import TrainerSocket
from farandole.node.trainer_process.process import StepPace, TrainerProcess
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer.trainer_messages import (
    Command,
    FinishRound,
    OuterStepTaken,
    Prepare,
    Report,
    Save,
    Saved,
    Screen,
    TakeOuterStep,
    Train,
    TrainerSettings,
    encode,
)
from farandole.training.engine.learner import Learner, build_learner
from farandole.training.engine.replica import Recipe, Replica
from farandole.training.model.stages import build_module
from farandole.training.outer import round_end
from farandole.training.outer.outer_state import OuterState
from farandole.training.screening.rule import Accept, Encounter, Partner, ScreeningRule, Verdict

from ...patience import PATIENCE
from ..trainer_commands import prepare_for
from .test_process import reports_of

ALICE, BOB = b"a" * 32, b"b" * 32
STEPS = 2
"""Inner steps before a contribution."""
MORE_STEPS = 6
"""Inner steps of the round after it."""


def manifest_with(**outer: object) -> Manifest:
    return manifest_of({"name": "tiny", "model": "tiny", "inner": {"batch_size": 2}, "outer": outer}, Path(), 0.0)


def learner_of(manifest: Manifest, author: bytes, *, is_lean: bool = False) -> Learner:
    """Return a learner as with a GPU, whose inner steps move other weights than its flat vector."""
    like = build_learner(manifest, run_id=b"r" * 32, author=author, settings=TrainerSettings(device="cpu"))
    return Learner(
        build_module(manifest.model, manifest.seed),
        Recipe.of(manifest),
        like.sampler,
        run_id=like.checkpoint.run_id,
        device=like.device,
        author=author,
        settings=TrainerSettings(lean=is_lean),
        averages_on_host=True,
    )


class Mesh:
    """The mesh process's part of Alice's first exchange, with Bob's contribution."""

    def __init__(self, prepare: Prepare, manifest: Manifest, alice: Learner, ours: socket.socket) -> None:
        self.reports = reports_of(ours)
        bob = learner_of(manifest, BOB)
        for _ in range(STEPS):
            bob.learn()
        self.contribution = bytearray(bob.round_end.contribution_bytes)
        size, _ = bob.round_end.contribute(self.contribution)
        del self.contribution[size:]
        incoming = map_shared_memory(prepare.incoming, counted_size(alice.round_end.contribution_bytes))
        incoming[: len(self.contribution)] = self.contribution
        SharedCounter(incoming).store(1, len(self.contribution))
        self.tokens = bob.totals.tokens
        self._ours = ours

    def tell(self, command: Command) -> None:
        self._ours.sendall(encode(command))

    def judge(self) -> None:
        self.tell(Screen(len(self.contribution), 1, BOB, self.tokens))

    def commit(self) -> None:
        self.tell(TakeOuterStep(0, BOB, len(self.contribution), self.tokens))


class Play(Protocol):
    """Trains Alice for `STEPS` inner steps, until her contribution awaits Bob's."""

    def __call__(self, *, is_lean: bool = False, **outer: object) -> tuple[TrainerProcess, Learner, Mesh]: ...


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    with open_shared_memory("outgoing") as outgoing, open_shared_memory("incoming") as incoming:
        ours, trainers = socket.socketpair()
        begun: list[TrainerProcess] = []

        def begin(*, is_lean: bool = False, **outer: object) -> tuple[TrainerProcess, Learner, Mesh]:
            manifest = manifest_with(**outer)
            prepare = prepare_for(manifest, tmp_path, outgoing=outgoing, incoming=incoming)
            alice = learner_of(manifest, ALICE, is_lean=is_lean)
            trainer = TrainerProcess(TrainerSocket(trainers), prepare, manifest, alice)
            begun.append(trainer)
            mesh = Mesh(prepare, manifest, alice, ours)
            trainer.handle(Train(0, STEPS))
            return trainer, alice, mesh

        with ours, trainers:
            yield begin
            for trainer in begun:
                trainer.close()


def in_turn(manifest: Manifest, mesh: Mesh, late: int, *, is_lean: bool) -> Learner:
    """Return Alice after the same steps with everything in one thread, the outer step ``late`` inner steps late."""
    alice = learner_of(manifest, ALICE, is_lean=is_lean)
    for _ in range(STEPS):
        alice.learn()
    alice.round_end.contribute(bytearray(alice.round_end.contribution_bytes))
    for _ in range(late):
        alice.learn()
    encounter = Encounter(BOB, alice.round_end.tokens_claimed, mesh.tokens)
    alice.round_end.screen(mesh.contribution, encounter)
    assert alice.round_end.apply(mesh.contribution, encounter, own_first=True) == late
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


def end_round(trainer: TrainerProcess, mesh: Mesh) -> None:
    """Have the trainer judge the contribution and take the outer step, before the next round begins."""
    mesh.judge()
    mesh.commit()
    for _ in range(2):
        trainer.handle(trainer.next_command())


def late_of(reports: Iterator[Report]) -> int:
    """Read reports up to the outer step's; return how late it was."""
    return next(report.late_steps for report in reports if isinstance(report, OuterStepTaken))


@pytest.mark.parametrize(
    ("outer", "is_lean"),
    [({"codec": "fp32"}, False), ({"codec": "int8"}, False), ({}, True)],
)
def test_inner_steps_go_on_while_the_outer_step_is_computed(
    play: Play, monkeypatch: pytest.MonkeyPatch, outer: dict[str, object], is_lean: bool
) -> None:
    trainer, alice, mesh = play(is_lean=is_lean, **outer)
    with monkeypatch.context() as patch:
        SlowStep(patch, alice, STEPS + 2)
        mesh.judge()
        mesh.commit()
        trainer.handle(Train(1, MORE_STEPS))
    late = late_of(mesh.reports)
    assert 2 <= late <= MORE_STEPS
    expected = in_turn(manifest_with(**outer), mesh, late, is_lean=is_lean)
    assert torch.equal(alice.round_end.slow_weights(), expected.round_end.slow_weights())
    if is_lean:  # which random bits round the weights depends on when their loss was measured
        torch.testing.assert_close(
            alice.round_end.fast_weights(), expected.round_end.fast_weights(), rtol=2**-5, atol=1e-2
        )
    else:
        assert torch.equal(alice.round_end.fast_weights(), expected.round_end.fast_weights())


def test_without_inner_steps_meanwhile_the_fast_weights_become_the_slow_ones(play: Play) -> None:
    trainer, alice, mesh = play()
    end_round(trainer, mesh)
    trainer.handle(Save())
    assert late_of(mesh.reports) == 0
    assert torch.equal(alice.round_end.fast_weights(), alice.round_end.slow_weights())


def test_an_outer_step_that_begins_before_the_first_inner_step_can_land_after_it(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, alice, mesh = play(codec="fp32")
    step = SlowStep(monkeypatch, alice, STEPS + 1)
    end_round(trainer, mesh)
    while not step.has_begun.wait(0.01):
        alice.round_end.side_thread.look()
    trainer.handle(Train(1, MORE_STEPS))
    late = late_of(mesh.reports)
    assert 1 <= late <= MORE_STEPS
    monkeypatch.undo()
    expected = in_turn(manifest_with(codec="fp32"), mesh, late, is_lean=False)
    assert torch.equal(alice.round_end.slow_weights(), expected.round_end.slow_weights())
    assert torch.equal(alice.round_end.fast_weights(), expected.round_end.fast_weights())


def test_what_the_side_thread_needs_is_done_in_the_pause_after_an_inner_step(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judgement needs the other thread several times: it must not take as many inner steps, with their pauses."""
    trainer, _, mesh = play()
    end_step, lates = StepPace.end_step, list[int]()

    def pause(pace: StepPace) -> float:
        end_step(pace)
        return time.monotonic() + 2 * PATIENCE

    def finish() -> None:
        lates.append(late_of(mesh.reports))
        mesh.tell(FinishRound(1))

    monkeypatch.setattr(StepPace, "end_step", pause)
    mesh.judge()
    mesh.commit()
    finishing = threading.Thread(target=finish)
    finishing.start()
    trainer.handle(Train(1, MORE_STEPS))
    finishing.join()
    assert lates == [1]


class AskingTwice(ScreeningRule):
    """Asks for one loss twice, and has inner steps taken in between if that is possible."""

    def __init__(self, take_step: Callable[[], None]) -> None:
        self.losses: list[float | None] = []
        self._take_step = take_step

    def begin(self) -> None:
        pass

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        pass

    def judge(self, partner: Partner) -> Verdict:
        self.losses.append(partner.evaluate(0.0))
        self._take_step()
        self.losses.append(partner.evaluate(0.0))
        return Accept()


@pytest.mark.parametrize("fragments", [1, 2])
def test_all_losses_of_a_judgement_are_of_the_same_weights(
    play: Play, monkeypatch: pytest.MonkeyPatch, fragments: int
) -> None:
    """With fragments, what is not exchanged in this round changes with each inner step."""
    stepped = threading.Condition()
    inner_step = Replica.inner_step

    def count(replica: Replica, num_tokens: int, divisor: int = 1) -> None:
        inner_step(replica, num_tokens, divisor)
        with stepped:
            stepped.notify_all()

    def wait_for_step() -> None:
        with stepped:
            stepped.wait(0.2)  # where the judgement is between two inner steps, there is none

    rule = AskingTwice(wait_for_step)
    monkeypatch.setattr(round_end, "rule_of", lambda settings: rule)
    monkeypatch.setattr(Replica, "inner_step", count)
    trainer, _, mesh = play(fragments=fragments)
    mesh.judge()
    mesh.commit()
    trainer.handle(Train(1, MORE_STEPS))
    first, again = rule.losses
    assert first is not None
    assert first == again


def test_a_checkpoint_waits_for_the_outer_step(play: Play) -> None:
    """Halfway through the step, some of the slow weights would be new."""
    trainer, alice, mesh = play()
    before = alice.round_end.slow_weights()
    end_round(trainer, mesh)
    trainer.handle(Save())
    saved = next(report for report in mesh.reports if isinstance(report, Saved))
    assert saved.round == 1
    again = learner_of(manifest_with(), ALICE)
    again.checkpoint.load(Path(saved.path))
    assert torch.equal(again.round_end.slow_weights(), alice.round_end.slow_weights())
    assert not torch.equal(again.round_end.slow_weights(), before)


def test_a_trainer_ends_while_the_side_thread_waits_for_it(play: Play) -> None:
    trainer, alice, mesh = play()
    end_round(trainer, mesh)
    trainer.close()
    with pytest.raises(CancelledError):
        trainer.handle(Save())
    assert alice.totals.round == 0
