"""A user's own loop in a run that averages Muon's momentum: its optimizers', beside a built-in trainer's."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from farandole.protocol.run.manifest import InnerConfig, Manifest, ModelConfig
from farandole.protocol.run.rules import PlainConfig, encoded_bytes
from farandole.training.base.errors import TrainingError
from farandole.training.cluster.external import ExternalEngine, Loop, Turns
from farandole.training.data.dataset import Text
from farandole.training.inner.optimizer import matrices_of
from farandole.training.model.model import build_model, language_loss
from farandole.training.outer import codec
from farandole.training.outer.momentum import MAX_DISTANCE, UNKNOWN_SHARE
from farandole.training.screening.rule import Encounter

from ...tolerance import TOLERANT
from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, manifest_of, sent, train

KEEP = 0.9
OUTER = PlainConfig(codec="int8", momentum_codec="int4")


@pytest.fixture
def muon(inner: InnerConfig) -> InnerConfig:
    return replace(inner, optimizer="muon", momentum=KEEP)


@pytest.fixture
def manifest(model: ModelConfig, muon: InnerConfig) -> Manifest:
    return manifest_of(model, seed=7, inner=muon, outer=OUTER, screening=TOLERANT)


class Script:
    """A user's loop, with the optimizers that its matrices and the rest are given to."""

    def __init__(
        self, manifest: Manifest, text: Text, optimizer: Callable[[list[nn.Parameter]], Optimizer], judges: bool
    ):
        self.module = build_model(manifest.model, 1)
        by_muon = matrices_of(self.module)
        self.matrices = [each for name, each in self.module.named_parameters() if name in by_muon]
        others = [each for name, each in self.module.named_parameters() if name not in by_muon]
        self.optimizers = [optimizer(self.matrices), AdamW(others, lr=3e-3)]
        self.has_stepped: set[Optimizer] = set()
        tokens = torch.from_numpy(text.training[: 4 * 17].reshape(4, 17)).long()
        self._loss: Callable[[], Tensor] = lambda: language_loss(self.module, tokens)
        evaluate = (lambda: self._loss().item()) if judges else None
        self._turns = Turns()
        loop = Loop(self.module, evaluate=evaluate, tokens_per_step=64, optimizers=self.has_stepped)
        self.engine = ExternalEngine(loop, manifest, self._turns, run_id=RUN_ID)
        self.engine.begin_anew()

    def step(self, count: int) -> None:
        for _ in range(count):
            self.module.zero_grad()
            self._loss().backward()
            for each in self.optimizers:
                each.step()
            self.has_stepped.update(self.optimizers)
            self.engine.round_end.count_step(64)

    @property
    def momentum(self) -> Tensor:
        kept = [self.optimizers[0].state[each]["momentum_buffer"] for each in self.matrices]
        return torch.cat([each.flatten() for each in kept]).clone()

    def meet(self, received: bytearray) -> None:
        """Take an outer step, while the loop waits for its turn and measures losses."""

        def apply() -> None:
            try:
                self.engine.round_end.apply(received, Encounter(BOB, 1, 1))
            finally:
                self._turns.end()

        with ThreadPoolExecutor(1) as aside:
            applied = aside.submit(apply)
            self._turns.wait()
            applied.result()


def torchs_muon(matrices: list[nn.Parameter]) -> Optimizer:
    return Muon(matrices, lr=3e-3, momentum=KEEP, adjust_lr_fn="match_rms_adamw")


def decoded(own: Tensor) -> Tensor:
    codec.encode("int4", own, encoded := bytearray(encoded_bytes("int4", len(own))))
    return codec.decode("int4", encoded, len(own))


