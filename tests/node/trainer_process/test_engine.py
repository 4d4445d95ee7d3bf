"""Engines that are neither local nor a stage, through whole rounds of the trainer process: the interface's promises."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor

from farandole.node.store.run_file import manifest_of
from farandole.node.trainer.channel import SharedCounter
from farandole.protocol.run.rules import GuardConfig, PlainConfig
from farandole.protocol.trainer import trainer_messages as messages
from farandole.training.base.device import choose_device
from farandole.training.base.parameters import Layout
from farandole.training.engine.engine import Engine, Until
from farandole.training.engine.snapshot import Checkpoint
from farandole.training.outer.codec import Buffer
from farandole.training.outer.contribution import Exam, PartnerContribution
from farandole.training.outer.outer_state import FastWeights
from farandole.training.outer.round_end import RoundEnd
from farandole.training.screening.rule import Accept, Partner, Verdict

from ...training.conftest import Asking
from .conftest import Start

MANIFEST = manifest_of({"name": "tiny", "model": "tiny"}, Path(), 0.0)
BOB = b"b" * 32
NOT_FINITE = "the contribution cannot be used: a value received is not finite, or too large"
SIZE = 16  # bytes of a contribution


def note_tokens(partner: Partner) -> Verdict:
    """Remember how many tokens the partner claims, and accept its contribution."""
    partner.history.append("tokens", partner.encounter.partner_tokens)
    return Accept()


class AdderRoundEnd(RoundEnd):
    """Notes how much of a contribution has arrived at each call."""

    def __init__(self) -> None:
        super().__init__(FastWeights(torch.zeros(4)), Layout({"w": (2, 2)}, "fp32"), PlainConfig(), GuardConfig())
        contributor, copier = self.outer.contributor, self.outer.copier
        self.partner = PartnerContribution(Asking(note_tokens), contributor, torch.empty(4), copier, Exam())
        self.taken_in: list[int] = []

    def take_in(self, data: Buffer, available: int) -> None:
        self.taken_in.append(available)
        super().take_in(data, available)


class Adder(Engine):
    """Four weights; an inner step on ten tokens adds one to each; partners take the mean."""

    is_driven = False

    def __init__(self) -> None:
        self.adding, device = AdderRoundEnd(), choose_device("cpu")
        super().__init__(device, self.adding, Checkpoint(self.adding, b"r" * 32, device))

    @property
    def slow(self) -> Tensor:
        return self.round_end.outer.slow

    def step(self) -> None:
        self.round_end.weights.flat.add_(1.0)
        self.round_end.count_step(10)

    def inner_steps(self, until: Until) -> None:
        while not until():
            self.step()

    def mean_loss(self) -> float | None:
        return 2.5

    def evaluate(self, num_batches: int) -> float:
        return float(self.slow.mean()) * num_batches


def test_a_whole_round_of_an_engine_of_ones_own(start: Start) -> None:
    trainer = start(MANIFEST, engine := Adder())
    prepared = trainer.receive(messages.Prepared)
    assert (prepared.num_parameters, prepared.contribution_bytes, prepared.activation_bytes) == (4, SIZE, 0)
    assert prepared.layout == engine.checkpoint.layout.hash

    contributed = trainer.tell(messages.Train(0, 3), messages.Contributed)
    assert (contributed.size, contributed.inner_steps_this_round, contributed.tokens_this_round) == (SIZE, 3, 30)
    assert contributed.loss == 2.5
    digest = trainer.receive(messages.Encoded).digest
    assert digest == blake3(trainer.outgoing[:SIZE]).digest()
    assert SharedCounter(trainer.outgoing).count_of(0) == SIZE

    nan = float("nan")
    for number, (value, reason) in enumerate([(nan, NOT_FINITE), (nan, None), (5.0, "")], 1):
        trainer.arrive(number, torch.full((2, 2), value).numpy().tobytes())
        if reason is None:  # the exchange breaks before it is judged: none of its bytes are taken for the next one's
            trainer.tell(messages.Ping(), messages.Pong)
            continue
        assert trainer.tell(messages.Screen(SIZE, number, BOB, 70), messages.Screened) == messages.Screened(
            reason, number, clip=0.0 if reason else 1.0
        )
    assert engine.adding.taken_in.count(SIZE) == 3, "each exchange's own bytes, as they arrived"
    taken = trainer.tell(messages.TakeOuterStep(0, BOB, SIZE, 70), messages.OuterStepTaken)
    assert (taken.late_steps, engine.totals.round) == (0, 1)
    assert torch.equal(engine.slow, torch.full((4,), 4.0)), "the mean of 3 and 5"

    assert trainer.tell(messages.Validate(2), messages.Validated) == messages.Validated(1, 8.0)
    saved = trainer.tell(messages.Save(), messages.Saved)
    assert (saved.problem, saved.round, saved.inner_steps) == ("", 1, 3)
    assert torch.equal(load_file(saved.path)["slow/w"].flatten(), engine.slow)
    again = start(MANIFEST, other := Adder())
    assert again.receive(messages.Prepared).resumed == msgspec.structs.replace(saved, seconds=0.0)
    assert (other.totals.round, other.totals.steps, other.totals.tokens) == (1, 3, 30)
    assert torch.equal(other.round_end.fast_weights(), engine.slow)
    assert other.round_end.partner.histories.of(BOB)["tokens"] == (70.0,)
    (remembered,) = Path(again.prepare.settings.checkpoints).glob("*-peers.msgpack")
    remembered.write_bytes(b"rubbish")
    start(MANIFEST, third := Adder()).receive(messages.Prepared)
    assert not third.round_end.partner.histories.of(BOB)["tokens"], "a damaged file is as good as none"


def test_how_many_tokens_a_partner_claims_counts_only_where_there_are_inner_steps(start: Start) -> None:
    """In a round without them only a newcomer's 0 counts, on both sides."""
    trainer = start(MANIFEST, engine := Adder())
    trainer.receive(messages.Prepared)
    own = []
    for round_index, (takes_steps, claim) in enumerate([(True, 10**12), (False, 10**12), (False, 0)]):
        own.append(trainer.tell(messages.Train(round_index, 3, takes_steps), messages.Contributed).tokens_claimed)
        trainer.receive(messages.Encoded)
        SharedCounter(trainer.incoming).store(round_index + 1, SIZE)
        trainer.tell(messages.Screen(SIZE, round_index + 1, BOB, claim), messages.Screened)
        trainer.tell(messages.TakeOuterStep(round_index), messages.OuterStepTaken)
    assert own == [30, 1, 1]
    assert engine.round_end.partner.histories.of(BOB)["tokens"] == (10.0**12, 1.0, 0.0)


