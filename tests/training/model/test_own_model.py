"""One's own module: what comes from a seed, what is refused, and that nothing runs that is not allowed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import names_of_stage, num_parameters, shapes_of, stage_parameters
from farandole.protocol.run.own_model import OwnModel, Settings
from farandole.training.base.errors import TrainingError
from farandole.training.model.own_model import try_own_model
from farandole.training.model.stages import build_module, build_stage

from ..conftest import MakeReplica

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_model"
BUILD, WHOLE = "own_model.convolutional:build", "own_model.convolutional:build_whole"
CONFIG: Settings = {"width": 16, "depth": 3}

# One fault each, but for `good` and `whole`.
FAULTY = """
import torch, torch.nn.functional as F
from torch import nn

class Ends(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
    def embed(self, tokens): return self.embedding(tokens)
    def logits(self, x): return F.linear(x, self.embedding.weight)

class Good:
    width, num_layers = 8, 2
    def __init__(self, config): self.vocabulary = config["vocabulary"]
    def ends(self): return Ends(self.vocabulary, 8)
    def layer(self, index): return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

def other(**methods): return type("Other", (Good,), methods)
class Mean(nn.Module):
    def forward(self, x): return x + x.mean(1, keepdim=True)

def good(config): return Good(config)
def fails(config): return config["no such setting"]
def number(config): return 3
acausal = other(layer=lambda self, index: nn.Sequential(nn.Linear(8, 8), Mean()))
uneven = other(layer=lambda self, index: nn.Linear(8, 8, bias=index == 0))
wide = other(width=16)
headless = other(ends=lambda self: nn.Embedding(self.vocabulary, 8))
double = other(layer=lambda self, index: nn.Linear(8, 8).double())
frozen = other(layer=lambda self, index: nn.Linear(8, 8).requires_grad_(False))
dropping = other(layer=lambda self, index: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))

class Unseeded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0) if not SEEN else None))
        SEEN.append(1)
    def forward(self, x): return x @ self.weight
SEEN = []
unseeded = other(layer=lambda self, index: Unseeded())

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
    def forward(self, x): return self.norm(x.transpose(1, 2)).transpose(1, 2)
normed = other(layer=lambda self, index: Normed())

class Whole(nn.Module):
    def __init__(self, vocabulary, outputs):
        super().__init__()
        self.layers = nn.ModuleDict({"7": nn.Embedding(vocabulary, 8)})
        self.out = nn.Linear(8, outputs)
    def forward(self, tokens): return self.out(self.layers["7"](tokens))