@pytest.mark.parametrize("judges", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "keep"), [(torchs_muon, KEEP), (lambda matrices: SGD(matrices, 1e-3, momentum=0.5), 0.5)]
)
@pytest.mark.parametrize("late_steps", [0, 2])
def test_a_loops_momentum_and_a_built_in_trainers_move_towards_each_other(
    make_replica: MakeReplica,
    muon: InnerConfig,
    manifest: Manifest,
    text: Text,
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    keep: float,
    late_steps: int,
    judges: bool,
) -> None:
    """The text is the same, so that the mean leads down too."""
    script, bob = Script(manifest, text, optimizer, judges), make_replica(BOB, inner_settings=muon, rule=OUTER)
    script.step(6)
    train(bob, 6)
    mean = bob.replica.optimizer.mean
    of_bob = torch.cat([mean[place] for place in bob.replica.optimizer.muon_places])
    difference = decoded(of_bob) - decoded(script.momentum)
    clip = min(1.0, MAX_DISTANCE * float(decoded(script.momentum).norm() / difference.norm()))

    contribution = sent(script.engine)
    of_loop, size = sent(bob), encoded_bytes("int4", len(of_bob))
    codec.encode("int4", script.momentum, encoded := bytearray(size))
    assert contribution[-size:] == encoded
    script.step(late_steps)
    before = script.momentum
    script.meet(of_loop)

    share = 0.5 * clip * keep**late_steps * (1.0 if judges else UNKNOWN_SHARE)
    moved = script.momentum - before
    torch.testing.assert_close(moved, share * difference, rtol=1e-4, atol=1e-6)
    bob.round_end.apply(contribution, Encounter(ALICE, 1, 1), own_first=False)
    script.step(1)  # the optimizer goes on with it


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda own: -own,
    "scaled": lambda own: -1e30 * own,
    "noise": lambda own: own.norm() * torch.randn(len(own), generator=torch.Generator().manual_seed(5)),
    "stale": lambda own: own.flip(0),
}


@pytest.mark.parametrize("judges", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_moves_a_loops_momentum_by_no_more_than_a_built_in_trainers(
    make_replica: MakeReplica, muon: InnerConfig, manifest: Manifest, text: Text, lie: str, judges: bool
) -> None:
    """Behind honest weights. Whoever turns it is clipped; where losses are known, what leads nowhere is dropped."""
    script, bob = Script(manifest, text, torchs_muon, judges), make_replica(BOB, inner_settings=muon, rule=OUTER)
    script.step(12)
    before = script.momentum
    codec.encode("int4", LIES[lie](before), encoded := bytearray(encoded_bytes("int4", len(before))))
    forged = sent(bob)
    forged[-len(encoded) :] = encoded
    sent(script.engine)

    script.meet(forged)

    moved = float((script.momentum - before).norm() / before.norm())
    assert moved <= 0.5 * MAX_DISTANCE * 1.1 * (1.0 if judges else UNKNOWN_SHARE)
    assert float(script.momentum @ before) > 0.0
    sent(script.engine)
    forged[-len(encoded) : 4 - len(encoded)] = torch.tensor([math.nan]).numpy().tobytes()
    assert "a scale received" in str(script.engine.round_end.screen(forged))


def test_small_singular_values_that_are_turned_are_seen_by_looking_ahead_along_torchs_muon(
    make_replica: MakeReplica, muon: InnerConfig, manifest: Manifest, text: Text
) -> None:
    script, bob = Script(manifest, text, torchs_muon, judges=True), make_replica(BOB, inner_settings=muon, rule=OUTER)
    script.step(15)
    before, forged = script.momentum, []
    for each in script.matrices:
        left, values, right = torch.linalg.svd(script.optimizers[0].state[each]["momentum_buffer"], full_matrices=False)
        values[2:] *= -3
        forged.append((left * values @ right).flatten())
    of_bob, size = sent(bob), encoded_bytes("int4", len(before))
    codec.encode("int4", torch.cat(forged), encoded := bytearray(size))
    sent(script.engine)

    script.meet(of_bob[:-size] + encoded)

    torch.testing.assert_close(script.momentum, before)


def test_a_loop_whose_optimizers_keep_no_momentum_is_told_so(manifest: Manifest, text: Text) -> None:
    script = Script(manifest, text, lambda matrices: AdamW(matrices, lr=3e-3), judges=False)
    sent(script.engine)  # before the first step nobody has any
    script.engine.round_end.apply(None)
    script.step(1)
    with pytest.raises(TrainingError, match=r"AdamW keeps none: .* torch\.optim\.Muon"):
        sent(script.engine)
