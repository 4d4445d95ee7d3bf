"""A model of transformers', in stages: it computes, starts and learns as the whole one of transformers does."""

import math
import sys
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from farandole.protocol.run.families import hf_config_from_dict
from farandole.protocol.run.manifest import ModelConfig
from farandole.protocol.run.models import names_of_stage, num_parameters, preset, shapes_of, stage_parameters
from farandole.training.base.errors import TrainingError
from farandole.training.base.parameters import layout_of
from farandole.training.cluster.external import ExternalEngine, Loop, Turns
from farandole.training.model.model import StageModule, cross_entropy
from farandole.training.model.stages import build_module, build_stage

from ...protocol.run import test_families as families
from ..conftest import RUN_ID, manifest_of

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

LLAMA = {**families.LLAMA, "vocab_size": 64, "intermediate_size": 48}
GPT2 = {**families.GPT2, "vocab_size": 64, "n_inner": 48}
SETTINGS = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16, "hidden_act": "gelu"},
    "llama-3": {
        **LLAMA,
        "tie_word_embeddings": True,
        "rope_parameters": {**families.LLAMA_3_ROPE, "rope_theta": 500_000.0},
    },
    "llama-linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
}


def hf_model(name: str, num_stages: int = 1) -> ModelConfig:
    return ModelConfig(
        num_layers=3,
        width=32,
        num_heads=4,
        hidden=48,
        context=16,
        vocabulary=64,
        num_stages=num_stages,
        hf=hf_config_from_dict(SETTINGS[name]),
    )


def of_transformers(name: str) -> Any:
    """The whole model as transformers makes it, still with weights that it has drawn."""
    from farandole.training.model.hf import hf_config

    whole = {"llama": transformers.LlamaForCausalLM, "gpt2": transformers.GPT2LMHeadModel}
    return whole[name.partition("-")[0]](hf_config(hf_model(name)))


def with_weights(whole: Any, stages: list[StageModule]) -> Any:
    """Of all stages together: their names are transformers' own."""
    weights = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    if whole.config.tie_word_embeddings:
        weights["lm_head.weight"] = whole.get_input_embeddings().weight  # the same memory: no weights of its own
    whole.load_state_dict(weights, strict=True)
    return whole


TOKENS = torch.arange(2 * 17).view(2, 17) * 7 % 64


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_stages_compute_what_transformers_computes(name: str, num_stages: int) -> None:
    stages = [build_stage(hf_model(name, num_stages), 7, stage) for stage in range(num_stages)]
    whole = with_weights(of_transformers(name), stages)

    x = stages[0].embed(TOKENS[:, :-1])
    for stage in stages:
        x = stage.advance(x)
    logits = stages[0].logits(x)
    expected = whole(TOKENS[:, :-1], use_cache=False).logits
    assert torch.equal(logits, expected)
    assert logits.std() > 0.01

    cross_entropy(logits, TOKENS[:, 1:]).backward()
    cross_entropy(expected, TOKENS[:, 1:]).backward()
    gradients = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    expected_gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        assert gradient is not None
        assert torch.equal(gradient, expected_gradients[parameter]), parameter


@pytest.mark.parametrize("name", ["llama-biases", "gpt2", "gpt2-untied"])
def test_initial_weights_are_drawn_as_in_transformers(name: str) -> None:
    torch.manual_seed(0)
    ours = build_module(hf_model(name), 7).state_dict()
    for part, theirs in of_transformers(name).state_dict().items():
        if theirs.ndim == 1:
            assert torch.equal(ours[part], theirs), part
        elif part in ours:  # a tied head is not
            within = 5 / math.sqrt(theirs.numel())  # five times what the difference of two estimates varies by
            assert float(ours[part].std()) == pytest.approx(float(theirs.std()), rel=within), part
            assert abs(float(ours[part].mean())) < within * float(theirs.std()), part


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_stage_takes_memory_for_its_own_parameters_alone(name: str, stage: int) -> None:
    state = torch.get_rng_state()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        module = build_stage(hf_model(name, 3), 7, stage)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    own = sum(4 * parameter.numel() for parameter in module.parameters())
    assert own <= allocated < own + 2_048  # tables of angles, and scalars on their way to them
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), state)  # and nothing was drawn for what is thrown away


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "farandole.training.model.hf", None)
    with pytest.raises(TrainingError, match=r"pip install 'transformers"):
        build_module(hf_model("llama"), 7)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gpt2-untied"])
def test_a_loop_brings_the_model_as_transformers_makes_it(name: str) -> None:
    model = hf_model(name)
    manifest = manifest_of(model, seed=3)
    module = of_transformers(name)
    engine = ExternalEngine(Loop(module, tokens_per_step=1), manifest, Turns(), run_id=RUN_ID)
    engine.begin_anew()
    oracle = build_module(model, 3)
    assert engine.checkpoint.layout == layout_of(oracle, manifest.outer.codec)
    for parameter_name, parameter in oracle.named_parameters():
        assert torch.equal(module.get_parameter(parameter_name), parameter), parameter_name
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(module(tokens).logits, oracle(tokens))


@pytest.mark.parametrize("model", [preset("tiny"), *(hf_model(name) for name in SETTINGS)], ids=["own", *SETTINGS])
def test_names_shapes_and_order_are_the_modules(model: ModelConfig) -> None:
    whole = {name: tuple(parameter.shape) for name, parameter in build_module(model, 0).named_parameters()}
    assert list(shapes_of(model).items()) == list(whole.items())
    assert num_parameters(model) == sum(map(math.prod, whole.values()))
    for stages in (2, 3):
        cut = replace(model, num_stages=stages)
        for stage in range(stages):
            own = dict(build_stage(cut, 0, stage).named_parameters())
            assert names_of_stage(cut, stage) == own.keys()
            assert stage_parameters(cut, stage) == sum(parameter.numel() for parameter in own.values())