def whole(config): return Whole(config["vocabulary"], config["vocabulary"])
def narrow(config): return Whole(config["vocabulary"], 9)
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "faulty_models.py").write_text(FAULTY)
    (tmp_path / "broken_models.py").write_text("raise OSError('no licence')")
    (tmp_path / "needy_models.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("faulty_models", "broken_models", "needy_models"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)


def tried(function: str, allowed: tuple[str, ...] | None = None, vocabulary: int = 32) -> tuple[OwnModel, int, int]:
    return try_own_model(function, CONFIG, 12, vocabulary, (function,) if allowed is None else allowed)


def model_of(function: str, vocabulary: int = 32, num_stages: int = 1) -> ModelConfig:
    """As a manifest would have it."""
    own, num_layers, width = tried(function, vocabulary=vocabulary)
    return ModelConfig(
        num_layers=num_layers,
        width=width,
        num_heads=0,
        hidden=0,
        context=12,
        vocabulary=vocabulary,
        num_stages=num_stages,
        own=own,
    )


@pytest.mark.parametrize("function", [BUILD, WHOLE])
def test_what_is_counted_is_what_is_built(function: str) -> None:
    model = model_of(function)

    module = build_module(model, 0, allowed_models=[function])

    assert {name: tuple(parameter.shape) for name, parameter in module.named_parameters()} == shapes_of(model)
    assert list(shapes_of(model)) == [name for name, _ in module.named_parameters()]
    assert num_parameters(model) == sum(parameter.numel() for parameter in module.parameters())


def test_initial_weights_follow_from_the_seed_alone() -> None:
    model = model_of(BUILD)
    torch.manual_seed(1)
    first = build_module(model, 7, allowed_models=[BUILD]).state_dict()
    torch.manual_seed(2)
    drawn_before = torch.get_rng_state()

    second, other = (build_module(model, seed, allowed_models=[BUILD]).state_dict() for seed in (7, 8))

    assert torch.equal(torch.get_rng_state(), drawn_before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["ends.embedding.weight"], other["ends.embedding.weight"])
    assert not torch.equal(first["layers.0.out.weight"], first["layers.1.out.weight"])


def test_stages_together_are_the_whole() -> None:
    model = model_of(BUILD, num_stages=3)
    whole = build_module(model, 3, allowed_models=[BUILD])
    stages = [build_stage(model, 3, stage, [BUILD]) for stage in range(3)]
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))

    x = stages[0].embed(tokens)
    for stage in stages:
        x = stage.advance(x)

    assert torch.equal(stages[0].logits(x), whole(tokens))
    for index, stage in enumerate(stages):
        assert {name for name, _ in stage.named_parameters()} == names_of_stage(model, index)
        assert sum(parameter.numel() for parameter in stage.parameters()) == stage_parameters(model, index)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", "the model's own code failed: KeyError: 'no such setting'"),
        ("number", "returned a int: it must return an nn.Module, or an object with width, num_layers"),
        ("acausal", "it sees what it is to predict"),
        ("unseeded", "not the same when it is made twice from one seed"),
        ("uneven", "layer 1 are not those of layer 0"),
        ("wide", r"embed makes \(2, 12, 8\) of two texts, and not \(2, 12, 16\)"),
        ("headless", r"what the model's ends\(\) returns has no method embed"),
        ("double", "is torch.float64 on cpu: make it float32"),
        ("frozen", "takes no gradient"),
        ("normed", "keeps running statistics"),
        ("narrow", r"makes \(2, 12, 9\) of tokens \(2, 12\): it must make logits \(2, 12, 32\)"),
        ("nothing", "has no function 'nothing'"),
        ("nobody_has_this.models:build", "no module 'nobody_has_this' here: install the package"),
        ("own_model.missing:build", "no module 'own_model.missing' here"),
        ("needy_models:build", "needs the Python package 'a_package_that_nobody_has'"),
        ("broken_models:build", "broken_models cannot be imported: OSError: no licence"),
    ],
)
def test_what_cannot_be_trained_or_is_not_there_is_said_when_a_run_is_made(function: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        tried(function if ":" in function else f"faulty_models:{function}")


@pytest.mark.usefixtures("faulty")
def test_dropout_is_refused_where_work_is_done_twice() -> None:
    model = model_of("faulty_models:dropping")
    build_module(model, 0, allowed_models=["faulty_models:dropping"])
    with pytest.raises(TrainingError, match="dropout"):
        build_stage(replace(model, num_stages=2), 0, 1, ["faulty_models:dropping"])


@pytest.mark.usefixtures("faulty")
def test_only_what_is_allowed_is_imported() -> None:
    for allowed in ((), ("faulty_models",), ("faulty_models:*",), ("faulty_models:good ",), ("other:good",)):
        with pytest.raises(TrainingError, match="--allow-model faulty_models:good"):
            tried("faulty_models:good", allowed)
    assert "faulty_models" not in sys.modules

    tried("faulty_models:good")
    assert "faulty_models" in sys.modules


def test_another_version_of_the_code_is_found_out() -> None:
    model = model_of(BUILD)
    assert model.own is not None
    own = model.own
    for change, message in (
        ({"ends": {**own.ends, "norm.weight": (17,)}}, r"norm.weight: \(16,\), and the run's \(17,\)"),
        ({"layer": {**own.layer, "gate.weight": (4,)}}, r"gate.weight: none, and the run's \(4,\)"),
        ({"layer": dict(reversed(own.layer.items()))}, "their order"),
        ({"package": "own-model 0.2.0", "ends": {}}, "made with, own-model 0.2.0"),
    ):
        with pytest.raises(TrainingError, match=message):
            build_module(replace(model, own=replace(own, **change)), 0, allowed_models=[BUILD])


@pytest.mark.usefixtures("faulty")
def test_validation_is_without_dropout(make_replica: MakeReplica) -> None:
    module = build_module(model_of("faulty_models:dropping", 64), 0, allowed_models=["faulty_models:dropping"])
    learner = make_replica(module=module)

    assert learner.evaluate(2) == learner.evaluate(2)
    assert module.training
