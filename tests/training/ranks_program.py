"""What each rank of `test_ranks` runs: a model that is cut in one way or another, and some rounds of it.

python ranks_program.py KIND RANK RANKS FILE

KIND is how the model is cut. With "seed-" in front, the ranks begin a run of a built-in model instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from blake3 import blake3
from torch import nn

from farandole.protocol.external_model import ExternalModel
from farandole.protocol.manifest import Manifest, ModelConfig
from farandole.protocol.outer_rules import NoLoCoConfig
from farandole.training import shared_vectors
from farandole.training.external import ExternalEngine, Turns
from farandole.training.follower import Follower
from farandole.training.model import build_model
from farandole.training.ranks import Order, Ranks, open_ranks, parameters_of, reshard, whole_of
from farandole.training.screening.rule import Accept

RUN_ID = b"r" * 32


def build() -> nn.Module:
    """A model of some blocks, some of whose rows and columns are no multiples of the number of ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 70), nn.Tanh(), nn.Linear(70, 11), nn.LayerNorm(11))


def cut(module: nn.Module, kind: str, ranks: int) -> None:
    """Cut the parameters, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if kind in ("fsdp", "apart"):
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
def forward(module: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the model makes of some numbers."""
    made: torch.Tensor = module(torch.linspace(-1, 1, 111).reshape(3, 37).to(dtype))
    return made


def part_if(is_apart: bool) -> None:
    """Have this rank see no shared memory of rank 0's, as on another machine."""
    if is_apart:

        def see_none(place: str) -> int:
            raise FileNotFoundError(place)

        shared_vectors._open = see_none


def play_rounds(module: nn.Module, outer: NoLoCoConfig, ranks: Ranks, *, is_shared: bool) -> str:
    """Rounds with another member, of which one is late and one refused; returns a hash of all that was sent and is."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters_of(build()).items()}
    model = ModelConfig(1, 0, 0, 0, 0, 0, external=ExternalModel(shapes))
    manifest = Manifest(name="ranks", model=model, outer=outer)
    engine = ExternalEngine(module, manifest, Turns(), run_id=RUN_ID, ranks=ranks)
    assert engine.shares_vectors == is_shared
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    partner = ExternalEngine(other, manifest, Turns(), run_id=RUN_ID)
    hashed, final = blake3(), list[int]()
    for round_index in range(3):
        fragment = round_index % outer.fragments
        sent, received = bytearray(engine.contribution_bytes), bytearray(partner.contribution_bytes)
        size = engine.contribution(fragment)
        hashed.update(engine.encode(sent, final.append))
        assert final[-1] == size
        partner.contribute(received, fragment)
        if round_index == 1:
            engine.count_step(1)  # a late outer step keeps the weights' own progress
        usable = bytes(received[:size])
        engine.take_in(bytearray(usable), size // 2)
        if round_index == 2:
            received[size - 2 :] = b"\xff\xff"  # the last element is another one, or not a number
        verdict = engine.screen(bytes(received[:size]))
        engine.apply(bytes(received[:size]) if isinstance(verdict, Accept) else None, own_first=round_index != 1)
        partner.apply(bytes(sent[:size]), own_first=round_index == 1)
        judged = str(verdict) if isinstance(verdict, Accept) else "refused"  # the reason is another rank's
        hashed.update(bytes(sent[:size]) + judged.encode())
        for tensor in engine.state().values():
            hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


MODEL = ModelConfig(num_layers=2, width=16, num_heads=2, hidden=24, context=16, vocabulary=256)
SEED = 7


def hash_of(parameters: Iterable[torch.Tensor]) -> str:
    """Return a hash of whole parameters."""
    return blake3(b"".join(each.detach().float().numpy().tobytes() for each in parameters)).hexdigest()


def begin_from_seed(kind: str, num_ranks: int) -> str:
    """Begin a run of a built-in model, with a module of other weights; returns a hash of those that it has then."""
    module = build_model(MODEL, SEED + 1)
    cut(module, kind, num_ranks)
    ranks = open_ranks()
    if ranks.is_leader:
        manifest = Manifest(name="ranks", model=MODEL, seed=SEED)
        ExternalEngine(module, manifest, Turns(), run_id=RUN_ID, ranks=ranks, tokens_per_step=1).begin_anew()
        ranks.tell(Order.OVER)
    else:
        Follower(ranks, module, None).end()
    reshard(module)
    return hash_of([whole_of(parameter) for parameter in module.parameters()])


CASES = (
    NoLoCoConfig(codec="fp32"),
    NoLoCoConfig(codec="int8"),
    NoLoCoConfig(codec="int4", fragments=2, gamma=0.6),
    NoLoCoConfig(codec="topk", topk=32),
)


def main(kind: str, rank: int, num_ranks: int, file: str) -> None:
    """Print a hash for each case, and one of the parameters as this rank has them in the end."""
    of_seed, kind = kind.startswith("seed-"), kind.removeprefix("seed-")
    if kind != "plain":
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    part_if(kind == "apart" and rank == 1)
    hashes = [begin_from_seed(kind, num_ranks)] if of_seed else []
    for dtype in () if of_seed else (torch.float32, torch.bfloat16):
        module = build().to(dtype)
        if kind != "plain":
            cut(module, kind, num_ranks)
            forward(module, dtype)  # after it FSDP2 keeps the root's parameters whole
        ranks = open_ranks()
        if ranks.is_leader:
            is_shared = ranks.are_many and kind != "apart"
            hashes += [play_rounds(module, outer, ranks, is_shared=is_shared) for outer in CASES]
            ranks.tell(Order.OVER)
        else:
            Follower(ranks, module, None).end()
        computed, oracle = forward(module, dtype), build().to(dtype)
        reshard(module)
        with torch.no_grad():
            wholes = [whole_of(parameter) for parameter in module.parameters()]
            for parameter, whole in zip(oracle.parameters(), wholes, strict=True):
                parameter.copy_(whole)
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(computed, forward(oracle, dtype), rtol=tolerance, atol=tolerance)
        hashes.append(hash_of(wholes))
    print(*hashes)
    if kind != "plain":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