def test_a_round_that_is_over_waits_for_the_outer_step_before(start: Start) -> None:
    """Meanwhile it answers signs of life; what is for the round's end comes after it."""
    trainer = start(MANIFEST, Adder())
    trainer.receive(messages.Prepared)
    trainer.tell(messages.Ping(), messages.Pong)
    trainer.send(messages.Train(0, 0), messages.Ping(), messages.FinishRound(1), messages.FinishRound(0))
    trainer.obey()
    trainer.receive(messages.Pong)
    assert trainer.receive(messages.Contributed).inner_steps_this_round >= 1, "another round's end is ignored"
    trainer.receive(messages.Encoded)
    sent = bytes(trainer.outgoing[:SIZE])

    early = messages.Train(1, 0, takes_steps=False), messages.FinishRound(0), messages.Validate(1), messages.Ping()
    trainer.send(*early, messages.Save())
    waiting = threading.Thread(target=trainer.obey)
    waiting.start()
    trainer.receive(messages.Pong)
    assert trainer.receive(messages.Saved).round == 0
    assert trainer.outgoing[:SIZE] == sent, "the partner may still be reading it"
    trainer.send(messages.TakeOuterStep(0))
    waiting.join()
    assert trainer.receive(messages.OuterStepTaken).round == 0
    assert trainer.receive(messages.Contributed).round == 1
    trainer.receive(messages.Encoded)
    trainer.obey()
    assert trainer.receive(messages.Validated).round == 1


class Driven(Adder):
    """Takes an inner step on command, and answers each microbatch with a message."""

    is_driven = True

    def __init__(self) -> None:
        super().__init__()
        self.settled: list[int] = []

    def inner_steps(self, until: Until) -> None:
        Engine.inner_steps(self, until)

    def obey(
        self, command: messages.Work | messages.Settle | messages.TakeInnerStep
    ) -> messages.Worked | messages.InnerStepTaken | None:
        if isinstance(command, messages.Work):
            return messages.Worked(f"{command.work} {command.slot}")
        if isinstance(command, messages.Settle):
            self.settled.append(command.slot)
            return None
        self.step()
        return messages.InnerStepTaken(True)


def test_a_driven_engine_computes_on_commands_until_the_round_ends(start: Start) -> None:
    trainer = start(MANIFEST, driven := Driven())
    trainer.receive(messages.Prepared)
    trainer.send(
        messages.Train(0, 0),
        messages.Work("forward", 3),
        messages.Validate(1),
        messages.TakeInnerStep(),
        messages.FinishRound(0),
        messages.Work("backward", 3),
        messages.Settle(3, is_kept=False),
        messages.Ping(),
    )
    trainer.obey()
    assert trainer.receive(messages.Worked).problem == "forward 3"
    assert trainer.receive(messages.Validated).round == 0, "at once: what is asked for went through the stages before"
    assert trainer.receive(messages.InnerStepTaken).is_taken
    assert trainer.receive(messages.Contributed).inner_steps_this_round == 1
    trainer.receive(messages.Encoded)
    trainer.obey()
    trainer.obey()
    trainer.obey()
    trainer.receive(messages.Pong)  # and no answer to work that crossed the contribution
    assert driven.settled == [3], "what ended between two rounds leaves its slot"
