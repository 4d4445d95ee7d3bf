"""Adapters of a base as planned by its sizes, compared with those that peft makes, and with what a process holds."""

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.planning.adapters import BASES, Base
from farandole.protocol.planning.needs import MESH_BYTES, TRAINER_BYTES, needs_of
from farandole.protocol.run.manifest import MAX_MANIFEST_BYTES, Manifest
from farandole.protocol.run.models import shapes_of
from farandole.protocol.run.rules import PlainConfig
from farandole.training.model.adapters import Adapted, adapters_of
from farandole.training.model.model import language_loss
from farandole.training.model.own_model import shapes_in

from ..conftest import MakeReplica, kept_bytes, manifest_of, sent
from ..engine.test_needs import held_bytes

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of these packages about each other

LLAMAS = {
    "7B": {"vocab_size": 32_000, "intermediate_size": 11_008},
    "70B": {
        "vocab_size": 128_256,
        "hidden_size": 8_192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
}
SMALL = Base({}, num_layers=3, width=64, hidden=160, vocabulary=64, context=128)


def adapters_of_a_llama(size: str, rank: int) -> tuple[Adapted, dict[str, tuple[int, ...]]]:
    """Return peft's adapters of a Llama in bf16, whose own parameters are buffers, and the shapes of these."""
    from peft import LoraConfig, get_peft_model  # takes a second, also of testers that do not run this

    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMAS[size])).bfloat16()
    shapes = shapes_in(module)
    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return adapters_of(get_peft_model(module, config)), shapes


@pytest.mark.parametrize("size", ["7B", "70B"])
def test_adapters_of_a_base_without_its_weights_are_as_planned(size: str) -> None:
    with torch.device("meta"):
        module, shapes = adapters_of_a_llama(size, 16)
    base = BASES[size]
    assert base.shapes == shapes
    assert shapes_in(module) == shapes_of(base.adapted(16))
    assert sum(each.nbytes for each in module.buffers()) == pytest.approx(base.weight_bytes(), rel=0.001)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    held = 2 * sum(each.nbytes for each in module.parameters())  # and their gradients
    held += sum(each.nbytes for state in optimizer.state.values() for each in state.values() if each.ndim)
    run = Manifest(name="a", model=base.adapted(16), outer=PlainConfig(codec="int8"))
    assert len(msgspec.msgpack.encode(run)) < MAX_MANIFEST_BYTES / 16, "the names of 80 layers, too"
    needs = needs_of(run)
    assert needs.on_gpu.device == pytest.approx(held + 2 * needs.num_parameters, rel=0.01)  # copies in bf16
    assert needs.contribution_bytes == pytest.approx(sum(each.numel() for each in module.parameters()), rel=0.05)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_small_bases_activations_are_as_planned(on_gpu: bool) -> None:
    module, _ = adapters_of_a_llama("small", 4)
    tokens = torch.zeros(1, SMALL.context + 1, dtype=torch.long)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=on_gpu):
            return language_loss(module, tokens)

    assert sum(kept_bytes(loss, module)) == pytest.approx(SMALL.kept_bytes(4, on_gpu=on_gpu), rel=0.1)


def test_a_process_holds_what_is_planned_of_a_small_bases_adapters(make_replica: MakeReplica) -> None:
    module, shapes = adapters_of_a_llama("small", 64)
    adapted = replace(SMALL, shapes=shapes).adapted(64)
    outer = PlainConfig(codec="int8")
    before = held_bytes()
    replica = make_replica(module=module, rule=outer)
    replica.learn()
    transfer = sent(replica)
    snapshot = replica.checkpoint.snapshot()
    held = held_bytes() - before + sum(each.nbytes for each in module.parameters())
    needs = needs_of(manifest_of(adapted, outer=outer))
    step = 4 * needs.num_parameters
    beside = TRAINER_BYTES + MESH_BYTES + 2 * needs.contribution_bytes + step
    assert snapshot.num_bytes == needs.checkpoint_bytes
    assert len(transfer) == needs.contribution_bytes
    assert held == pytest.approx(needs.on_cpu.host - beside, rel=0.1)
