"""Adapters of a base as planned by its sizes, compared with those that peft makes, and with what a process holds."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.planning.adapters import BASES, Base
from farandole.protocol.planning.needs import MESH_BYTES, TRAINER_BYTES, needs_of
from farandole.protocol.run.families import hf_config_from_dict
from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.run.models import shapes_of
from farandole.protocol.run.rules import PlainConfig
from farandole.training.model.adapters import Adapted, adapters_of
from farandole.training.model.model import language_loss
from farandole.training.model.own_model import shapes_in

from ..conftest import MakeReplica, kept_bytes, manifest_of, sent
from ..engine.test_needs import held_bytes

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'lora' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of these packages about each other

# A Llama, as a config.json says it.
SMALL = {**BASES["7B"], "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 64}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 128}


def adapters_and_base(sizes: Mapping[str, Any], rank: int) -> tuple[Adapted, Base]:
    """Return peft's adapters of a Llama in bf16, whose own parameters are buffers, and how they are planned."""
    known = hf_config_from_dict(sizes)
    model = msgspec.convert(
        {**known.sizes, "context": known.max_context, "hf": msgspec.to_builtins(known)}, ModelConfig
    )
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    return adapters_of(peft.get_peft_model(module, config)), Base(model, rank)


@pytest.mark.parametrize("size", BASES)
def test_adapters_of_a_base_without_its_weights_are_as_planned(size: str) -> None:
    with torch.device("meta"):
        module, base = adapters_and_base(BASES[size], 16)
    assert shapes_in(module) == shapes_of(base.adapted)
    assert sum(each.nbytes for each in module.buffers()) == pytest.approx(base.weight_bytes(), rel=0.001)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    held = 2 * sum(each.nbytes for each in module.parameters())  # and their gradients
    held += sum(each.nbytes for state in optimizer.state.values() for each in state.values() if each.ndim)
    run = Manifest(name="a", model=base.adapted, outer=PlainConfig(codec="int8"))
    needs = needs_of(run)
    assert needs.on_gpu.device == pytest.approx(held + 2 * needs.num_parameters, rel=0.01)  # copies in bf16
    assert needs.contribution_bytes == pytest.approx(sum(each.numel() for each in module.parameters()), rel=0.05)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_small_bases_activations_are_as_planned(on_gpu: bool) -> None:
    module, base = adapters_and_base(SMALL, 4)
    tokens = torch.zeros(1, base.model.context + 1, dtype=torch.long)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=on_gpu):
            return language_loss(module, tokens)

    assert sum(kept_bytes(loss, module)) == pytest.approx(base.kept_bytes(on_gpu=on_gpu), rel=0.1)


def test_a_process_holds_what_is_planned_of_a_small_bases_adapters(make_replica: MakeReplica) -> None:
    module, base = adapters_and_base(SMALL, 64)
    outer = PlainConfig(codec="int8")
    before = held_bytes()
    replica = make_replica(module=module, rule=outer)
    replica.learn()
    transfer = sent(replica)
    snapshot = replica.checkpoint.snapshot()
    held = held_bytes() - before + sum(each.nbytes for each in module.parameters())
    needs = needs_of(manifest_of(base.adapted, outer=outer))
    step = 4 * needs.num_parameters
    beside = TRAINER_BYTES + MESH_BYTES + 2 * needs.contribution_bytes + step
    assert snapshot.num_bytes == needs.checkpoint_bytes
    assert len(transfer) == needs.contribution_bytes
    assert held == pytest.approx(needs.on_cpu.host - beside, rel=0.1)
