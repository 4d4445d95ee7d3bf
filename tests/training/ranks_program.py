"""What each rank of `test_ranks` runs: a model that is cut in one way or another, and one round of it.

python ranks_program.py KIND RANK RANKS FILE
"""

from __future__ import annotations

import sys

import torch
from blake3 import blake3
from torch import nn

from farandole.protocol.external_model import ExternalModel
from farandole.protocol.manifest import Manifest, ModelConfig
from farandole.protocol.outer_rules import NoLoCoConfig
from farandole.training.external import ExternalEngine, Turns
from farandole.training.ranks import Follower, Order, open_ranks, parameters_of, reshard, whole_of

RUN_ID = b"r" * 32


def build() -> nn.Module:
    """A model some of whose rows and columns are no multiples of the number of ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, 5), nn.LayerNorm(5))


def cut(module: nn.Module, kind: str, ranks: int) -> None:
    """Cut the parameters, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if kind == "fsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    elif kind == "hsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards")))
    elif kind in ("tensor", "both"):
        sizes = (1, ranks) if kind == "tensor" else (2, ranks // 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind == "both":
            fully_shard(module, mesh=mesh["data"])
    else:
        assert kind in ("plain", "replicated")


@torch.no_grad()
def forward(module: nn.Module) -> torch.Tensor:
    """What the model makes of some numbers."""
    made: torch.Tensor = module(torch.linspace(-1, 1, 21).reshape(3, 7))
    return made


def play_round(module: nn.Module, kind: str, num_ranks: int) -> tuple[str, str]:
    """A round with another member; returns hashes of this one's contribution and of its state afterwards."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters_of(build()).items()}
    model = ModelConfig(1, 0, 0, 0, 0, 0, external=ExternalModel(shapes))
    manifest = Manifest(name="ranks", model=model, outer=NoLoCoConfig(codec="int8"))
    if kind != "plain":
        cut(module, kind, num_ranks)
        forward(module)  # after it FSDP2 keeps the root's parameters whole
    ranks = open_ranks()
    if not ranks.is_leader:
        Follower(ranks, module, None).end()
        return "", ""
    engine = ExternalEngine(module, manifest, Turns(), run_id=RUN_ID, ranks=ranks)
    sent = bytearray(engine.contribution_bytes)
    engine.contribute(sent)
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    partner = ExternalEngine(other, manifest, Turns(), run_id=RUN_ID)
    received = bytearray(partner.contribution_bytes)
    partner.contribute(received)
    engine.apply(bytes(received))
    ranks.tell(Order.OVER)
    state = b"".join(tensor.numpy().tobytes() for tensor in engine.state().values())
    return blake3(bytes(sent)).hexdigest(), blake3(state).hexdigest()


def main(kind: str, rank: int, num_ranks: int, file: str) -> None:
    """Print the hashes, and one of the parameters as this rank has them in the end."""
    if kind != "plain":
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    module = build()
    sent, state = play_round(module, kind, num_ranks)
    computed, oracle = forward(module), build()
    reshard(module)
    with torch.no_grad():
        wholes = [whole_of(parameter) for parameter in module.parameters()]
        for parameter, whole in zip(oracle.parameters(), wholes, strict=True):
            parameter.copy_(whole)
    torch.testing.assert_close(computed, forward(oracle))
    parameters = blake3(b"".join(whole.detach().numpy().tobytes() for whole in wholes)).hexdigest()
    print(sent, state, parameters)
    if kind != "plain":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
