import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from farandole.protocol.manifest import InnerConfig, ModelConfig, OuterConfig
from farandole.training.data import Sampler, Text
from farandole.training.device import choose_device
from farandole.training.learner import Learner
from farandole.training.model import build_model

RUN_ID = hashlib.sha256(b"a run").digest()
ALICE, BOB = b"a" * 32, b"b" * 32

MakeReplica = Callable[..., Learner]


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
    return Text(tokens[:3_000].astype(np.uint8), tokens[3_000:].astype(np.uint8), 2)


@pytest.fixture(scope="session")
def make_replica(model: ModelConfig, inner: InnerConfig, text: Text) -> MakeReplica:
    def make(author: bytes = ALICE, run_id: bytes = RUN_ID, seed: int = 7, **outer: object) -> Learner:
        sampler = Sampler(text, run_id=run_id, author=author, batch_size=inner.batch_size, context=model.context)
        settings = OuterConfig(**outer)  # type: ignore[arg-type]
        return Learner(build_model(model, seed), inner, settings, sampler, run_id=run_id, device=choose_device("cpu"))

    return make
