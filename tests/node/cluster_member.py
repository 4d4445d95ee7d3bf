"""What each member of `test_clusters` runs, in one process or in each rank that torchrun starts.

    cluster_member.py RUN SEED ROUNDS FOLDER MEMBERS

RUN is an invite, or "attached" for the node in FARANDOLE_HOME. Members begin together, when this number of them has
put a file into the folder.

The model is farandole's own, cut by FSDP2 if there are several ranks. Batches have one size, and a member's ranks share
them: a step's windows depend on the member's seed and on the tokens that it has trained on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, distributed

import farandole
from farandole.protocol.run.manifest import ModelConfig
from farandole.training.model.model import Transformer, build_model

MODEL: Final = ModelConfig(num_layers=2, width=64, num_heads=4, hidden=128, context=64, vocabulary=256)
BATCH: Final = 8
LEARNING_RATE: Final = 2e-3
# Of the first learning rate, which decreases with the rounds.
LAST_RATE: Final = 0.05
POLL_SECONDS: Final = 0.1
TOKENS: Final = BATCH * MODEL.context
HELD_OUT_BYTES: Final = 100_000
# As many as of a step: members measure this between two steps, and their partners wait for it.
SCREENED_WINDOWS: Final = BATCH


def read_text() -> tuple[Tensor, Tensor]:
    """Return the text to train on, and the held-out one: bytes (n,) of Python's own modules."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    return data[:-HELD_OUT_BYTES], data[-HELD_OUT_BYTES:]


def windows(text: Tensor, count: int, seed: int) -> Tensor:
    """Return windows (count, T + 1) of the text, drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - MODEL.context, (count,), generator=generator)
    return torch.stack([text[start : start + MODEL.context + 1] for start in starts])


@torch.no_grad()
def held_out_loss(model: Transformer, held_out: Tensor, count: int) -> float:
    """Return the loss on windows of the held-out text, in nats a byte."""
    batch = windows(held_out, count, 0)
    return float(model(batch[:, :-1], batch[:, 1:]))


def shard(model: Transformer) -> None:
    """Cut the model over the ranks that torchrun has started."""
    from torch.distributed.device_mesh import init_device_mesh  # plain members do without, and begin sooner
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def meet(folder: Path, seed: int, members: int) -> None:
    """Wait until all members are here; one that is started again finds them."""
    (folder / str(seed)).touch()
    while len(list(folder.iterdir())) < members:
        time.sleep(POLL_SECONDS)  # without end: the test has the deadline, and ends this process


def main(run: str, seed: int, rounds: int, folder: Path, members: int) -> None:
    rank, ranks = 0, 1
    model = build_model(MODEL, 0)
    if "WORLD_SIZE" in os.environ:
        shard(model)
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
    text, held_out = read_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    meet(folder, seed, members)
    with farandole.NoLoCo(
        model,
        optimizer,
        run=None if run == "attached" else run,
        evaluate=lambda: held_out_loss(model, held_out, SCREENED_WINDOWS),
        tokens_per_step=TOKENS,
    ) as joined:
        print(f"rank {rank} begins at round {joined.round}", flush=True)
        while joined.round < rounds and not joined.is_over:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(LAST_RATE, 1 - joined.round / rounds)
            step = joined.tokens // TOKENS
            batch = windows(text, BATCH, seed * 1_000_000 + step)[rank::ranks]
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            joined.report(loss.item())
        print(f"rank {rank} ends at round {joined.round}", flush=True)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
