"""What each rank of `test_external` runs: a model that is cut in one way or another, and some rounds of it.

python ranks_program.py KIND JUDGES RANK RANKS FILE

KIND is how the model is cut.
JUDGES is "losses" if the loop computes some, by which contributions are judged.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3
from torch import distributed, nn
from torch.optim import SGD
from torch.optim.optimizer import Optimizer

from farandole.protocol.run.manifest import Manifest, ModelConfig
from farandole.protocol.run.own_model import ExternalModel
from farandole.protocol.run.rules import NoLoCoConfig, OuterRules, PlainConfig
from farandole.training.cluster.external import ExternalEngine, Loop, Turns
from farandole.training.cluster.ranks import (
    Follower,
    Order,
    Ranks,
    cut_of,
    open_ranks,
    parameters_of,
    reshard,
    whole_of,
)
from farandole.training.outer import contribution
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

    if kind == "fsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    elif kind == "hsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards")))
    elif kind == "both":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(module, mesh=mesh["data"])
    else:
        assert kind in ("plain", "replicated")


@torch.no_grad()
def forward(module: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the model makes of some numbers."""
    made: torch.Tensor = module(torch.linspace(-1, 1, 111).reshape(3, 37).to(dtype))
    return made


@torch.no_grad()
def step(module: nn.Module, optimizer: Optimizer) -> None:
    """Take an inner step of which each element has the same result, however parameters and momenta are cut."""
    for parameter in module.parameters():
        momentum = optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        local_of(momentum).add_(local_of(parameter), alpha=0.5)
        local_of(parameter).mul_(1.03125)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    return parameter if (own := cut_of(parameter)) is None else own.to_local()


class Loss:
    """A loss of whole parameters, which keeps its values."""

    def __init__(self, module: nn.Module) -> None:
        self.values = list[float]()
        self._module = module

    def __call__(self) -> float:
        wholes = [whole_of(parameter).detach() for parameter in parameters_of(self._module).values()]
        self.values.append(sum(float(whole.double().square().mean()) for whole in wholes))
        return self.values[-1]


def follow(ranks: Ranks, module: nn.Module, optimizer: Optimizer, loss: Loss | None) -> None:
    """Do what rank 0 does in `play_rounds`, as another rank."""
    follower = Follower(ranks, module, loss, [optimizer])
    follower.begin()
    while not follower.is_over:
        step(module, optimizer)
        follower.step_taken()


def lead(
    module: nn.Module, optimizer: Optimizer, outer: OuterRules, ranks: Ranks, loss: Loss | None
) -> tuple[str, list[float]]:
    """Play rounds in another thread, as a node does, and answer in this one, as a loop does."""
    turns = Turns()

    def play() -> tuple[str, list[float]]:
        try:
            return play_rounds(module, optimizer, outer, ranks, loss, turns)
        finally:
            turns.end()

    with ThreadPoolExecutor(1) as aside:
        playing = aside.submit(play)
        turns.wait()
        return playing.result()


def manifest_of(module: nn.Module, outer: OuterRules) -> Manifest:
    """Return the manifest of a run of the module."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters_of(module).items()}
    model = ModelConfig(1, 0, 0, 0, 0, 0, external=ExternalModel(shapes))
    return Manifest(name="ranks", model=model, outer=outer)


def play_rounds(
    module: nn.Module, optimizer: Optimizer, outer: OuterRules, ranks: Ranks, loss: Loss | None, turns: Turns
) -> tuple[str, list[float]]:
    """Rounds with another member, of which one is late and one refused; in between, continue from a checkpoint.

    Returns a hash of all that was sent and is, and numbers: how many losses were compared, the losses, and how far each
    contribution was used.
    """
    manifest = manifest_of(module, outer)
    loop = Loop(module, evaluate=loss, ranks=ranks, optimizers=[optimizer])
    engine = ExternalEngine(loop, manifest, turns, run_id=RUN_ID)
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    partner = ExternalEngine(Loop(other), manifest, Turns(), run_id=RUN_ID)
    hashed, final, clips = blake3(), list[int](), list[float]()
    for round_index in range(3):
        ranks.tell(Order.STEP)
        step(module, optimizer)
        engine.round_end.count_step(1)
        fragment = round_index % outer.fragments
        sent, received = bytearray(engine.round_end.contribution_bytes), bytearray(partner.round_end.contribution_bytes)
        size = engine.round_end.contribution(fragment)
        hashed.update(engine.round_end.encode(sent, final.append))
        assert final[-1] == size
        partner.round_end.contribute(received, fragment)
        if round_index == 1:
            engine.round_end.count_step(1)  # a late outer step keeps the weights' own progress
        arrived = received[:size]
        engine.round_end.take_in(arrived, size // 2)
        if round_index == 2:
            arrived[size - 2 :] = b"\xff\xff"  # the last element is another one, or not a number
        verdict = engine.round_end.screen(arrived)
        engine.round_end.apply(arrived if isinstance(verdict, Accept) else None, own_first=round_index != 1)
        partner.round_end.apply(bytes(sent[:size]), own_first=round_index == 1)
        clips.append(verdict.clip if isinstance(verdict, Accept) else -1.0)
        judged = str(verdict) if isinstance(verdict, Accept) else "refused"  # the reason is another rank's
        hashed.update(bytes(sent[:size]) + judged.encode())
        for tensor in engine.checkpoint.tensors().values():
            hashed.update(tensor.numpy().tobytes())
        if round_index == 1:
            hashed.update(b"".join(saved_and_loaded(engine)))
    losses = [] if loss is None else loss.values
    return hashed.hexdigest(), [len(losses), *losses, *clips]


def saved_and_loaded(engine: ExternalEngine) -> Iterator[bytes]:
    """Save a checkpoint in both ways and continue from it; yields both files."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint"
        engine.checkpoint.snapshot().save(file)
        yield file.read_bytes()
        engine.checkpoint.save(file)
        yield file.read_bytes()
        engine.checkpoint.load(file)


def hash_of(parameters: Iterable[torch.Tensor]) -> str:
    """Return a hash of whole parameters."""
    return blake3(b"".join(each.detach().float().numpy().tobytes() for each in parameters)).hexdigest()


CASES: tuple[OuterRules, ...] = (
    NoLoCoConfig(codec="fp32"),
    NoLoCoConfig(codec="int8"),
    NoLoCoConfig(codec="int4", fragments=2, gamma=0.6),
    NoLoCoConfig(codec="bf16"),
    PlainConfig(codec="int8", momentum_codec="int4"),
)


def main(kind: str, judges: str, rank: int, num_ranks: int, file: str) -> None:
    """Print a hash for each case, and one of the parameters as this rank has them in the end.

    In the next line, print the numbers of `play_rounds`.
    """
    vars(contribution)["_MAX_SECONDS"] = math.inf  # else a busy machine compares fewer losses
    if kind != "plain":
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    hashes, clips = list[str](), list[float]()
    for dtype in (torch.float32, torch.bfloat16):
        module = build().to(dtype)
        if kind != "plain":
            cut(module, kind, num_ranks)
        optimizer = SGD(module.parameters(), lr=1e-3)
        forward(module, dtype)  # after it FSDP2 keeps the root's parameters whole
        ranks, loss = open_ranks(), Loss(module) if judges == "losses" else None
        if ranks.is_leader:
            for outer in CASES:
                made, used = lead(module, optimizer, outer, ranks, loss)
                hashes.append(made)
                clips += used
            ranks.tell(Order.OVER)
        else:
            follow(ranks, module, optimizer, loss)
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
    print(*clips)
    if kind != "plain":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
