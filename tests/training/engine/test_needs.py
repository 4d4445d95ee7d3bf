"""What `farandole.protocol.planning.needs` computes of a trainer, compared with what a trainer holds."""

import gc

import pytest
import torch
from torch import Tensor

from farandole.protocol.planning.needs import MESH_BYTES, TRAINER_BYTES, activation_bytes, needs_of
from farandole.protocol.run.manifest import InnerConfig, InnerName, ModelConfig
from farandole.protocol.run.rules import Codec, NoLoCoConfig

from ..conftest import MakeReplica, manifest_of, sent


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
    [("fp32", 1, "adamw"), ("int8", 1, "adamw"), ("int8", 4, "adamw"), ("int4", 4, "adamw"), ("int8", 1, "muon")],
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
