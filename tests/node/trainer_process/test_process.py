"""The trainer in this process, with a device whose copies are late, as with a GPU's streams."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from farandole.node.base.system.memory import map_shared_memory, open_shared_memory
from farandole.node.base.system.tuning import KEEP_PRIORITY_VARIABLE, SAVING_NICENESS
from farandole.node.store.run_file import manifest_of
from farandole.node.trainer.channel import TrainerSocket
from farandole.node.trainer_process.process import TrainerProcess, make_engine
from farandole.protocol.run.manifest import DataConfig, Manifest
from farandole.protocol.run.rules import ScreeningConfig
from farandole.protocol.trainer.trainer_messages import (
    LENGTH,
    Contributed,
    DrawSlices,
    Encoded,
    FinishRound,
    OuterStepTaken,
    Prepare,
    Prepared,
    Report,
    Save,
    Saved,
    Screen,
    Screened,
    SlicesTrained,
    TakeOuterStep,
    Train,
    TrainerSettings,
    decode_report,
    encode,
)
from farandole.training.engine import snapshot
from farandole.training.engine.learner import HeldOutLoss, Learner, build_learner
from farandole.training.engine.replica import Replica
from farandole.training.outer import round_end
from farandole.training.outer.copying import DeviceCopier, Wait
from farandole.training.screening.rule import Accept, Partner, Refuse, ScreeningRule, Verdict

from ...patience import PATIENCE
from ...training.conftest import copy_without
from ..trainer_commands import prepare_for, with_settings

MANIFEST = manifest_of({"name": "tiny", "model": "tiny", "inner": {"batch_size": 2}}, Path(), 0.0)


class LateCopier(DeviceCopier):
    """Copies when it is waited for, and not before ``may_copy`` is set."""

    depth = 2
    is_aside = True

    def __init__(self, may_copy: threading.Event) -> None:
        super().__init__(torch.device("cpu"))
        self._may_copy = may_copy

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        def wait() -> None:
            assert self._may_copy.wait(PATIENCE)
            host.copy_(filled)

        return wait

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        return self.send(source.clone(), host)  # operations queued later may change the source


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Prepare]:
    with open_shared_memory("outgoing") as outgoing, open_shared_memory("incoming") as incoming:
        yield prepare_for(MANIFEST, tmp_path, outgoing=outgoing, incoming=incoming)


@contextlib.contextmanager
def in_process(
    prepare: Prepare, manifest: Manifest = MANIFEST
) -> Iterator[tuple[TrainerProcess, Learner, socket.socket]]:
    """Yield a trainer process's commands, its engine, and the mesh process's end of the connection."""
    mesh, trainers = socket.socketpair()
    with mesh, trainers:
        channel = TrainerSocket(trainers)
        engine = make_engine(channel, prepare, manifest)
        assert isinstance(engine, Learner)
        yield TrainerProcess(channel, prepare, manifest, engine), engine, mesh


def reports_of(mesh: socket.socket) -> Iterator[Report]:
    """Yield the trainer's reports, earlier ones and new ones."""
    mesh.settimeout(PATIENCE)
    with mesh.makefile("rb") as stream:
        while True:
            (length,) = LENGTH.unpack(stream.read(LENGTH.size))
            yield decode_report(stream.read(length))


