import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from farandole.protocol.run.manifest import DataConfig, InnerConfig, Manifest, ModelConfig, TokenizerConfig
from farandole.protocol.run.rules import NoLoCoConfig, OuterConfig, RoundConfig, ScreeningConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import Device, choose_device
from farandole.training.data.batches import Found
from farandole.training.data.dataset import Sampler, Text
from farandole.training.data.tokenizer import ByteTokenizer
from farandole.training.engine.engine import Engine
from farandole.training.engine.learner import DEFAULTS, Learner
from farandole.training.model.model import build_model
from farandole.training.outer.codec import Buffer
from farandole.training.outer.contribution import DeviceCopier, Wait
from farandole.training.screening.rule import Encounter, Partner, Refuse, ScreeningRule, Verdict

from ..patience import PATIENCE
from ..tolerance import TOLERANT

RUN_ID = hashlib.sha256(b"a run").digest()
ALICE, BOB = b"a" * 32, b"b" * 32
ALL_TEXT = DataConfig()

MakeReplica = Callable[..., Learner]


def train(replica: Learner, steps: int = 3) -> list[float]:
    """Take inner steps; return their losses."""
    return [float(replica.learn()) for _ in range(steps)]


def rate_of(learner: Learner) -> float:
    """Return the rate of the next inner step."""
    return learner.replica.optimizer.rate(learner.totals.steps)


def sent(engine: Engine, fragment: int = 0) -> bytearray:
    """End a round; return the contribution that a partner gets."""
    out = bytearray(engine.round_end.contribution_bytes)
    size, _ = engine.round_end.contribute(out, fragment)
    return out[:size]


def exchange(alice: Engine, bob: Engine, tokens: tuple[int, int] = (1, 1), fragment: int = 0) -> None:
    """End both rounds, with the outer steps that an exchange leads to."""
    of_alice, of_bob = sent(alice, fragment), sent(bob, fragment)
    alice.round_end.apply(of_bob, Encounter(BOB, *tokens), own_first=True)
    bob.round_end.apply(of_alice, Encounter(ALICE, *tokens[::-1]), own_first=False)


def refusal(replica: Learner, contribution: Buffer) -> str:
    """Why a partner's contribution is refused; empty if it is accepted."""
    verdict = replica.round_end.screen(contribution)
    return verdict.reason if isinstance(verdict, Refuse) else ""


def weights_of(module: nn.Module) -> Tensor:
    """The parameters in one vector (n,)."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def rewrite(checkpoint: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object], out: Path) -> Path:
    """Copy a checkpoint to ``out`` with other tensors or metadata, which ``change`` changes; return ``out``."""
    with safetensors.safe_open(checkpoint, framework="pt") as file:
        metadata = dict(file.metadata() or {})
    tensors = safetensors.torch.load_file(checkpoint)
    change(tensors, metadata)
    safetensors.torch.save_file(tensors, out, metadata)
    return out


def copy_without(checkpoint: Path, vectors: str | tuple[str, ...], out: Path) -> Path:
    """Copy a checkpoint to ``out``, without some of its vectors; return ``out``."""
    unwanted = tuple(f"{vector}/" for vector in ([vectors] if isinstance(vectors, str) else vectors))

    def change(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
        for name in [name for name in tensors if name.startswith(unwanted)]:
            del tensors[name]

    return rewrite(checkpoint, change, out)


def kept_bytes(forward: Callable[[], Tensor], module: nn.Module) -> list[int]:
    """Sizes of the memory that a forward pass keeps for the backward pass, without the module's own tensors."""
    own = {each.data_ptr() for each in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert forward().requires_grad
    return list(kept.values())


def manifest_of(model: ModelConfig, **sections: Any) -> Manifest:
    """A run of this model; its tokenizer is not looked for."""
    return Manifest("test", model, tokenizer=TokenizerConfig("tokenizers", "0" * 64), **sections)


class Asking(ScreeningRule):
    """Has a function judge."""

    def __init__(self, judge: Callable[[Partner], Verdict]) -> None:
        self._judge = judge

    def begin(self) -> None:
        pass

    def feed(self, own: Tensor, contribution: Tensor) -> None:
        pass

    def judge(self, partner: Partner) -> Verdict:
        return self._judge(partner)


class LateCopier(DeviceCopier):
    """Copies when it is waited for, as a busy stream may, and not before ``may_copy`` is set."""

    depth = 2
    is_aside = True

    def __init__(self, may_copy: threading.Event | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._may_copy = may_copy

    def send(self, filled: Tensor, host: Tensor) -> Wait:
        def wait() -> None:
            assert self._may_copy is None or self._may_copy.wait(PATIENCE)
            host.copy_(filled)

        return wait

    def keep(self, source: Tensor, host: Tensor) -> Wait:
        return self.send(source.clone(), host)  # operations queued later may change the source


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return ModelConfig(num_layers=2, width=16, num_heads=2, hidden=24, context=16, vocabulary=64)


@pytest.fixture(scope="session")
def inner() -> InnerConfig:
    return InnerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=30, batch_size=4, weight_decay=0.1)


@pytest.fixture(scope="session")
def text() -> Text:
    """Counting modulo 64 with a few surprises: learnable within some steps."""
    tokens = np.arange(4_000) % 64
    tokens[::17] = 5
    return Text(tokens[:3_000].astype(np.uint8), tokens[3_000:].astype(np.uint8), Found(2, 63, b""))


@pytest.fixture(scope="session")
def make_replica(model: ModelConfig, inner: InnerConfig, text: Text) -> MakeReplica:
    def make(
        author: bytes = ALICE,
        run_id: bytes = RUN_ID,
        seed: int = 7,
        *,
        module: nn.Module | None = None,
        inner_settings: InnerConfig = inner,
        rule: OuterConfig | None = None,
        screening: ScreeningConfig = TOLERANT,
        averages_on_host: bool = False,
        partners: int = 1,
        text: Text = text,
        data: DataConfig = ALL_TEXT,
        device: Device | None = None,
        settings: TrainerSettings = DEFAULTS,
        **outer: Any,
    ) -> Learner:
        size = inner_settings.batch_size
        sampler = Sampler(text, key=(run_id, author), batch_size=size, context=model.context, tokenizer=ByteTokenizer())
        outer_settings = NoLoCoConfig(**outer) if rule is None else rule
        return Learner(
            build_model(model, seed) if module is None else module,
            manifest_of(
                model,
                inner=inner_settings,
                outer=outer_settings,
                screening=screening,
                rounds=RoundConfig(partners=partners),
                data=data,
            ),
            sampler,
            run_id=run_id,
            device=choose_device("cpu") if device is None else device,
            author=author,
            settings=settings,
            averages_on_host=averages_on_host,
        )

    return make
