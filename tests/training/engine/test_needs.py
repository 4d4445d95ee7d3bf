"""What `farandole.protocol.planning.needs` computes of a trainer, compared with what a trainer holds."""

import gc

import msgspec
import pytest
import torch
from torch import Tensor

from farandole.protocol.planning.needs import MESH_BYTES, TRAINER_BYTES, activation_bytes, needs_of
from farandole.protocol.run.manifest import InnerConfig, InnerName, Manifest, ModelConfig
from farandole.protocol.run.models import num_parameters, preset
from farandole.protocol.run.rules import Codec, NoLoCoConfig
from farandole.training.model.model import build_model, language_loss

from ..conftest import MakeReplica, kept_bytes, manifest_of, sent


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
    ("codec", "fragments", "optimizer"),
    [
        ("fp32", 1, "adamw"),
        ("int8", 1, "adamw"),
        ("int8", 4, "adamw"),
        ("int4", 4, "adamw"),
        ("topk", 2, "adamw"),
        ("int8", 1, "muon"),
    ],
)
def test_a_trainer_holds_the_vectors_that_are_counted(
    make_replica: MakeReplica, model: ModelConfig, codec: Codec, fragments: int, optimizer: InnerName
) -> None:
    inner = InnerConfig(optimizer=optimizer)
    before = held_bytes()
    replica = make_replica(inner_settings=inner, codec=codec, fragments=fragments)
    replica.learn()
    sent(replica)
    snapshot = replica.checkpoint.snapshot()
    held = held_bytes() - before

    manifest = manifest_of(model, inner=inner, outer=NoLoCoConfig(codec=codec, fragments=fragments))
    needs = needs_of(manifest)
    step = max(4 * -(-needs.num_parameters // fragments), activation_bytes(manifest, 0))
    beside = TRAINER_BYTES + MESH_BYTES + 2 * needs.contribution_bytes + step
    assert snapshot.num_bytes == pytest.approx(needs.checkpoint_bytes, rel=0.01 if optimizer == "muon" else 0)
    assert replica.round_end.contribution_bytes == needs.contribution_bytes
    assert held == pytest.approx(needs.on_cpu.host - beside, rel=0.05)  # and the rotary tables


@pytest.mark.parametrize(("name", "context"), [("3M", 256), ("10M", 128), ("30M", 64)])
def test_a_backward_pass_keeps_what_is_counted(name: str, context: int) -> None:
    model = msgspec.structs.replace(preset(name), context=context)
    module = build_model(model, seed=0)
    kept = kept_bytes(lambda: language_loss(module, torch.zeros(1, context + 1, dtype=torch.long)), module)
    counted = activation_bytes(Manifest(name="a", model=model), 0)
    assert sum(kept) == pytest.approx(counted, rel=0.1)
    assert num_parameters(model) == needs_of(Manifest(name="a", model=model)).num_parameters