def test_inner_steps_go_on_while_a_contribution_is_encoded(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is possible before the next round's first inner step; the sent contribution is from before that step."""
    may_copy, step = threading.Event(), Replica.inner_step

    def inner_step(replica: Replica, num_tokens: int, divisor: int = 1) -> None:
        step(replica, num_tokens, divisor)
        if replica.round_end.totals.steps == 3:
            may_copy.set()

    monkeypatch.setattr(Replica, "inner_step", inner_step)
    monkeypatch.setattr(round_end, "copier_for", lambda device: LateCopier(may_copy))
    with in_process(prepare) as (trainer, learner, mesh):
        trainer.handle(Train(0, 2))
        expected = learner.round_end.fast_weights()
        mesh.sendall(encode(TakeOuterStep(0, b"b" * 32, 0, 0)))
        trainer.handle(Train(1, 2))

        kinds: list[type[Report]] = []
        for report in reports_of(mesh):
            kinds.append(type(report))
            match report:
                case Encoded(digest=bytes(digest)) if report.round == 0:
                    assert digest == blake3(expected.numpy().tobytes()).digest()
                case OuterStepTaken(round_index, late):
                    assert (round_index, late) == (0, 1)
                case Encoded(digest=bytes(digest)):
                    break
        size = learner.round_end.contribution_bytes
        assert digest == blake3(memoryview(map_shared_memory(prepare.outgoing, size))[:size]).digest()
    assert [kind for kind in kinds if kind in (Contributed, OuterStepTaken)] == [
        Contributed,
        OuterStepTaken,
        Contributed,
    ]


def test_an_inner_step_takes_as_long_as_its_pace_says(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace is the time from the start of one step to the start of the next, however fast the machine is."""
    pace, begun, learn = 0.05, list[float](), Learner.learn

    def noted(learner: Learner) -> Tensor:
        begun.append(time.monotonic())
        return learn(learner)

    monkeypatch.setattr(Learner, "learn", noted)
    with in_process(with_settings(prepare, step_seconds=pace)) as (trainer, _, _):
        started_at = time.monotonic()
        trainer.handle(Train(0, 4))
    assert len(begun) == 4
    assert all(at - started_at >= number * pace for number, at in enumerate(begun))


def test_a_pause_that_the_end_of_a_round_cuts_short_counts_only_as_long_as_it_lasted(prepare: Prepare) -> None:
    with in_process(with_settings(prepare, step_seconds=3_600.0)) as (trainer, _, mesh):
        for index in range(2):
            mesh.sendall(encode(FinishRound(index)))
            trainer.handle(Train(index, 4))
            trainer.handle(TakeOuterStep(index))
        reports = reports_of(mesh)
        rounds = [next(report for report in reports if isinstance(report, Contributed)) for _ in range(2)]
    assert [report.inner_steps_this_round for report in rounds] == [1, 1]
    for report in rounds:
        assert 0.0 < report.busy_seconds <= report.seconds
        assert 0.0 < report.utilisation <= 1.0


def test_inner_steps_go_on_while_a_checkpoint_is_written(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint can be written only after two more inner steps; its content is from before them."""
    monkeypatch.delenv(KEEP_PRIORITY_VARIABLE, raising=False)
    may_copy, step = threading.Event(), Replica.inner_step
    priorities: list[int] = []

    def inner_step(replica: Replica, num_tokens: int, divisor: int = 1) -> None:
        step(replica, num_tokens, divisor)
        if replica.round_end.totals.steps == 3:
            may_copy.set()

    class Late(LateCopier):
        def keep(self, source: Tensor, host: Tensor) -> Wait:
            wait = super().keep(source, host)

            def noted() -> None:
                priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                wait()

            return noted

    monkeypatch.setattr(Replica, "inner_step", inner_step)
    monkeypatch.setattr(snapshot, "copier_for", lambda device: Late(may_copy))
    with in_process(prepare) as (trainer, _, mesh):
        mesh.sendall(encode(Save()))
        trainer.handle(Train(0, 4))
        saved = next(report for report in reports_of(mesh) if isinstance(report, Saved))
    twin = build_learner(MANIFEST, run_id=prepare.run_id, author=prepare.author, settings=TrainerSettings(device="cpu"))
    twin.learn()
    content = twin.checkpoint.save(tmp_path / "twin")
    assert (saved.problem, saved.inner_steps, saved.hashes) == ("", 1, content.hashes)
    assert Path(saved.path).read_bytes() == (tmp_path / "twin").read_bytes()
    assert set(priorities) == {SAVING_NICENESS}


def test_a_round_without_inner_steps_contributes_what_the_last_outer_step_gave(prepare: Prepare) -> None:
    with in_process(prepare) as (trainer, learner, mesh):
        trainer.handle(Train(0, 2))
        trainer.handle(TakeOuterStep(0))
        expected = learner.round_end.slow_weights()
        trainer.handle(Train(1, 2, takes_steps=False))
        for report in reports_of(mesh):
            match report:
                case Contributed(1):
                    contributed = report
                case Encoded(1, digest=bytes(digest)):
                    break
        trainer.handle(TakeOuterStep(1))
        trainer.handle(Train(2, 2))
    assert digest == blake3(expected.numpy().tobytes()).digest()
    assert (contributed.inner_steps_this_round, contributed.tokens_this_round, contributed.loss) == (0, 0, None)
    assert contributed.inner_steps == 2
    assert (learner.totals.round, learner.totals.steps) == (2, 4)


def test_a_newcomer_claims_no_tokens_until_it_has_met_a_member(prepare: Prepare, tmp_path: Path) -> None:
    donor = build_learner(MANIFEST, run_id=prepare.run_id, author=b"d" * 32, settings=TrainerSettings(device="cpu"))
    for _ in range(2):
        donor.learn()
        donor.learn()
        donor.round_end.apply(None)
    donor.checkpoint.save(tmp_path / "whole")
    part = copy_without(tmp_path / "whole", "mean", tmp_path / "part")
    fetched = copy_without(part, "square", tmp_path / "fetched")
    with in_process(msgspec.structs.replace(prepare, fetched=str(fetched))) as (trainer, learner, mesh):
        assert (learner.totals.round, learner.totals.steps, learner.replica.optimizer.begun_at) == (2, 4, 4)
        trainer.handle(Train(5, 2))
        trainer.handle(TakeOuterStep(5))
        trainer.handle(Train(6, 2))
        claims = list(itertools.islice((each for each in reports_of(mesh) if isinstance(each, Contributed)), 2))
    tokens = claims[0].tokens_this_round
    assert tokens > 0
    assert [claim.tokens_claimed for claim in claims] == [0, 0], "it has met nobody yet"
    assert claims[0].inner_steps == 4 + 3 * 2 + 2, "the schedule is at the run's place"
    assert learner.replica.optimizer.begun_at == 4 + 3 * 2, "the ramp is where it was"


def test_a_learner_draws_the_slices_that_it_is_told_and_waits_for_more_until_the_round_ends(prepare: Prepare) -> None:
    manifest = msgspec.structs.replace(MANIFEST, data=DataConfig(epochs=2))
    prepare = msgspec.structs.replace(prepare, manifest=msgspec.msgpack.encode(manifest))
    with in_process(prepare, manifest) as (trainer, _, mesh):
        mesh.sendall(encode(DrawSlices(1, [(2, 3), (7, 1)])))
        trainer.handle(Train(0, 4))
        mesh.sendall(encode(TakeOuterStep(0)))
        mesh.sendall(encode(FinishRound(1)))
        trainer.handle(trainer.next_command())
        trainer.handle(Train(1, 4))

        prepared, trained, contributed = None, list[int](), list[Contributed]()
        for report in reports_of(mesh):
            match report:
                case Prepared():
                    prepared = report
                case SlicesTrained(1, ranges):
                    trained += [index for first, count in ranges for index in range(first, first + count)]
                case Contributed():
                    contributed.append(report)
            if len(contributed) == 2:
                break
    assert prepared is not None
    assert prepared.num_slices > 7
    assert len(prepared.corpus) == 8
    assert trained == [2, 3, 4, 7]
    assert [report.inner_steps_this_round for report in contributed] == [4, 0]
    assert contributed[1].loss is None


class RememberingConfig(
    ScreeningConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="remembering"
):
    """Settings of a rule that remembers the peers that it has met."""


class Remembering(ScreeningRule):
    """Refuses peers that it has met twice."""

    def __init__(self, settings: ScreeningConfig) -> None: ...

    def begin(self) -> None: ...

    def feed(self, own: Tensor, contribution: Tensor) -> None: ...

    def judge(self, partner: Partner) -> Verdict:
        tokens = (partner.encounter.own_tokens, partner.encounter.partner_tokens)
        met = partner.history["tokens"]
        return Refuse(f"met with {met[0]:g} and {met[1]:g} tokens, now {tokens}") if met else Accept()

    def remember(self, partner: Partner, verdict: Verdict) -> None:
        partner.history.append("tokens", partner.encounter.own_tokens)
        partner.history.append("tokens", partner.encounter.partner_tokens)


@pytest.mark.parametrize("harm", [None, b"rubbish"])
def test_what_a_screening_rule_remembers_of_a_peer_survives_the_trainer(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, harm: bytes | None
) -> None:
    module = types.ModuleType("remembering")
    module.__dict__["RULE"] = Remembering
    monkeypatch.setitem(sys.modules, "farandole.training.screening.remembering", module)
    manifest = msgspec.structs.replace(MANIFEST, screening=RememberingConfig())
    bob = b"b" * 32

    def meet(round_index: int) -> str:
        """Return the verdict on Bob, who sends this node's own contribution, by a new trainer."""
        with in_process(prepare, manifest) as (trainer, learner, mesh):
            trainer.handle(Train(round_index, 1))
            size = learner.round_end.contribution_bytes
            map_shared_memory(prepare.incoming, size)[:size] = map_shared_memory(prepare.outgoing, size)[:size]
            trainer.handle(Screen(size, 1, bob, 70))
            trainer.handle(TakeOuterStep(round_index, bob if not round_index else b"", 0 if round_index else size, 70))
            trainer.handle(Save(is_last=True))
            return next(report.reason for report in reports_of(mesh) if isinstance(report, Screened))

    assert meet(0) == ""
    if harm is None:
        assert meet(1) == "met with 128 and 70 tokens, now (128, 70)"
    else:
        (file,) = Path(prepare.settings.checkpoints).glob("*-peers.msgpack")
        file.write_bytes(harm)
        assert meet(1) == "", "a damaged file is as good as none"


@pytest.mark.parametrize("slowness", [0.0, 0.4])
def test_a_trainer_that_is_slow_to_judge_counts_half_and_says_how_long_it_takes(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    """In half a second, of which a window takes ``slowness`` and a few milliseconds."""
    on_exam = HeldOutLoss.on_exam

    def slow(held_out: HeldOutLoss, num_windows: int, key: bytes) -> float:
        time.sleep(slowness * num_windows)
        return on_exam(held_out, num_windows, key)

    monkeypatch.setattr(HeldOutLoss, "on_exam", slow)
    with in_process(prepare, MANIFEST) as (trainer, learner, mesh):
        trainer.handle(Train(0, 1))
        size = learner.round_end.contribution_bytes
        map_shared_memory(prepare.incoming, size)[:size] = map_shared_memory(prepare.outgoing, size)[:size]
        bob, seconds = b"b" * 32, 0.5 if slowness else 60.0
        trainer.handle(Screen(size, 1, bob, 128, by=time.monotonic() + seconds))
        trainer.handle(TakeOuterStep(0, bob, size, 128))
        judged = next(report for report in reports_of(mesh) if isinstance(report, Screened))
    assert (judged.reason, judged.clip) == ("", 0.5 if slowness else 1.0)
    assert (judged.late_seconds > 3 * 0.4) == bool(slowness)
    assert learner.totals.round == 1
