"""What `farandole.protocol.needs` computes of a trainer, compared with what a trainer holds."""

import gc

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.manifest import Manifest, ModelConfig, TokenizerConfig
from farandole.protocol.needs import MESH_BYTES, TRAINER_BYTES, activation_bytes, needs_of
from farandole.protocol.outer_rules import Codec, NoLoCoConfig
from farandole.protocol.presets import num_parameters, preset
from farandole.training.model import build_model, language_loss

from .conftest import MakeReplica


def held_bytes() -> int:
    """Of all tensors of this process, each memory once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, torch.nn.Parameter):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("codec", "fragments"), [("fp32", 1), ("int8", 1), ("int8", 4), ("int4", 1), ("int4", 4), ("topk", 2)]
)
def test_a_trainer_holds_the_vectors_that_are_counted(
    make_replica: MakeReplica, model: ModelConfig, codec: Codec, fragments: int
) -> None:
    before = held_bytes()
    replica = make_replica(codec=codec, fragments=fragments)
    replica.learn()
    replica.contribute(bytearray(replica.contribution_bytes))
    snapshot = replica.snapshot()
    held = held_bytes() - before

    tokenizer = TokenizerConfig("tokenizers", "0" * 64)
    outer = NoLoCoConfig(codec=codec, fragments=fragments)
    manifest = Manifest(name="a", model=model, tokenizer=tokenizer, outer=outer)
    needs = needs_of(manifest)
    step = max(8 * needs.num_parameters, activation_bytes(manifest, 0))
    beside = TRAINER_BYTES + MESH_BYTES + 2 * needs.contribution_bytes + step
    assert snapshot.num_bytes == needs.checkpoint_bytes
    assert replica.contribution_bytes == needs.contribution_bytes
    assert held == pytest.approx(needs.on_cpu.host - beside, rel=0.05)  # and the rotary tables


@pytest.mark.parametrize(("name", "context"), [("3M", 256), ("10M", 128), ("30M", 64)])
def test_a_backward_pass_keeps_what_is_counted(name: str, context: int) -> None:
    model = msgspec.structs.replace(preset(name), context=context)
    module = build_model(model, seed=0)
    own = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = language_loss(module, torch.zeros(1, context + 1, dtype=torch.long))

    assert loss.requires_grad
    counted = activation_bytes(Manifest(name="a", model=model), 0)
    assert sum(kept.values()) == pytest.approx(counted, rel=0.1)
    assert num_parameters(model) == needs_of(Manifest(name="a", model=model)).num_parameters
