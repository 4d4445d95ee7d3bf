import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from farandole.protocol.run.manifest import InnerConfig, ModelConfig, RoundConfig
from farandole.protocol.run.rules import NoLoCoConfig, OuterConfig, ScreeningConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.training.base.device import choose_device
from farandole.training.data.batches import Found
from farandole.training.data.dataset import Sampler, Text
from farandole.training.engine.learner import Learner
from farandole.training.engine.replica import Recipe
from farandole.training.model.model import build_model
from farandole.training.outer.codec import Buffer
from farandole.training.screening.rule import Refuse

from ..tolerance import TOLERANT

RUN_ID = hashlib.sha256(b"a run").digest()
ALICE, BOB = b"a" * 32, b"b" * 32

MakeReplica = Callable[..., Learner]


def refusal(replica: Learner, contribution: Buffer) -> str:
    """Why a partner's contribution is refused; empty if it is accepted."""
    verdict = replica.round_end.screen(contribution)
    return verdict.reason if isinstance(verdict, Refuse) else ""


def copy_without(checkpoint: Path, vector: str, out: Path) -> Path:
    """Copy a checkpoint to ``out``, without one of its vectors; return ``out``."""
    with safetensors.safe_open(checkpoint, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(checkpoint)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{vector}/")}
    safetensors.torch.save_file(kept, out, metadata)
    return out


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
        inner_settings: InnerConfig = inner,
        rule: OuterConfig | None = None,
        screening: ScreeningConfig = TOLERANT,
        averages_on_host: bool = False,
        is_lean: bool = False,
        partners: int = 1,
        **outer: Any,
    ) -> Learner:
        sampler = Sampler(text, run_id=run_id, author=author, batch_size=inner.batch_size, context=model.context)
        return Learner(
            build_model(model, seed),
            Recipe(
                inner_settings,
                NoLoCoConfig(**outer) if rule is None else rule,
                screening,
                RoundConfig(partners=partners),
            ),
            sampler,
            run_id=run_id,
            device=choose_device("cpu"),
            author=author,
            settings=TrainerSettings(lean=is_lean),
            averages_on_host=averages_on_host,
        )

    return make
