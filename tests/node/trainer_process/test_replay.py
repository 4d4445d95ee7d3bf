"""Rounds recorded by a trainer are replayed to the bit, and rounds done otherwise give other results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages
from farandole.training.engine.learner import Learner
from farandole.training.engine.replica import Replica

from ..small_runs import small_manifest
from .conftest import Start, Trainer

DETERMINISTIC = {"batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 2, "deterministic": True}
MANIFEST = small_manifest(
    inner=DETERMINISTIC, audits=0.03, rounds={"inner_steps": 4, "round_seconds": 0.0, "exchange_seconds": 5.0}
)
STEPS = 4
LEARN = Learner.learn
ALICE, BOB = b"a" * 32, b"b" * 32


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(start: Start, texts: Path) -> MakeTrainer:
    """Return a function that makes authors' trainers with the same text."""

    def make(author: bytes = ALICE, manifest: Manifest = MANIFEST) -> Trainer:
        return start(manifest, author=author, data=[str(texts)])

    return make


def take_round(trainer: Trainer, index: int) -> messages.Recorded:
    """Take a round's inner steps, and its outer step alone."""
    trainer.handle(messages.Train(index, STEPS))
    recorded = trainer.report(messages.Recorded)
    trainer.handle(messages.TakeOuterStep(index))
    return recorded


def replay(
    trainer: Trainer, recorded: messages.Recorded, author: bytes = ALICE, **changes: object
) -> messages.Replayed:
    """Return the result of replaying a round, by default of Alice's."""
    commitment = msgspec.structs.replace(recorded.commitment, **changes)
    trainer.handle(messages.Replay(recorded.start.path, author, commitment))
    return trainer.report(messages.Replayed)


def is_equal(replayed: messages.Replayed, recorded: messages.Recorded) -> bool:
    assert not replayed.problem
    return (replayed.end, replayed.contribution) == (recorded.commitment.end, recorded.commitment.contribution)


@pytest.mark.parametrize("outer", [{}, {"codec": "int8"}, {"codec": "int4"}, {"fragments": 2}])
def test_every_round_is_replayed_to_the_bit(make_trainer: MakeTrainer, outer: dict[str, object]) -> None:
    manifest = small_manifest(inner=DETERMINISTIC, audits=0.03, outer=outer)
    author, auditor = make_trainer(ALICE, manifest), make_trainer(BOB, manifest)
    rounds = [take_round(author, index) for index in range(3)]
    assert [recorded.commitment.first_step for recorded in rounds] == [0, STEPS, 2 * STEPS]
    for recorded in rounds:
        assert is_equal(replay(auditor, recorded), recorded)
        assert is_equal(replay(author, recorded), recorded)
    before = auditor.learner.round_end.fast_weights()
    replay(auditor, rounds[-1])
    assert torch.equal(auditor.learner.round_end.fast_weights(), before), "an auditor's own replica stays as it is"


@pytest.mark.soak
def test_ten_thousand_audits_accuse_no_honest_member(make_trainer: MakeTrainer) -> None:
    """Rounds of one author, each replayed by three members."""
    author = make_trainer()
    auditors = [make_trainer(bytes([letter]) * 32) for letter in b"bcd"]
    num_audits = 0
    while num_audits < 10_000:
        recorded = take_round(author, num_audits // len(auditors))
        for auditor in auditors:
            assert is_equal(replay(auditor, recorded), recorded)
            num_audits += 1


def test_a_round_after_a_newcomers_ramp_is_replayed(make_trainer: MakeTrainer) -> None:
    author, auditor = make_trainer(), make_trainer(BOB)
    # The weights came from a peer, without AdamW's means.
    author.learner.totals.steps = author.learner.replica.optimizer.begun_at = 100
    for recorded in (take_round(author, 0), take_round(author, 1)):
        assert recorded.commitment.begun_at == 100
        assert is_equal(replay(auditor, recorded), recorded)
        assert not is_equal(replay(auditor, recorded, begun_at=0), recorded)


def test_what_was_done_otherwise_comes_out_otherwise(make_trainer: MakeTrainer) -> None:
    author, auditor = make_trainer(), make_trainer(BOB)
    take_round(author, 0)
    recorded = take_round(author, 1)
    assert not is_equal(replay(auditor, recorded, steps=2 * STEPS), recorded), "half of the steps"
    assert not is_equal(replay(auditor, recorded, b"c" * 32), recorded), "other data"
    assert not is_equal(replay(auditor, recorded, microbatch=1), recorded)
    assert replay(auditor, recorded, first_step=0).problem
    Path(recorded.start.path).write_bytes(b"no checkpoint")
    assert replay(auditor, recorded).problem


def idle(learner: Learner) -> Tensor:
    learner.totals.steps += 1
    learner.round_end.tokens_this_round += 1
    return torch.zeros(())


def on_the_first_batch(learner: Learner) -> Tensor:
    first = learner.sampler.batch(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner.sampler, "batch", lambda step: first)
        return LEARN(learner)


def every_other_time(learner: Learner) -> Tensor:
    return idle(learner) if learner.totals.steps % 2 else LEARN(learner)


@pytest.mark.parametrize("cheat", [idle, on_the_first_batch, every_other_time])
def test_a_cheat_is_seen_in_its_first_round_and_in_later_ones(
    make_trainer: MakeTrainer, cheat: Callable[[Learner], Tensor]
) -> None:
    author, auditor = make_trainer(), make_trainer(BOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", cheat)
        rounds = [take_round(author, index) for index in range(3)]
    assert not any(is_equal(replay(auditor, recorded), recorded) for recorded in rounds)


def test_a_flipped_bit_is_found_in_a_replay_of_ones_own(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, step = make_trainer(), Replica.inner_step
    calls = itertools.count()

    def inner_step(replica: Replica, num_tokens: int, divisor: int = 1) -> None:
        if next(calls) == STEPS + 1:  # one bit of one gradient, once
            replica.gradient.view(torch.int32)[7] ^= 1 << 20
        step(replica, num_tokens, divisor)

    monkeypatch.setattr(Replica, "inner_step", inner_step)
    first, second, third = (take_round(trainer, index) for index in range(3))
    assert is_equal(replay(trainer, first), first)
    assert not is_equal(replay(trainer, second), second)
    assert is_equal(replay(trainer, third), third), "it came after, from what it had become"


def test_a_replay_answers_signs_of_life_and_puts_off_the_rest(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    recorded = take_round(trainer, 0)
    trainer.send(messages.Ping(), messages.Train(1, STEPS), messages.Ping())
    trainer.handle(messages.Replay(recorded.start.path, ALICE, recorded.commitment))
    reports = itertools.takewhile(lambda report: not isinstance(report, messages.Replayed), trainer.reports)
    assert [report for report in reports if isinstance(report, messages.Pong)] == [messages.Pong(), messages.Pong()]
    assert trainer.process.next_command() == messages.Train(1, STEPS)


def test_starts_are_kept_for_a_few_rounds(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    paths = [Path(take_round(trainer, index).start.path) for index in range(messages.KEPT_STARTS + 2)]
    assert [path.exists() for path in paths] == [False] * 2 + [True] * messages.KEPT_STARTS


def test_rounds_are_recorded_only_where_the_run_has_audits(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(manifest=small_manifest(inner=DETERMINISTIC))
    trainer.handle(messages.Train(0, STEPS), messages.TakeOuterStep(0), messages.Ping())
    reports = itertools.takewhile(lambda report: not isinstance(report, messages.Pong), trainer.reports)
    assert not [report for report in reports if isinstance(report, messages.Recorded)]
